"""A real `tinsmith serve` process for tests that go through a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

TINSMITH = Path(sys.executable).with_name("tinsmith")


@dataclass(frozen=True)
class RunningServer:
    """Where the server is, how to talk to it, and the process itself."""

    url: str
    key: str
    data_dir: Path
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, **options: object) -> httpx.Client:
        """An HTTP client with the key, rooted at the API."""
        fixed: dict[str, Any] = {"headers": {"X-API-Key": self.key}, "timeout": 60, "trust_env": False}
        return httpx.Client(base_url=f"{self.url}/api/v1", **fixed, **options)  # type: ignore[arg-type]

    def worker(self) -> int:
        """The process id of the one child that computes: the child with the most memory."""
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        children = {pid for task in tasks for pid in (task / "children").read_text().split()}
        return int(max(children, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1])))


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: nothing of Tinsmith's or Tinker's own leaks in, and no hub is asked.

    Numbers and bits that tests expect are float32's; by itself a server takes bfloat16 on some processors.
    TINSMITH_DTYPE of the caller wins.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TINSMITH_", "TINKER_"))}
    dtype = os.environ.get("TINSMITH_DTYPE", "float32")
    offline = {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    return {**clean, "TINSMITH_DTYPE": dtype, **offline, **(extra or {})}


@contextmanager
def serve(
    data_dir: Path,
    arguments: Sequence[str] = (),
    *,
    command: Sequence[str | Path] = (TINSMITH, "serve"),
    port: int | None = None,
    ready_within: float = 240,
    extra_environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Start a server, wait until `readyz` answers 200, and stop it (SIGTERM, which drains) at the end.

    If somebody else takes the port that was free before the server does, it is started once more, on another.
    """
    data_dir.mkdir(parents=True, exist_ok=True)

    def start(port: int) -> tuple[str, subprocess.Popen[bytes], Path]:
        log = data_dir.parent / f"{data_dir.name}.{port}.log"
        line = [*map(str, command), "--port", str(port), "--data-dir", str(data_dir), *arguments]
        variables = environment(extra_environment)
        with log.open("wb") as output:
            process = subprocess.Popen(
                line, stdout=output, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )
        return f"http://127.0.0.1:{port}", process, log

    url, process, log = start(port or free_port())
    try:
        try:
            wait_until_ready(url, process, log, ready_within)
        except PortTaken:
            if port:
                raise
            url, process, log = start(free_port())
            wait_until_ready(url, process, log, ready_within)
        key_file = data_dir / "dev_key"
        if not key_file.exists():  # the data folder is a disk that only the server sees
            key_file = Path(f"/proc/{process.pid}/root{key_file}")
        key = key_file.read_text().strip()
        yield RunningServer(url, key, data_dir, process, log)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class PortTaken(AssertionError):
    """The server ended because somebody else listens on its port."""


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    """Poll `readyz`; fail with the end of the server's log if the process ends or the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            told = log.read_text()[-4000:]
            failure = PortTaken if "the port is in use" in told else AssertionError
            raise failure(f"the server ended with {process.returncode}:\n{told}")
        try:
            if httpx.get(f"{url}/api/v1/readyz", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
        time.sleep(0.2)
    raise AssertionError(f"not ready within {seconds:.0f} s:\n{log.read_text()[-4000:]}")
