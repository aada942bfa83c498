"""Checkpoint folders in an object storage, with copies of those in use on this machine's disk.

    PREFIX/checkpoints/FOLDER/FILE      the files
    PREFIX/complete/FOLDER.json         their sizes and SHA-256, written last: what makes the folder complete
    PREFIX/owner.json                   whose data folder may remove what its database does not name

A worker writes a folder on the disk as ever. It is uploaded before its row is written, and fetched before it is read;
copies that nobody uses give way to others (`store/local_copies.py`). Not responsible for rows, nor for what is in the
folders.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from schemas.errors import AlreadyExists, EngineFailure, NotFound, TinsmithError, Unavailable
from schemas.fail_points import fail_point
from store.artifact_place import record_place
from store.artifacts import FolderArtifacts
from store.files import fsync_folder, read_private, replace_private
from store.local_copies import LocalCopies
from store.object_storage import ObjectStorage, encode_json

_log = logging.getLogger(__name__)
T = TypeVar("T")

OWNER_FILE = "artifacts_owner"
"""In the data folder, and not in its backups: the name under which it owns the storage's prefix."""
STRAY_SECONDS = 3600.0
"""How long what no row names is left alone, unless this very server was writing it."""
RECENT_SECONDS = 60.0
"""How long a copy stays after its last use, whatever room is wanted: who asked for it is about to read it."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FOLDER_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class _File:
    """One file of a complete folder; `size` in bytes, `sha256` in hex."""

    name: str
    size: int
    sha256: str


class ObjectArtifacts:
    """The places of checkpoints in one object storage.

    Args:
        data_dir: the data folder, which exists; copies are in its folder `checkpoints`.
        url: the storage's name, to be remembered in the data folder.
        cache_bytes: what copies may take together. Those that are held, or were used within `recent` seconds, stay.
        stray_seconds: age from which what no row names is removed at a start.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        data_dir: Path,
        url: str,
        storage: ObjectStorage,
        *,
        cache_bytes: int,
        recent: float = RECENT_SECONDS,
        stray_seconds: float = STRAY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._data_dir = data_dir
        self._url = url
        self._storage = storage
        self._disk = FolderArtifacts(data_dir)
        self._stray_seconds = stray_seconds
        self._copies = LocalCopies(self.path, held=self._disk.held, most_bytes=cache_bytes, recent=recent, clock=clock)
        self._doing: dict[str, str] = {}
        self._fetching: dict[str, asyncio.Task[Path]] = {}
        self._doomed: set[str] = set()
        """Folders that no row names, still to be removed from the storage."""
        self._removing: dict[str, asyncio.Event] = {}
        """Folders that are being removed from the storage just now; set when that has ended."""
        self._removal: asyncio.Task[None] | None = None
        self._owner = False
        self._over = asyncio.Event()
        """Set when the server must end."""

    # -- names and places on the disk ------------------------------------------------------------------------------
    def new_folder(self) -> tuple[str, str]:
        """See `ArtifactStore`."""
        return self._disk.new_folder()

    def path(self, folder_name: str) -> Path:
        """See `ArtifactStore`."""
        return self._disk.path(folder_name)

    def doing(self, folder_name: str) -> str | None:
        """See `ArtifactStore`."""
        return self._doing.get(folder_name)

    def hold(self, folder_name: str) -> Callable[[], None]:
        """See `ArtifactStore`."""
        return self._disk.hold(folder_name)

    # -- into the storage ------------------------------------------------------------------------------------------
    async def publish(self, folder_name: str) -> None:
        """Upload a folder. See `ArtifactStore`."""
        if folder_name in self._copies:
            return
        path = self.path(folder_name)
        self._doomed.discard(folder_name)
        try:
            if folder_name in self._removing:
                self._doing[folder_name] = "waiting for the object storage to remove an earlier attempt"
                await self._unless_over(self._removing[folder_name].wait())
            size = await self._unless_over(self._upload(folder_name, path))
        except Unavailable as error:
            if self._over.is_set():
                raise
            raise _not_written(error.message) from error
        except OSError as error:
            raise _not_written(error.strerror or "input/output error") from error
        finally:
            self._doing.pop(folder_name, None)
        await self._copies.add(folder_name, size)

    async def _unless_over(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of some work, or `Unavailable` as soon as the server must end."""
        task, over = asyncio.ensure_future(work), asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Unavailable("the server is shutting down")
        finally:
            task.cancel()
            over.cancel()

    async def _upload(self, folder_name: str, path: Path) -> int:
        fail_point("upload.begun")
        paths = await asyncio.to_thread(_regular_files, path)
        if not paths:
            raise EngineFailure("the checkpoint was written empty; nothing was uploaded")
        files = []
        for number, each in enumerate(paths, start=1):
            self._doing[folder_name] = f"uploading to the object storage: file {number} of {len(paths)}"
            file = await asyncio.to_thread(_describe, each)
            await self._storage.put_file(_key(folder_name, each.name), each)
            files.append(file)
            fail_point("upload.file")
        await self._complete(folder_name, files)
        fail_point("upload.complete")
        return sum(file.size for file in files)

    async def _complete(self, folder_name: str, files: list[_File]) -> None:
        content = {"files": {file.name: {"size": file.size, "sha256": file.sha256} for file in files}}
        await self._storage.put(_complete_key(folder_name), encode_json(content))

    async def copy(self, source: str, target: str) -> None:
        """Copy inside the storage. See `ArtifactStore`."""
        for name in (source, target):
            self.path(name)
        try:
            files = await self._files(source)
            for file in files:
                await self._storage.copy(_key(source, file.name), _key(target, file.name))
            await self._complete(target, files)
        except NotFound:
            raise NotFound("these checkpoint files do not exist") from None

    # -- out of the storage ----------------------------------------------------------------------------------------
    async def fetch(self, folder_name: str) -> Path:
        """Download a folder that is not here. See `ArtifactStore`; callers at the same time share one download."""
        path = self.path(folder_name)
        if path.is_dir():
            if folder_name in self._copies:  # else a worker has written it, and it is not uploaded yet
                self._copies.use(folder_name)
            return path
        self._copies.forget(folder_name)  # somebody has removed the copy
        task = self._fetching.get(folder_name)
        if task is None:
            task = self._fetching[folder_name] = asyncio.create_task(self._fetch(folder_name, path))
            task.add_done_callback(lambda done: self._fetched(folder_name, done))
        return await self._unless_over(_await(task))

    def _fetched(self, folder_name: str, task: asyncio.Task[Path]) -> None:
        del self._fetching[folder_name]
        self._doing.pop(folder_name, None)
        if not task.cancelled():
            task.exception()  # whoever waits is told; nobody may wait any more

    async def _fetch(self, folder_name: str, path: Path) -> Path:
        files = await self._files(folder_name)
        total = sum(file.size for file in files)
        await self._copies.make_room(total)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            temporary.mkdir(mode=0o700)
            done = 0
            for file in files:
                self._doing[folder_name] = f"fetching from the object storage: {done >> 20} of {total >> 20} MiB"
                found = await self._storage.get_file(_key(folder_name, file.name), temporary / file.name, file.size)
                if found != file.sha256:
                    raise _damaged(f"{file.name} does not match its checksum")
                done += file.size
            await asyncio.to_thread(_put_in_place, temporary, path)
        except NotFound:
            raise NotFound("these checkpoint files do not exist") from None
        except OSError as error:
            raise Unavailable(
                f"the server cannot take in the checkpoint right now ({error.strerror or 'input/output error'})"
            ) from error
        finally:
            await asyncio.to_thread(shutil.rmtree, temporary, True)
        await self._copies.add(folder_name, total)
        return path

    async def _files(self, folder_name: str) -> list[_File]:
        """What a complete folder holds. Raises `NotFound`, `EngineFailure`."""
        try:
            content = json.loads(await self._storage.get(_complete_key(folder_name)))["files"]
            files = [_File(name, int(one["size"]), str(one["sha256"])) for name, one in content.items()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _damaged("the list of its files is not readable") from None
        if not files or any(_FILE_NAME.fullmatch(file.name) is None or file.size < 0 for file in files):
            raise _damaged("the list of its files is not readable")
        return files

    async def size(self, folder_name: str) -> int:
        """See `ArtifactStore`."""
        if self.path(folder_name).is_dir():
            return await self._disk.size(folder_name)
        try:
            return sum(file.size for file in await self._files(folder_name))
        except NotFound:
            raise NotFound("these checkpoint files do not exist") from None

    # -- removal ---------------------------------------------------------------------------------------------------
    async def delete(self, folder_name: str) -> None:
        """Remove a folder: here at once, and from the storage as soon as it takes it. See `ArtifactStore`."""
        self._copies.forget(folder_name)
        await self._disk.delete(folder_name)
        self._remove_stored(folder_name)

    async def retire(self, folder_name: str) -> None:
        """The same, but here when it is released. See `ArtifactStore`."""
        self._copies.forget(folder_name)
        await self._disk.retire(folder_name)
        self._remove_stored(folder_name)

    def _remove_stored(self, folder_name: str) -> None:
        if self._owner:
            self._doomed.add(folder_name)
            if self._removal is None or self._removal.done():
                self._removal = asyncio.create_task(self.collect(), name="remove checkpoints from the object storage")

    async def collect(self) -> None:
        """Remove from the storage what could not be removed before; what fails is tried again with the next call."""
        for folder_name in list(self._doomed):
            if folder_name not in self._doomed or folder_name in self._removing:
                continue  # written again meanwhile, or being removed already
            ended = self._removing[folder_name] = asyncio.Event()
            try:
                await self._remove(folder_name)
            except Unavailable as error:
                _log.warning("%d checkpoints are removed later: %s", len(self._doomed), error.message)
                return
            finally:
                del self._removing[folder_name]
                ended.set()
            self._doomed.discard(folder_name)

    async def _remove(self, folder_name: str) -> None:
        await self._storage.delete([_complete_key(folder_name)])
        await self._storage.delete(list(await self._storage.objects(f"checkpoints/{folder_name}")))

    async def sweep_incomplete(self, keep: Collection[str], older_than: float = 0.0) -> list[str]:
        """Make the disk, the storage and the rows agree. See `ArtifactStore`.

        Checkpoints that are on the disk only, from before there was a storage, are uploaded. What no row names is
        removed, from the storage only by the data folder that owns it: a copy of the database knows nothing of what the
        original has saved since.
        """
        try:
            await self._claim()
            complete = {key.rpartition("/")[2].removesuffix(".json") for key in await self._storage.objects("complete")}
            stored = complete | set(await self._storage.folders("checkpoints"))
        except Unavailable as error:
            hint = "see the settings artifacts_url, artifacts_endpoint and artifacts_region"
            raise Unavailable(error.message, hint=hint) from error
        record_place(self._data_dir, self._url)
        swept = await self._disk.sweep_incomplete(keep, older_than)
        here = await asyncio.to_thread(self._on_disk, keep)
        for name in here:
            if name not in complete:
                _log.info("uploading checkpoint folder %s", name)
                await self.publish(name)
        await self._copies.found(here)
        if self._owner:
            cut_off = {name for name in stored - set(keep) if any(name in path for path in swept)}
            others = [name for name in stored - set(keep) - cut_off if _FOLDER_NAME.fullmatch(name)]
            strays = sorted([*cut_off, *[name for name in others if await self._is_old(name)]])
            self._doomed.update(strays)
            await self.collect()
            swept += [name for name in strays if name not in swept]
        return swept

    async def _is_old(self, folder_name: str) -> bool:
        """Whether nothing was written to a folder lately: else another server may be about to write its row."""
        before = datetime.now(UTC) - timedelta(seconds=self._stray_seconds)
        written = await self._storage.objects(f"checkpoints/{folder_name}")
        return all(time <= before for time in written.values())

    def _on_disk(self, keep: Collection[str]) -> dict[str, int]:
        """The folders that rows name and that are here, oldest first, with their bytes."""
        paths = [path for name in keep if (path := self.path(name)).is_dir()]
        paths.sort(key=lambda path: path.stat().st_mtime)
        return {path.name: sum(each.stat().st_size for each in path.iterdir()) for path in paths}

    async def _claim(self) -> None:
        """Own the prefix, unless another data folder does."""
        file = self._data_dir / OWNER_FILE
        own = (read_private(file) or b"").decode("ascii", "replace")
        if _FOLDER_NAME.fullmatch(own) is None:
            own = secrets.token_hex(16)
            replace_private(file, own.encode())
        try:
            await self._storage.put("owner.json", encode_json({"data_folder": own}), new=True)
            self._owner = True
        except AlreadyExists:
            found = await self._storage.get("owner.json")
            self._owner = found == encode_json({"data_folder": own})
        if not self._owner:
            _log.warning(
                "another data folder owns %s: checkpoints are saved and read here, but none is removed from the "
                "storage; to let this one take over, remove the object owner.json and start again",
                self._url,
            )

    def give_up(self) -> None:
        """See `ArtifactStore`."""
        self._over.set()

    async def close(self) -> None:
        """See `ArtifactStore`."""
        self.give_up()
        for task in (self._removal, *self._fetching.values()):
            if task is not None:
                task.cancel()
        await self._disk.close()
        self._storage.close()


async def _await(task: asyncio.Task[T]) -> T:
    """The result of a task that goes on when whoever waits is cancelled."""
    return await asyncio.shield(task)


def _key(folder_name: str, file_name: str) -> str:
    return f"checkpoints/{folder_name}/{file_name}"


def _complete_key(folder_name: str) -> str:
    return f"complete/{folder_name}.json"


def _regular_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())


def _describe(path: Path) -> _File:
    with path.open("rb") as file:
        return _File(path.name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _put_in_place(temporary: Path, path: Path) -> None:
    fsync_folder(temporary)
    temporary.rename(path)
    fsync_folder(path.parent)


def _not_written(reason: str) -> EngineFailure:
    return EngineFailure(
        f"the checkpoint could not be written: {reason}",
        hint="the model and its earlier checkpoints are as they were; save again when the storage takes it",
        code="checkpoint_not_written",
    )


def _damaged(problem: str) -> TinsmithError:
    return EngineFailure(
        f"the checkpoint is damaged in the object storage: {problem}",
        hint="save it again, or ask the operator to restore it from a backup",
        code="damaged_checkpoint",
    )
