"""Request and result bodies: small ones go into the row, large ones into files of their own.

So the database stays small and its one writer fast, whatever the size of the batches. Files are write-once under
generated names and durable before the row that names them. Not responsible for when a body is no longer needed.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import secrets
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

from schemas.errors import NotFound, NotNow, TinsmithError, Unavailable
from store.files import fsync_folder, is_older, make_private_folder, write_new
from store.records import Body, BodyRef

INLINE_LIMIT = 64 * 1024
"""Bytes up to which a body is kept in its row."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""What says that a file is not there, or something else (a folder, a link) in its place. All else may pass."""
_PAUSES = (0.1, 0.3, 1.0, 3.0)
"""Seconds between the tries of `get_patiently`."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\.(?:request|result)\.[0-9a-f]{32}")


class Bodies:
    """The folder of body files below a data folder.

    Args:
        data_dir: the data folder; it exists.
        parallel: how many files are read or written at once. Two already fill a disk's queue, and more would take the
            cores from those who wait for the database.
    """

    def __init__(self, data_dir: Path, *, parallel: int = 2) -> None:
        self._root = data_dir / "bodies"
        self._slots = asyncio.Semaphore(parallel)
        make_private_folder(self._root)

    async def put(self, request_id: str, kind: Literal["request", "result"], data: bytes) -> Body:
        """Keep a body. When this returns a reference, the file is durable; it is ours to delete until a row names it.

        Args:
            request_id: only makes the file's name recognisable; characters that do not fit a file name are replaced.

        Raises:
            Unavailable: the disk does not take it.
        """
        if len(data) <= INLINE_LIMIT:
            return data
        label = re.sub(r"[^A-Za-z0-9_-]", "_", request_id)[:64] or "_"
        name = f"{label}.{kind}.{secrets.token_hex(16)}"
        async with self._slots:
            try:
                return await asyncio.to_thread(self._write, name, data)
            except OSError as error:
                raise Unavailable(
                    f"the server cannot store a body of {len(data)} bytes right now "
                    f"({error.strerror or 'input/output error'})"
                ) from error

    async def get(self, body: Body) -> bytes:
        """The bytes of a body.

        Raises:
            NotFound: its file is gone.
            NotNow: it cannot be read for the moment.
            TinsmithError: its file is damaged.
        """
        if isinstance(body, bytes):
            return body
        path = self._path(body.name)
        async with self._slots:
            return await asyncio.to_thread(self._read, path, body)

    async def get_patiently(self, body: Body) -> bytes:
        """As `get`, tried a few times if it cannot be read for the moment: none should fail over that at start."""
        for pause in _PAUSES:
            try:
                return await self.get(body)
            except NotNow:
                await asyncio.sleep(pause)
        return await self.get(body)

    async def delete(self, refs: Iterable[Body]) -> None:
        """Remove the files among these bodies; inline ones and files that are gone already are passed over."""
        paths = [self._path(ref.name) for ref in refs if isinstance(ref, BodyRef)]
        if paths:
            async with self._slots:
                await asyncio.to_thread(_unlink, paths)

    async def sweep(self, keep: Collection[str], older_than: float = 0.0) -> int:
        """At start-up: remove every body file that no row names (`operations.body_names`). Returns how many.

        `older_than`: only those that were written so many seconds ago; younger ones may be another server's.
        """
        return await asyncio.to_thread(self._sweep, keep, older_than)

    def _path(self, name: str) -> Path:
        if _NAME.fullmatch(name) is None:
            raise NotFound("this body does not exist")
        return self._root / name

    def _write(self, name: str, data: bytes) -> BodyRef:
        path = self._root / name
        write_new(path, data)
        try:
            fsync_folder(self._root)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return BodyRef(name, len(data), hashlib.sha256(data).hexdigest())

    def _read(self, path: Path, ref: BodyRef) -> bytes:
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                data = file.read(ref.size + 1)
        except OSError as error:
            if error.errno in _GONE:
                raise NotFound("this body does not exist any more") from error
            raise NotNow(f"a stored body cannot be read now ({error.strerror or 'input/output error'})") from error
        if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise TinsmithError("a stored body is damaged", code="damaged_body")
        return data

    def _sweep(self, keep: Collection[str], older_than: float) -> int:
        stray = [
            path
            for path in self._root.iterdir()
            if path.name not in keep and _NAME.fullmatch(path.name) and is_older(path, older_than)
        ]
        _unlink(stray)
        return len(stray)


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
