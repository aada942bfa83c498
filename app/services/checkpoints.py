"""Checkpoints by name: finding them for their owner, recording new ones, removing them.

Responsible for the way from `tinker://` paths to records and folders, and for which project may read or manage them.
Not responsible for the contents of a folder (engines) or its place on disk (`store/artifacts.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.paths import CheckpointPath, parse_path
from app.services.submission import Rows
from schemas.errors import AlreadyExists, EngineFailure, InvalidRequest, NotFound
from schemas.fail_points import fail_point
from schemas.operations import SavedAdapter
from store import checkpoints
from store.artifacts import ArtifactStore
from store.database import Store, Work
from store.records import CheckpointKind, CheckpointRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_LISTED = 100_000
"""Most checkpoints in an answer that has no pages."""


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """A checkpoint that is about to be written. `name` None = ephemeral."""

    checkpoint_id: str
    folder: str
    project_id: str
    model_id: str
    kind: CheckpointKind
    name: str | None
    base_model: str
    optimizer_type: str
    user_metadata: Mapping[str, Any]
    ttl_seconds: int | None
    overwrite: bool
    encrypted: bool = False
    key_id: str | None = None
    """The key that asked for it; None if a server that did not keep it accepted the request."""


class Checkpoints:
    """Named and ephemeral checkpoints of all projects; every method is told whose."""

    def __init__(self, store: Store, artifacts: ArtifactStore, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._artifacts = artifacts
        self._clock = clock
        self._replaced: list[str] = []

    async def readable(self, project_ids: Collection[str], path: str, *, field: str = "path") -> CheckpointRecord:
        """The checkpoint of a tinker path, for reading: one of these projects', or a public one of any project.

        Raises:
            InvalidRequest: not a well-formed path.
            NotFound: no such checkpoint, or it has expired, or it is not theirs to read.
        """
        wanted = parse_path(path, field=field)
        record = await self._store.read(
            lambda db: checkpoints.find_readable(db, project_ids, wanted.model_id, wanted.kind, wanted.name)
        )
        return self._present(record, wanted, field)

    async def owned_by(self, project_ids: Collection[str], path: str, *, field: str) -> CheckpointRecord:
        """As `readable`, without what is only public."""
        record = await self.readable(project_ids, path, field=field)
        if record.project_id not in project_ids:
            raise NotFound(f"there is no checkpoint {path!r}", field=field)
        return record

    async def find(self, project_id: str, path: CheckpointPath, *, field: str = "path") -> CheckpointRecord:
        """A checkpoint of this project, to be managed or handed out. Raises `NotFound`."""
        return self._present(await self._store.read(lambda db: self.find_in(db, project_id, path)), path, field)

    def _present(self, record: CheckpointRecord | None, path: CheckpointPath, field: str) -> CheckpointRecord:
        if record is None or self.expired(record):
            raise NotFound(f"there is no checkpoint {str(path)!r}", field=field)
        return record

    def expired(self, record: CheckpointRecord) -> bool:
        """Whether a checkpoint is past its time, though it is not swept yet."""
        return record.expires_at is not None and record.expires_at <= self._clock()

    async def find_in(self, db: AsyncSession, project_id: str, path: CheckpointPath) -> CheckpointRecord | None:
        """The checkpoint if it exists and has not expired, inside a transaction."""
        record = await checkpoints.find_checkpoint(db, project_id, path.model_id, path.kind, path.name)
        return None if record is None or self.expired(record) else record

    async def refuse_taken_name(self, db: AsyncSession, new: NewCheckpoint) -> None:
        """Raise `AlreadyExists` if the name is in use and may not be replaced."""
        if new.name is None or new.overwrite:
            return
        path = CheckpointPath(new.model_id, new.kind, new.name)
        if await self.find_in(db, new.project_id, path) is not None:
            raise AlreadyExists(
                f"a checkpoint named {new.name!r} exists already",
                field="path",
                hint="choose another name"
                + (", or pass overwrite=true to replace it" if new.kind == "training" else ""),
            )

    async def by_id(self, checkpoint_id: str) -> CheckpointRecord | None:
        """A checkpoint of any project, for the bearer of a signed address; None if it is gone."""
        record = await self._store.read(lambda db: checkpoints.get_checkpoint(db, None, checkpoint_id))
        return None if record is None or self.expired(record) else record

    def draw_folder(self) -> tuple[str, str]:
        """A fresh (checkpoint id, folder name)."""
        return self._artifacts.new_folder()

    def folder_path(self, folder: str) -> Path:
        """Where a folder is or will be."""
        return self._artifacts.path(folder)

    async def copy_folder(self, source: str, target: str) -> None:
        """Make a folder of the same files that outlives the source. Raises `NotFound` if the source is gone."""
        await self._artifacts.copy(source, target)

    def record_rows(self, new: NewCheckpoint, saved: SavedAdapter, with_optimizer: bool) -> Rows:
        """The rows that make a written folder a checkpoint.

        Raises (inside the transaction): `AlreadyExists` if the name was taken meanwhile.
        """
        if saved.size_bytes <= 0:
            raise EngineFailure("the checkpoint was written empty; nothing was recorded")
        now = self._clock()
        expires_at = None if new.ttl_seconds is None else now + timedelta(seconds=new.ttl_seconds)

        async def rows(db: AsyncSession) -> None:
            overwrite = new.overwrite
            if new.name is not None and not overwrite:
                # An expired checkpoint that is not swept yet no longer owns its name.
                path = CheckpointPath(new.model_id, new.kind, new.name)
                overwrite = await self.find_in(db, new.project_id, path) is None
            _, replaced = await checkpoints.create_checkpoint(
                db,
                checkpoint_id=new.checkpoint_id,
                project_id=new.project_id,
                model_id=new.model_id,
                kind=new.kind,
                name=new.name,
                folder=new.folder,
                size_bytes=saved.size_bytes,
                base_model=new.base_model,
                lora=saved.lora,
                has_optimizer=with_optimizer,
                optimizer_type=new.optimizer_type,
                user_metadata=new.user_metadata,
                expires_at=expires_at,
                now=now,
                overwrite=overwrite,
                encrypted=new.encrypted,
                by=new.key_id,
            )
            if replaced is not None:
                self._replaced.append(replaced)

        return rows

    async def record_folder(self, folder: str, write: Work[tuple[T, bool]]) -> T:
        """Write the rows that make a written folder a checkpoint; if they are not written, the folder goes.

        To be shielded from the caller's end: a write that was begun is not taken back by it, and its folder must stay.

        Args:
            write: the rows; returns what the caller wants of them, and whether they name this folder.

        Raises: what `write` and `Store.write` raise.
        """
        try:
            made, named = await self._store.write(write)
        except Exception:
            await self.remove_folder(folder)
            raise  # a cancellation is no such answer: then nobody knows, and the next start removes what no row names
        if not named:
            await self.remove_folder(folder)
        return made

    async def remove_folder(self, folder: str) -> None:
        """Remove a folder that no record ever named (a failed save, or what an attempt at one left); absent folders are
        fine.

        One that the disk does not let go of stays until the next start sweeps it: nobody's request fails for it.
        """
        await _quietly(self._artifacts.delete(folder))

    async def _retire_folder(self, folder: str) -> None:
        """The same for one that a record named: whoever was told to read it may do so."""
        await _quietly(self._artifacts.retire(folder))

    async def delete(self, project_id: str, path: CheckpointPath, *, by: str) -> None:
        """Delete a checkpoint of this project. `by` is the id of the key that asked. Raises `NotFound`."""
        record = await self.find(project_id, path, field="checkpoint_id")
        await self._remove(record.checkpoint_id, "deleted", by)

    async def remove_replaced(self) -> None:
        """Remove the folders of overwritten checkpoints, but none that a row names: its transaction may have failed."""
        replaced, self._replaced = self._replaced, []
        named = await self._store.read(checkpoints.checkpoint_folders) if replaced else frozenset()
        if replaced:
            fail_point("checkpoint.replaced")
        for folder in replaced:
            if folder not in named:
                await self._retire_folder(folder)

    async def _remove(self, checkpoint_id: str, reason: str, by: str | None) -> None:
        """Forget a checkpoint first, then remove its files: a row always means usable files."""
        now = self._clock()
        folder = await self._store.write(
            lambda db: checkpoints.delete_checkpoint(db, checkpoint_id, reason=reason, by=by, now=now)
        )
        fail_point("checkpoint.forgotten")
        if folder is not None:
            await self._retire_folder(folder)

    async def set_expiry(self, project_id: str, path: CheckpointPath, ttl_seconds: int | None, *, by: str) -> None:
        """Let a checkpoint of this project expire `ttl_seconds` from now, or never. Raises as `delete`."""
        record, now = await self.find(project_id, path, field="checkpoint_id"), self._clock()
        expires_at = None if ttl_seconds is None else now + timedelta(seconds=ttl_seconds)
        await self._store.write(
            lambda db: checkpoints.set_checkpoint_expiry(db, record.checkpoint_id, expires_at, by=by, now=now)
        )

    async def set_public(self, project_id: str, path: CheckpointPath, public: bool, *, by: str) -> None:
        """Let every project read a checkpoint of this one by its path, or end that. Raises as `delete`."""
        record, now = await self.find(project_id, path, field="checkpoint_id"), self._clock()
        await self._store.write(
            lambda db: checkpoints.set_checkpoint_public(db, record.checkpoint_id, public, by=by, now=now)
        )

    async def page(
        self, project_id: str, model_id: str | None, limit: int | None, offset: int
    ) -> tuple[list[CheckpointRecord], int]:
        """Named checkpoints of the project (or of one of its runs), newest first, and how many there are."""
        most = MAX_LISTED if limit is None else limit
        return await self._store.read(
            lambda db: checkpoints.list_checkpoints(db, project_id, model_id, limit=most, offset=offset)
        )

    async def sweep_expired(self) -> None:
        """Delete checkpoints past their time to live, and folders that were replaced by an overwrite."""
        expired = await self._store.read(lambda db: checkpoints.expired_checkpoints(db, self._clock()))
        for record in expired:
            fail_point("expiry.found")
            await self._remove(record.checkpoint_id, "expired", None)
        await self.remove_replaced()
        if expired:
            logger.info("%d checkpoints were past their time to live and are deleted", len(expired))


def refuse_export(record: CheckpointRecord, *, field: str) -> None:
    """Raise `InvalidRequest` for an export: it may be encrypted or edited, so nothing here reads it back."""
    if record.kind == "external":
        raise InvalidRequest(
            f"{field}: {str(path_of(record))!r} is an export for other programs",
            field=field,
            hint="use a tinker://.../weights/... or tinker://.../sampler_weights/... checkpoint",
        )


def path_of(record: CheckpointRecord) -> CheckpointPath:
    """The tinker path of a named checkpoint."""
    if record.name is None:
        raise ValueError("an ephemeral checkpoint has no path")
    return CheckpointPath(record.model_id, record.kind, record.name)


async def _quietly(removal: Awaitable[None]) -> None:
    try:
        await removal
    except OSError:
        logger.exception("a checkpoint folder that no record names could not be removed")
