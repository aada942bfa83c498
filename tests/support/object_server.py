"""A real S3 server in a process of its own (moto's), with one bucket, that can be stopped, hung and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3

from tests.support.processes import freeze
from tests.support.server import free_port

BUCKET = "artifacts"
SECRET = "a-secret-that-no-log-may-hold"
CREDENTIALS: Mapping[str, str] = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST", "AWS_SECRET_ACCESS_KEY": SECRET}


@dataclass
class ObjectServer:
    """Where it listens, and what can be done to it. What it holds is in its memory: it ends with the process."""

    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def options(self, prefix: str, **more: object) -> dict[str, object]:
        """The settings of a server that keeps its checkpoints here."""
        url = f"s3://{BUCKET}/{prefix}"
        return {"artifacts_url": url, "artifacts_endpoint": self.endpoint, "artifacts_timeout": 3.0, **more}

    def arguments(self, prefix: str) -> list[str]:
        """The same on a command line."""
        pairs = self.options(prefix).items()
        return [word for name, value in pairs for word in (f"--{name.replace('_', '-')}", str(value))]

    def start(self) -> None:
        """Start the process and make the bucket."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        environment = {**os.environ, **CREDENTIALS}
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment, start_new_session=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.05)
            else:
                self._client().create_bucket(Bucket=BUCKET)
                return
        raise AssertionError("the object server did not start")

    def hang(self) -> None:
        """Answer nothing until `go_on`."""
        assert self.process is not None
        freeze(self.process.pid)

    def go_on(self) -> None:
        """Answer again."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def keys(self, prefix: str) -> list[str]:
        """All keys below a prefix, without it."""
        pages = self._client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
        return sorted(one["Key"].removeprefix(f"{prefix}/") for page in pages for one in page.get("Contents", ()))

    def read(self, prefix: str, key: str) -> bytes:
        """The content of an object."""
        return bytes(self._client().get_object(Bucket=BUCKET, Key=f"{prefix}/{key}")["Body"].read())

    def write(self, prefix: str, key: str, content: bytes) -> None:
        """Put an object behind everybody's back."""
        self._client().put_object(Bucket=BUCKET, Key=f"{prefix}/{key}", Body=content)

    def _client(self) -> Any:
        """AWS's own client: another one than the product's."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=SECRET,
        )


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """A running server, ended at the end."""
    server = ObjectServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()


def credentials_file(folder: Path) -> Path:
    """The usual file with the credentials, profile `tinsmith`."""
    file = folder / "credentials"
    lines = [f"{name.lower()} = {value}" for name, value in CREDENTIALS.items()]
    file.write_text("\n".join(["[default]", "region = x", "", "[tinsmith]", *lines, ""]))
    return file
