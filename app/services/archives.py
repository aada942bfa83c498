"""Tar archives of a checkpoint's files, made while they are sent. Written from a fixed list; nothing is ever unpacked.

Not responsible for which files (`exports.py`).
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from schemas.errors import NotFound

COMPLETE = "checkpoint_complete"
"""An empty last member: older clients take an archive without it for an unfinished one."""

_CHUNK = 1 << 18


class TarStream:
    """An archive whose size is known before its first byte.

    All files are open from the beginning: a checkpoint that is deleted while it is sent arrives whole.

    Args:
        files: name in the archive -> regular file.
        written: the time that the members bear, aware.

    Raises:
        NotFound: a file is gone.
    """

    def __init__(self, files: Mapping[str, Path], written: datetime) -> None:
        self._written = int(written.timestamp())
        self._members: list[tuple[bytes, BinaryIO | None, int]] = []
        with ExitStack() as opened:
            for name, path in files.items():
                try:
                    file = opened.enter_context(path.open("rb"))
                except FileNotFoundError:
                    raise NotFound("these files were deleted") from None
                size = os.fstat(file.fileno()).st_size
                self._members.append((self._header(name, size), file, size))
            self._members.append((self._header(COMPLETE, 0), None, 0))
            self._opened = opened.pop_all()

    @property
    def size(self) -> int:
        """Bytes in all."""
        blocks = sum(len(header) + size + _padding(size) for header, _, size in self._members)
        return blocks + 2 * tarfile.BLOCKSIZE

    def __iter__(self) -> Iterator[bytes]:
        """The bytes, once. Blocks: event loops read it in a thread."""
        with self._opened:
            for header, file, size in self._members:
                yield header
                while file is not None and (chunk := file.read(_CHUNK)):
                    yield chunk
                yield bytes(_padding(size))
            yield bytes(2 * tarfile.BLOCKSIZE)

    def close(self) -> None:
        """Close the files of an archive that is not sent, or not to its end."""
        self._opened.close()

    def _header(self, name: str, size: int) -> bytes:
        member = tarfile.TarInfo(name)
        member.size, member.mtime, member.mode = size, self._written, 0o644
        return member.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE
