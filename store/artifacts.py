"""Checkpoint folders under generated names. What a user called a checkpoint never becomes part of a path.

A folder is complete when a row names it; one that no row names was left by a crash and is swept at start-up.
What every place of them does is `ArtifactStore`; here they are in the data folder, and in `object_artifacts.py` in an
object storage. Not responsible for what is in the folders (the engine writes them) nor for names
(`store/checkpoints.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from schemas.errors import NotFound, Unavailable
from store.files import fsync_file, fsync_folder, is_older, make_private_folder

_log = logging.getLogger(__name__)
_FOLDER = re.compile(r"[0-9a-f]{32}")
_OURS = re.compile(r"\.?[0-9a-f]{32}(?:[.-].*)?", re.DOTALL)
"""A folder's own name, and the temporary names that a writer derives from it."""


class ArtifactStore(Protocol):
    """Where checkpoint folders are kept. Workers write and read them at `path`, on this machine's disk."""

    def new_folder(self) -> tuple[str, str]:
        """A fresh checkpoint id and folder name, 128 random bits each. The writer creates the folder."""
        ...

    def path(self, folder_name: str) -> Path:
        """Where a folder is or will be on this machine.

        Raises:
            NotFound: the name is not one that `new_folder` makes, or a link is in its place.
        """
        ...

    async def publish(self, folder_name: str) -> None:
        """Keep a folder that a worker has written whole at `path`, before a row names it. Again is fine.

        Raises:
            EngineFailure: it could not be kept (`checkpoint_not_written`).
        """
        ...

    async def fetch(self, folder_name: str) -> Path:
        """Have a folder at `path`, to be read.

        Raises:
            NotFound: its files are gone.
            Unavailable: they cannot be had now.
            EngineFailure: they are damaged (`damaged_checkpoint`).
        """
        ...

    def hold(self, folder_name: str) -> Callable[[], None]:
        """Keep a folder at `path` until the function that this returns is called (again is fine)."""
        ...

    def doing(self, folder_name: str) -> str | None:
        """What is being done with a folder just now, for people who wait for it; None: nothing that takes long."""
        ...

    async def size(self, folder_name: str) -> int:
        """The size of the regular files of a folder in bytes. Raises `NotFound`."""
        ...

    async def copy(self, source: str, target: str) -> None:
        """Make a second folder of the same files, whole or not at all.

        Raises:
            NotFound: the source is gone, or going.
            Unavailable: the copy is not taken now.
        """
        ...

    async def delete(self, folder_name: str) -> None:
        """Remove a folder that never had a row, whoever holds it; what is gone already is passed over. Raises
        `OSError`."""
        ...

    async def retire(self, folder_name: str) -> None:
        """Remove a folder that has no row any more: now, or when the last hold of it ends. Raises `OSError`."""
        ...

    async def sweep_incomplete(self, keep: Collection[str], older_than: float = 0.0) -> list[str]:
        """At start-up: remove what no row names (`keep`: the names that rows have). Returns the names.

        What was made within `older_than` seconds is left alone: it may be another server's.

        Raises:
            Unavailable: the place cannot be used.
        """
        ...

    async def collect(self) -> None:
        """Remove what could not be removed before."""
        ...

    def give_up(self) -> None:
        """The server must end: what is waited for fails with `Unavailable`."""
        ...

    async def close(self) -> None:
        """End what is under way."""
        ...


def keep_nothing() -> None:
    """The end of a hold where nothing is ever taken away."""


class FolderArtifacts:
    """The folder of checkpoint folders below a data folder (which exists)."""

    def __init__(self, data_dir: Path) -> None:
        self._root = data_dir / "checkpoints"
        make_private_folder(self._root)
        self._holds: Counter[str] = Counter()
        self._going: set[str] = set()
        """Folders that were retired while somebody held them."""
        self._removals: set[asyncio.Task[None]] = set()

    def new_folder(self) -> tuple[str, str]:
        """A fresh checkpoint id and folder name, 128 random bits each. The writer creates the folder."""
        return secrets.token_hex(16), secrets.token_hex(16)

    def path(self, folder_name: str) -> Path:
        """Where a folder is or will be.

        Raises:
            NotFound: the name is not one that `new_folder` makes, or a link is in its place.
        """
        if _FOLDER.fullmatch(folder_name) is None:
            raise NotFound("these checkpoint files do not exist")
        path = self._root / folder_name
        if path.is_symlink() or path.resolve() != self._root.resolve() / folder_name:
            raise NotFound("these checkpoint files do not exist")
        return path

    async def publish(self, folder_name: str) -> None:
        """Nothing to do: the writer has made the folder durable where it is."""

    async def fetch(self, folder_name: str) -> Path:
        """The folder is where it was written, if it still is: whoever reads it finds out."""
        return self.path(folder_name)

    def hold(self, folder_name: str) -> Callable[[], None]:
        """Keep a folder from `retire` by this server until the function that this returns is called, in its loop."""
        self._holds[folder_name] += 1
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._holds -= Counter((folder_name,))
                if folder_name in self._going and not self.held(folder_name):
                    removal = asyncio.create_task(self._remove_released(folder_name))
                    self._removals.add(removal)
                    removal.add_done_callback(self._removals.discard)

        return release

    def held(self, folder_name: str) -> bool:
        """Whether somebody needs a folder on this machine."""
        return self._holds[folder_name] > 0

    async def _remove_released(self, folder_name: str) -> None:
        try:
            await self.delete(folder_name)
        except OSError:
            _log.exception("a checkpoint folder that was deleted could not be removed")

    def doing(self, folder_name: str) -> str | None:
        """None: nothing here takes long."""
        return None

    async def collect(self) -> None:
        """Nothing to do: what could not be removed is removed at the next start."""

    def give_up(self) -> None:
        """Nothing to do: nothing here is waited for."""

    async def close(self) -> None:
        """Wait for what is being removed."""
        await asyncio.gather(*self._removals)

    async def size(self, folder_name: str) -> int:
        """The size of the regular files of a folder in bytes; links are not followed.

        Raises:
            NotFound: there is no such folder.
        """
        path = self.path(folder_name)
        if not path.is_dir():
            raise NotFound("these checkpoint files do not exist")
        return await asyncio.to_thread(_size, path)

    async def copy(self, source: str, target: str) -> None:
        """Make a second folder of the same files. Hard links where the file system has them: files never change.

        Whole or not at all. A source that is being deleted meanwhile may be copied in part: the caller looks afterwards
        whether it still has a row, since rows go before files.

        Raises:
            NotFound: the source is gone, or going.
            Unavailable: the disk does not take the copy.
        """
        try:
            await asyncio.to_thread(_copy, self.path(source), self.path(target))
        except OSError as error:
            reason = error.strerror or "input/output error"
            raise Unavailable(f"the server cannot copy the checkpoint right now ({reason})") from error

    async def delete(self, folder_name: str) -> None:
        """Remove a folder and what a writer that died left beside it; what is gone already is passed over."""
        await asyncio.to_thread(self._delete, self.path(folder_name))
        self._going.discard(folder_name)

    async def retire(self, folder_name: str) -> None:
        """See `ArtifactStore`. If the server dies before the folder is released, it goes at the next start."""
        if self.held(folder_name):
            self._going.add(folder_name)
        else:
            await self.delete(folder_name)

    def _delete(self, path: Path) -> None:
        _remove(path)
        for unfinished in self._root.glob(f".{path.name}.*"):
            _remove(unfinished)

    async def sweep_incomplete(self, keep: Collection[str], older_than: float = 0.0) -> list[str]:
        """At start-up: remove the folders that no row names (`checkpoints.checkpoint_folders`) and half-written ones.

        Things in the folder that we did not make are left alone, and logged. So are, without a word, those that were
        made within `older_than` seconds: they may be another server's.

        Returns:
            The names that were removed.
        """
        return await asyncio.to_thread(self._sweep, keep, older_than)

    def _sweep(self, keep: Collection[str], older_than: float) -> list[str]:
        swept = []
        for path in sorted(self._root.iterdir()):
            if path.name in keep or not is_older(path, older_than):
                continue
            if _OURS.fullmatch(path.name) is None:
                _log.warning("left alone among the checkpoints: %r", path.name)
                continue
            _remove(path)
            swept.append(path.name)
        if swept:
            fsync_folder(self._root)
        return swept


def _size(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            status = Path(folder, name).lstat()
            if stat.S_ISREG(status.st_mode):
                total += status.st_size
    return total


def _copy(source: Path, target: Path) -> None:
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    temporary.mkdir(mode=0o700)
    try:
        for path in source.iterdir():
            if path.is_symlink() or not path.is_file():
                continue
            try:
                os.link(path, temporary / path.name)
            except FileNotFoundError:
                raise
            except OSError:  # no hard links here, or too many of this file
                shutil.copyfile(path, temporary / path.name)
                fsync_file(temporary / path.name)
        fsync_folder(temporary)
        temporary.rename(target)
        try:
            fsync_folder(target.parent)
        except BaseException:
            _remove(target)
            raise
    except FileNotFoundError:
        _remove(temporary)
        raise NotFound("these checkpoint files do not exist") from None
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: Path) -> None:
    """Remove a folder, a file, or a link (never what it points to)."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    elif path.exists():
        shutil.rmtree(path)
