"""Which stored files were found whole, and when: one that is fetched in a thousand ranges is read through once.

A file never changes under its name, so what was found holds for one version of it: inode, size and times, of the file
and of the manifest that has its checksum. It holds for `AGAIN_SECONDS`, because a disk that loses bits changes none of
these. Not responsible for how a file is checked (`engines/checkpoint_files.py`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from engines.checkpoint_files import MANIFEST_FILE, folder_problems

AGAIN_SECONDS = 600.0
"""How long a file counts as whole. Reading it through every ten minutes costs little, whatever is asked meanwhile."""
MOST_FILES = 4096
"""How many files are remembered; those asked for longest ago are forgotten first."""

Version = tuple[int, ...]


class VerifiedFiles:
    """Compares files of checkpoint folders with their checksums, each version once in a while.

    Only what is whole is remembered. Requests at the same time for the same file share one look.

    Args:
        check: says what is wrong with the named files of a folder; blocks.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        check: Callable[[Path, Collection[str]], list[str]] = folder_problems,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._check = check
        self._clock = clock
        self._whole: OrderedDict[Path, tuple[Version, float]] = OrderedDict()
        self._looking: dict[tuple[Path, Version], asyncio.Task[list[str]]] = {}

    async def problems(self, folder: Path, names: Sequence[str]) -> list[str]:
        """What is wrong with files of a folder, as `folder_problems` says it; empty if they are whole."""
        found = []
        for name in names:
            found += await self._problems(folder, name)
        return found

    async def _problems(self, folder: Path, name: str) -> list[str]:
        path = folder / name
        version = _version(path, folder / MANIFEST_FILE)
        if version is None:  # the check says what is missing
            return await asyncio.to_thread(self._check, folder, (name,))
        known = self._whole.get(path)
        if known is not None and known[0] == version and self._clock() - known[1] < AGAIN_SECONDS:
            self._whole.move_to_end(path)
            return []
        task = self._looking.get((path, version))
        if task is None:
            task = asyncio.create_task(self._look(folder, name, version))
            self._looking[path, version] = task
            task.add_done_callback(lambda done: self._looked((path, version), done))
        return await asyncio.shield(task)  # who asked first may go: the others wait for the same

    async def _look(self, folder: Path, name: str, version: Version) -> list[str]:
        began = self._clock()
        problems = await asyncio.to_thread(self._check, folder, (name,))
        if not problems:
            self._whole[folder / name] = (version, began)
            self._whole.move_to_end(folder / name)
            while len(self._whole) > MOST_FILES:
                self._whole.popitem(last=False)
        return problems

    def _looked(self, key: tuple[Path, Version], task: asyncio.Task[list[str]]) -> None:
        del self._looking[key]
        if not task.cancelled():
            task.exception()  # whoever waits is told; nobody may wait any more


def _version(*paths: Path) -> Version | None:
    """What changes when any of the files is replaced or written to; None if one is not there."""
    version: list[int] = []
    for path in paths:
        try:
            status = os.lstat(path)
        except OSError:
            return None
        version += (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return tuple(version)
