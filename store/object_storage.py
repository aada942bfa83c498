"""An S3-compatible object storage: whole objects put, read, listed, copied and removed, each within a bounded time.

Responsible for the words in which a failing storage is told about: neither credentials nor what the storage answers in
detail reach an error or the log. Not responsible for what the objects are (`object_artifacts.py`).
"""

from __future__ import annotations

import asyncio
import configparser
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore import exceptions
from obstore.store import S3Store

from schemas.errors import AlreadyExists, NotFound, Unavailable

if TYPE_CHECKING:
    from obstore.store import S3Credential

T = TypeVar("T")

PART_BYTES = 8 << 20
"""Of a large object in one request."""
PARALLEL = 4
"""Requests at once: enough to fill a line, and few enough that those of a hung storage are a handful."""
_CONNECT_SECONDS = 5.0
_CREDENTIALS_SECONDS = 300
"""How long credentials from a file are believed before it is read again."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")


@dataclass(frozen=True, slots=True)
class StorageAddress:
    """Where the objects are.

    Args:
        bucket: its name.
        prefix: what all keys begin with, without slashes at its ends; "" = the whole bucket.
        endpoint: the address of the service; None = AWS, or what `AWS_ENDPOINT_URL` says.
        region: None = what the environment says, else us-east-1.
        timeout: seconds that a request gets, its repeats included.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    timeout: float = 30.0

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`: what tells two places apart, and no secret."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")


class ObjectStorage:
    """The objects below one address. Keys are relative to its prefix.

    Every method raises `Unavailable` if the storage cannot be reached, is full, or refuses the credentials. Requests
    are repeated while the time of the address lasts. They run in threads of their own, so that a hung storage takes
    nobody else's.
    """

    def __init__(self, address: StorageAddress) -> None:
        self._seconds = address.timeout
        self._threads = ThreadPoolExecutor(PARALLEL, thread_name_prefix="object-storage")
        options: dict[str, Any] = {"region": address.region} if address.region else {}
        if address.endpoint:
            options["endpoint"] = address.endpoint
        provider = _file_credentials()
        if provider is not None:
            options["credential_provider"] = provider
        plain = (address.endpoint or os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://")
        request = timedelta(seconds=address.timeout)
        self._store: S3Store = S3Store(
            address.bucket,
            prefix=address.prefix or None,
            client_options={
                "allow_http": plain,
                "timeout": request,
                "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, address.timeout)),
            },
            retry_config={
                "max_retries": 20,
                "retry_timeout": request,
                "backoff": {
                    "init_backoff": timedelta(milliseconds=100),
                    "max_backoff": timedelta(seconds=3),
                    "base": 2,
                },
            },
            **options,
        )

    async def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        """Write a small object. `new`: raise `AlreadyExists` if it is there."""
        await self._run(obstore.put, self._store, key, data, mode="create" if new else "overwrite")

    async def put_file(self, key: str, path: Path) -> None:
        """Write an object with the content of a file, whole or not at all. Raises `OSError` for the file.

        The end of an upload in parts may be repeated though it was done: only its answer was lost. The storage knows no
        such upload then, and nobody knows why, so all of it is done once more.
        """
        for _ in range(2):
            try:
                return await self._run(self._put_file, key, path)
            except NotFound:
                continue
        raise _unavailable("it forgets uploads before they end")

    def _put_file(self, key: str, path: Path) -> None:
        path.stat()  # the library tells a file that is not there like an object that is not there
        obstore.put(self._store, key, path, chunk_size=PART_BYTES, max_concurrency=PARALLEL)

    async def get(self, key: str) -> bytes:
        """The content of a small object. Raises `NotFound`."""
        return await self._run(lambda: bytes(obstore.get(self._store, key).bytes()))

    async def get_file(self, key: str, path: Path, size: int) -> str:
        """Write the first `size` bytes of an object, or what it has, into a new file; returns their SHA-256 in hex.

        The file is durable, its name is not yet. Raises `NotFound`, and `OSError` for the file.
        """
        return await self._run(self._get_file, key, path, size)

    def _get_file(self, key: str, path: Path, size: int) -> str:
        digest = hashlib.sha256()
        with path.open("xb") as file:
            for start in range(0, size, PART_BYTES):
                try:
                    part = obstore.get_range(self._store, key, start=start, end=min(start + PART_BYTES, size))
                except exceptions.BaseError as error:
                    if _code(error) == "InvalidRange":  # it is shorter, and so not what was expected
                        break
                    raise
                digest.update(part)
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        return digest.hexdigest()

    async def folders(self, prefix: str) -> list[str]:
        """The names directly below `prefix` that have something below themselves."""
        found = await self._run(obstore.list_with_delimiter, self._store, prefix)
        return [name.rpartition("/")[2] for name in found["common_prefixes"]]

    async def objects(self, prefix: str) -> dict[str, datetime]:
        """The keys of all objects below `prefix`, and when each was written."""

        def collect() -> dict[str, datetime]:
            found = obstore.list(self._store, f"{prefix}/").collect()
            return {one["path"]: one["last_modified"] for one in found}

        return await self._run(collect)

    async def copy(self, source: str, target: str) -> None:
        """Copy an object inside the storage. Raises `NotFound`."""
        await self._run(obstore.copy, self._store, source, target)

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that are gone already are passed over."""
        if keys:
            await self._run(obstore.delete, self._store, list(keys))

    def close(self) -> None:
        """Begin no more requests. Those that are under way end within their time."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a request in a thread.

        Not the library's asynchronous calls: its own threads, which wake our loop, abort the process now and then
        when it ends (obstore 0.12).
        """
        call = partial(work, *args, **options)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except FileNotFoundError as error:
            if error.errno is not None:  # of this machine's disk, not of the storage
                raise
            if _code(error) == "NoSuchBucket":
                raise _unavailable("it has no such bucket") from None
            raise NotFound("this object does not exist") from None
        except exceptions.AlreadyExistsError:
            raise AlreadyExists("this object exists already") from None
        except exceptions.BaseError as error:
            raise _unavailable(reason_of(error)) from None


def _unavailable(reason: str) -> Unavailable:
    return Unavailable(f"the object storage cannot be used right now: {reason}")


def reason_of(error: exceptions.BaseError) -> str:
    """Why the storage failed, in a few words. The library's own text has addresses and what the storage answered."""
    text = str(error)
    if "169.254.169.254" in text or "169.254.170.2" in text:
        return "no credentials were found (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a credentials file)"
    code, status = _code(error), _STATUS.search(text)
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return f"it refuses the credentials or what they may do ({code or 'access denied'})"
    if status is not None:
        return f"it answers with status {status[1]}{f' ({code})' if code else ''}"
    if "Timeout" in text or "timed out" in text:
        return "it does not answer in time"
    if "Connect" in text:
        return "it cannot be reached"
    return f"the request failed ({type(error).__name__})"


def _code(error: Exception) -> str | None:
    found = _CODE.search(str(error))
    return None if found is None else found[1]


def _file_credentials() -> Callable[[], S3Credential] | None:
    """Reads the profile of the usual credentials file; None if the environment has keys or there is no such profile.

    The library itself knows the environment, web identities, containers and instances, but not this file.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return None
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    profile = os.environ.get("AWS_PROFILE") or "default"

    def read() -> S3Credential:
        profiles = configparser.RawConfigParser()
        profiles.read(file, encoding="utf-8")
        section = profiles[profile]
        return {
            "access_key_id": section["aws_access_key_id"],
            "secret_access_key": section["aws_secret_access_key"],
            "token": section.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + timedelta(seconds=_CREDENTIALS_SECONDS),
        }

    try:
        read()
    except (KeyError, OSError, configparser.Error, UnicodeDecodeError):
        return None
    return read


def encode_json(value: object) -> bytes:
    """A small object of ours."""
    return json.dumps(value, indent=1, sort_keys=True).encode()
