"""A file that says what a server was executing when it was killed. It costs no sync: a killed process leaves it behind.

Not responsible for what is under way (`workers/under_way.py`), nor for counting (`store/operations.py`).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

_log = logging.getLogger(__name__)

FILE = "under_way"
_LINE = re.compile(r"(running|again) ([A-Za-z0-9_-]{1,128})")
_END = "end"
"""The last line. What follows it is of an earlier, longer content; without it the content is torn, and says nothing."""


class UnderWayFile:
    """The file in `data_dir`, whose lock is held. Raises OSError if it cannot be opened."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._failed = False

    def take(self) -> tuple[list[str], list[str]]:
        """What an earlier server left, once: request ids that it executed, and that it executed again.

        Forgotten before it is counted: a start that dies in between counts once too few, not twice.
        """
        size = os.fstat(self._descriptor).st_size
        lines = os.pread(self._descriptor, size, 0).decode("ascii", "replace").split("\n")
        os.ftruncate(self._descriptor, 0)
        os.fsync(self._descriptor)
        if _END not in lines:
            return [], []
        found = [_LINE.fullmatch(line) for line in lines[: lines.index(_END)]]
        named = [(line[1], line[2]) for line in found if line is not None]
        return [name for kind, name in named if kind == "running"], [name for kind, name in named if kind == "again"]

    def write(self, running: Sequence[str], again: Sequence[str], durable: bool) -> None:
        """Replace the content; if the disk does not take it, only the blame for a death is at stake."""
        lines = [*(f"running {name}" for name in running), *(f"again {name}" for name in again), _END]
        data = "".join(f"{line}\n" for line in lines).encode("ascii")
        try:
            if os.pwrite(self._descriptor, data, 0) == len(data):
                os.ftruncate(self._descriptor, len(data))
            if durable:
                os.fsync(self._descriptor)
        except OSError as error:
            if not self._failed:
                _log.warning("what is under way cannot be noted (%s): a death now is not counted", error.strerror)
            self._failed = True
        else:
            self._failed = False

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)
