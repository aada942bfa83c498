"""Checkpoints: their names and what is in them. Names live only here; the files are under generated folder names.

A row is written only after its folder is complete on disk, and deleted before the folder is: a row means usable files.
Not responsible for the files (`store/artifacts.py`), nor for which names are acceptable (the edge).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import Select, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import AlreadyExists
from schemas.operations import LoraSpec
from store.events import EventName, add_event
from store.holding import held, held_alone
from store.records import CheckpointKind, CheckpointRecord
from store.tables import Checkpoint, Operation, Run
from store.usage import begin_storage, end_storage


async def create_checkpoint(
    db: AsyncSession,
    *,
    checkpoint_id: str,
    project_id: str,
    model_id: str,
    kind: CheckpointKind,
    name: str | None,
    folder: str,
    size_bytes: int,
    base_model: str,
    lora: LoraSpec,
    has_optimizer: bool,
    user_metadata: Mapping[str, Any],
    expires_at: datetime | None,
    now: datetime,
    overwrite: bool,
    encrypted: bool = False,
    optimizer_type: str = "adamw",
    by: str | None = None,
) -> tuple[CheckpointRecord, str | None]:
    """Turn a complete folder into a checkpoint; `name` None makes it ephemeral (reachable by id only).

    `by` is the id of the key that asked, for the audit log.

    It is not public, even if the one that it replaces was: nobody has agreed to show the new weights.

    Returns:
        The record, and the folder of the checkpoint that it replaced (to be deleted after the commit), if any.

    Raises:
        AlreadyExists: the run has a checkpoint of this kind and name, and `overwrite` is False.
    """
    replaced = await _named(db, project_id, model_id, kind, name) if name is not None else None
    if replaced is not None:
        if not overwrite:
            raise AlreadyExists(
                f"this training run has a {kind} checkpoint named {name!r} already",
                field="path",
                hint="Choose another name, or send overwrite=true.",
            )
        await _remove(db, replaced, now, {"reason": "overwritten", "key_id": by})
    row = Checkpoint(
        checkpoint_id=checkpoint_id,
        project_id=project_id,
        model_id=model_id,
        kind=kind,
        name=name,
        folder=folder,
        size_bytes=size_bytes,
        base_model=base_model,
        lora=asdict(lora),
        has_optimizer=has_optimizer,
        encrypted=encrypted,
        public=False,
        optimizer_type=optimizer_type,
        user_metadata=dict(user_metadata),
        created_at=now,
        expires_at=expires_at,
    )
    db.add(row)
    await db.flush()
    run = await db.get_one(Run, model_id)
    await begin_storage(
        db,
        checkpoint_id=checkpoint_id,
        project_id=project_id,
        session_id=run.session_id,
        base_model=base_model,
        size_bytes=size_bytes,
        now=now,
    )
    details = {"size_bytes": size_bytes, "session_id": run.session_id, "key_id": by}
    await _note(db, row, "checkpoint_created", now, details)
    return _record(row), None if replaced is None else replaced.folder


async def find_checkpoint(
    db: AsyncSession, project_id: str, model_id: str, kind: CheckpointKind, name: str
) -> CheckpointRecord | None:
    """The checkpoint of this name, or None if it does not exist or belongs to another project.

    One that is past its `expires_at` is found until it is swept; the caller compares the time.
    """
    row = await _named(db, project_id, model_id, kind, name)
    return None if row is None else _record(row)


async def get_checkpoint(db: AsyncSession, project_id: str | None, checkpoint_id: str) -> CheckpointRecord | None:
    """The checkpoint of this id, or None if it does not exist or belongs to another project.

    `project_id` None finds it in any project: only for who has been given the id by its owner (a signed address).
    """
    row = await db.get(Checkpoint, checkpoint_id)
    return _record(row) if row is not None and project_id in (None, row.project_id) else None


async def find_readable(
    db: AsyncSession, project_ids: Collection[str], model_id: str, kind: CheckpointKind, name: str
) -> CheckpointRecord | None:
    """As `find_checkpoint`, for all that one of these projects may read: its own and what others made public."""
    wanted = (Checkpoint.model_id == model_id, Checkpoint.kind == kind, Checkpoint.name == name)
    allowed = or_(Checkpoint.project_id.in_(list(project_ids)), Checkpoint.public)
    row = await db.scalar(select(Checkpoint).where(*wanted, allowed))
    return None if row is None else _record(row)


async def get_readable(db: AsyncSession, project_id: str, checkpoint_id: str) -> CheckpointRecord | None:
    """The checkpoint of this id, or None if it does not exist or this project may not read it (any more). Within a
    write it stays."""
    row = await db.scalar(held(db, _by_id(checkpoint_id)))
    return _record(row) if row is not None and (row.public or row.project_id == project_id) else None


async def list_checkpoints(
    db: AsyncSession, project_id: str, model_id: str | None = None, *, limit: int, offset: int
) -> tuple[list[CheckpointRecord], int]:
    """One page of the named checkpoints of a project (or of one run), newest first, and how many there are in all."""
    wanted = [Checkpoint.project_id == project_id, Checkpoint.name.is_not(None)]
    if model_id is not None:
        wanted.append(Checkpoint.model_id == model_id)
    order = (Checkpoint.created_at.desc(), Checkpoint.checkpoint_id)
    rows = await db.scalars(select(Checkpoint).where(*wanted).order_by(*order).limit(limit).offset(offset))
    total = await db.scalar(select(func.count()).select_from(Checkpoint).where(*wanted))
    return [_record(row) for row in rows], total or 0


async def latest_checkpoints(
    db: AsyncSession, project_id: str, model_ids: Collection[str]
) -> dict[tuple[str, CheckpointKind], CheckpointRecord]:
    """The newest named checkpoint of each run and kind, by (model_id, kind)."""
    wanted = (
        Checkpoint.project_id == project_id,
        Checkpoint.name.is_not(None),
        Checkpoint.model_id.in_(list(model_ids)),
    )
    rows = await db.scalars(select(Checkpoint).where(*wanted).order_by(Checkpoint.created_at, Checkpoint.checkpoint_id))
    return {(record.model_id, record.kind): record for record in map(_record, rows)}


async def set_checkpoint_expiry(
    db: AsyncSession,
    checkpoint_id: str,
    expires_at: datetime | None,
    *,
    by: str | None = None,
    now: datetime | None = None,
) -> None:
    """Change when a checkpoint is swept; None keeps it. `by` is the id of the key that asked, for the audit log."""
    row = await db.scalar(held_alone(db, _by_id(checkpoint_id)))
    if row is None:
        return
    row.expires_at = expires_at
    await db.flush()
    expires = None if expires_at is None else expires_at.isoformat()
    await _note(db, row, "checkpoint_ttl_set", now or datetime.now(UTC), {"expires_at": expires, "key_id": by})


async def set_checkpoint_public(
    db: AsyncSession, checkpoint_id: str, public: bool, *, by: str | None = None, now: datetime | None = None
) -> None:
    """Let other projects read a checkpoint by its path, or end that. `by`: the key that asked, for the audit log."""
    row = await db.scalar(held_alone(db, _by_id(checkpoint_id)))
    if row is None or row.public == public:
        return
    row.public = public
    await db.flush()
    event: EventName = "checkpoint_published" if public else "checkpoint_unpublished"
    await _note(db, row, event, now or datetime.now(UTC), {"key_id": by})


async def expired_checkpoints(db: AsyncSession, now: datetime) -> list[CheckpointRecord]:
    """Every checkpoint that is past its time, of all projects, but for those that a pending sample still reads."""
    in_use = select(Operation.checkpoint_id).where(Operation.state == "pending", Operation.checkpoint_id.is_not(None))
    over = (Checkpoint.expires_at <= now, Checkpoint.checkpoint_id.not_in(in_use))
    rows = await db.scalars(select(Checkpoint).where(*over).order_by(Checkpoint.expires_at))
    return [_record(row) for row in rows]


async def delete_checkpoint(
    db: AsyncSession, checkpoint_id: str, *, reason: str = "deleted", by: str | None = None, now: datetime | None = None
) -> str | None:
    """Forget a checkpoint. Returns its folder, to be deleted after the commit; None if there is no such checkpoint, or
    if it is to go because it has `expired` and a pending sample still reads it.

    `reason` and `by` (the id of the key that asked) are for the audit log.
    """
    row = await db.scalar(_by_id(checkpoint_id).with_for_update())
    if row is None or (reason == "expired" and await _is_read(db, checkpoint_id)):
        return None
    await _remove(db, row, now or datetime.now(UTC), {"reason": reason, "key_id": by})
    return row.folder


async def checkpoint_folders(db: AsyncSession) -> frozenset[str]:
    """The folders of all checkpoints: what `ArtifactStore.sweep_incomplete` keeps."""
    return frozenset(await db.scalars(select(Checkpoint.folder)))


async def sizes(db: AsyncSession) -> dict[str, tuple[int, int]]:
    """How many checkpoints of each kind there are, of all projects, and their bytes."""
    rows = await db.execute(
        select(Checkpoint.kind, func.count(), func.coalesce(func.sum(Checkpoint.size_bytes), 0)).group_by(
            Checkpoint.kind
        )
    )
    return {kind: (int(number), int(size)) for kind, number, size in rows}


async def _is_read(db: AsyncSession, checkpoint_id: str) -> bool:
    reading = (Operation.state == "pending", Operation.checkpoint_id == checkpoint_id)
    return await db.scalar(select(Operation.request_id).where(*reading).limit(1)) is not None


def _by_id(checkpoint_id: str) -> Select[Checkpoint]:
    return select(Checkpoint).where(Checkpoint.checkpoint_id == checkpoint_id)


async def _named(
    db: AsyncSession, project_id: str, model_id: str, kind: CheckpointKind, name: str
) -> Checkpoint | None:
    wanted = (Checkpoint.model_id == model_id, Checkpoint.kind == kind, Checkpoint.name == name)
    return await db.scalar(held_alone(db, select(Checkpoint).where(Checkpoint.project_id == project_id, *wanted)))


async def _remove(db: AsyncSession, row: Checkpoint, now: datetime, details: Mapping[str, Any]) -> None:
    await _note(db, row, "checkpoint_deleted", now, details)
    await end_storage(db, row.checkpoint_id, now)
    await db.delete(row)
    await db.flush()


async def _note(db: AsyncSession, row: Checkpoint, event: EventName, now: datetime, details: Mapping[str, Any]) -> None:
    """A line in the audit log. Ephemeral checkpoints come and go with their samplers; nobody asked for them by name."""
    if row.name is not None:
        about = {"model_id": row.model_id, "kind": row.kind, "name": row.name}
        await add_event(db, row.project_id, event, now, {**about, **details})


def _record(row: Checkpoint) -> CheckpointRecord:
    return CheckpointRecord(
        checkpoint_id=row.checkpoint_id,
        project_id=row.project_id,
        model_id=row.model_id,
        kind=cast(CheckpointKind, row.kind),
        name=row.name,
        folder=row.folder,
        size_bytes=row.size_bytes,
        base_model=row.base_model,
        lora=LoraSpec(**row.lora),
        has_optimizer=row.has_optimizer,
        encrypted=row.encrypted,
        public=row.public,
        optimizer_type=row.optimizer_type,
        user_metadata=row.user_metadata,
        created_at=row.created_at,
        expires_at=row.expires_at,
    )
