"""The folder of snapshot files below a data folder. The worker writes them; names are generated here.

Not responsible for what is in a file, nor for which ones are needed (`store/snapshots.py`).
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from schemas.errors import NotFound
from store.files import make_private_folder

_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_OURS = re.compile(r"\.?[0-9a-f]{32}\.safetensors(?:\.[0-9a-f]+\.tmp)?")


class SnapshotFiles:
    """Files below `data_dir`, which exists."""

    def __init__(self, data_dir: Path) -> None:
        self._root = data_dir / "snapshots"
        make_private_folder(self._root)

    def new_path(self) -> Path:
        """A place for a snapshot; nothing is there."""
        return self._root / f"{secrets.token_hex(16)}.safetensors"

    def path(self, file: str) -> Path:
        """Where a file is. Raises `NotFound` for a name that is not one of ours."""
        if _NAME.fullmatch(file) is None:
            raise NotFound("this snapshot does not exist")
        return self._root / file

    async def delete(self, files: Iterable[str]) -> None:
        """Remove files; those that are gone already are passed over."""
        await asyncio.to_thread(_unlink, [self.path(file) for file in files])

    async def sweep(self, keep: Collection[str], older_than: float = 0.0) -> int:
        """Remove our files that no row names and that were not written within `older_than` seconds; how many."""
        return await asyncio.to_thread(self._sweep, keep, older_than)

    def _sweep(self, keep: Collection[str], older_than: float) -> int:
        before = time.time() - older_than
        stray = [
            path
            for path in self._root.iterdir()
            if path.name not in keep and _OURS.fullmatch(path.name) and path.lstat().st_mtime <= before
        ]
        _unlink(stray)
        return len(stray)


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
