"""A disk that fails once, at the n-th thing that is asked of it: a new file, a write, fsync, rename, link, commit.

In this process and below one folder only. The hooks are Python's own: audit events of the interpreter, and the few
calls that raise none. Reading and removing go on working.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from safetensors.torch import save_file

import engines.peft_format
from store.direct_connections import WriterConnection

KINDS = frozenset({"open", "write", "fsync", "rename", "link", "mkdir", "commit"})


class FaultyDisk:
    """Counts what is asked, and refuses number `fail_at` (from 1) with `code`. Used from any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = re.compile(re.escape(str(folder)) + "(/|$)")
        self._lock = threading.Lock()
        self._fail_at = 0
        self._code = errno.EIO
        self._kinds = KINDS
        self._only: str | None = None
        self.active = False
        self.seen: list[str] = []
        """Kind and file name of everything so far; generated parts of names left out."""
        self.fired: str | None = None

    @contextmanager
    def failing(
        self, fail_at: int, code: int, kinds: frozenset[str] = KINDS, only: str | None = None
    ) -> Iterator[None]:
        """Count from the beginning, and refuse one call; `only` counts calls of one kind on one file (as in `seen`)."""
        self._fail_at, self._code, self._kinds, self._only = fail_at, code, kinds, only
        self.seen, self.fired, self.active = [], None, True
        try:
            yield
        finally:
            self.active = False

    def ask(self, kind: str, path: object) -> bool:
        """Whether this call is to fail."""
        if not self.active or kind not in self._kinds or not self._folder.match(str(path)):
            return False
        call = f"{kind} {re.sub('[0-9a-f]{8,}', '*', os.path.basename(str(path)))}"
        with self._lock:
            if self._only not in (None, call):
                return False
            self.seen.append(call)
            if len(self.seen) != self._fail_at:
                return False
            self.fired = self.seen[-1]
            return True

    def error(self) -> OSError:
        """What a refused call raises, with a path in it, as the system's own errors have."""
        return OSError(self._code, os.strerror(self._code), "/secret/place")


_disks: list[FaultyDisk] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _disks or not _disks[-1].active:
        return
    kind, path = "", None
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        flags = args[2] if isinstance(args[2], int) else 0
        if flags & os.O_CREAT:
            kind, path = "open", os.fspath(args[0])
    elif event in ("os.rename", "os.link"):
        kind, path = event.removeprefix("os."), args[1]
    elif event == "os.mkdir":
        kind, path = "mkdir", args[0]
    if kind and _disks[-1].ask(kind, path):
        raise _disks[-1].error()


_hooked = False


@contextmanager
def faulty_disk(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[FaultyDisk]:
    """Install the hooks; nothing fails before `FaultyDisk.failing`."""
    global _hooked
    if not _hooked:
        sys.addaudithook(_audit)  # stays for the life of the process, and then does nothing
        _hooked = True
    disk = FaultyDisk(folder)
    patch.setattr(os, "fsync", _fsync(disk, os.fsync))
    patch.setattr(os, "fdopen", _fdopen(disk, os.fdopen))
    patch.setattr(engines.peft_format, "save_file", _save_file(disk, save_file))
    patch.setattr(WriterConnection, "_execute", _execute(disk, folder, WriterConnection._execute))
    _disks.append(disk)
    try:
        yield disk
    finally:
        _disks.remove(disk)


def _fsync(disk: FaultyDisk, real: Callable[[int], None]) -> Callable[[int], None]:
    def fsync(descriptor: int) -> None:
        if disk.ask("fsync", os.readlink(f"/proc/self/fd/{descriptor}")):
            raise disk.error()
        real(descriptor)

    return fsync


class _TornFile(io.BufferedWriter):
    """Takes half of what the refused call writes."""

    disk: FaultyDisk
    place: str

    def write(self, data: Any) -> int:
        if self.disk.ask("write", self.place):
            super().write(bytes(data)[: len(data) // 2])
            raise self.disk.error()
        return super().write(data)


def _fdopen(disk: FaultyDisk, real: Callable[..., Any]) -> Callable[..., Any]:
    def fdopen(descriptor: int, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "wb" or args or kwargs:
            return real(descriptor, mode, *args, **kwargs)
        file = _TornFile(io.FileIO(descriptor, "wb"))
        file.disk, file.place = disk, os.readlink(f"/proc/self/fd/{descriptor}")
        return file

    return fdopen


def _save_file(disk: FaultyDisk, real: Callable[..., None]) -> Callable[..., None]:
    def save(tensors: Any, path: Path, **kwargs: Any) -> None:
        real(tensors, path, **kwargs)
        if disk.ask("write", path):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            code = disk.error().errno
            raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(code or 0)} (os error {code})")

    return save


def _execute(disk: FaultyDisk, folder: Path, real: Callable[..., Any]) -> Callable[..., Any]:
    async def execute(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(fn, "__name__", "") == "commit" and disk.ask("commit", folder / "tinsmith.db"):
            raise sqlite3.OperationalError("disk I/O error")
        return await real(self, fn, *args, **kwargs)

    return execute
