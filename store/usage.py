"""Usage: tokens by the hour, and how long checkpoints took how much storage.

Tokens are added in the transaction that finishes their operation, and storage begins and ends with the row of its
checkpoint, so each is counted once whatever fails. Not responsible for what counts as a token (`app/services/usage.py`)
or for prices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Literal, cast

from sqlalchemy import func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from store.holding import may_meet_others
from store.records import StorageRecord, TokenUsageRecord
from store.tables import Checkpoint, Run, Session, StoredCheckpoint, TokenUsage

TokenKind = Literal["training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample"]


async def add_tokens(
    db: AsyncSession,
    *,
    project_id: str,
    session_id: str,
    base_model: str,
    tokens: Mapping[TokenKind, int],
    now: datetime,
) -> None:
    """Add tokens of each kind to the hour of `now`. Zero adds no row."""
    bucket = now.replace(minute=0, second=0, microsecond=0)
    insert = postgresql.insert if may_meet_others(db) else sqlite.insert
    for kind, count in tokens.items():
        if count == 0:
            continue
        row = insert(TokenUsage).values(
            project_id=project_id,
            bucket_start=bucket,
            kind=kind,
            base_model=base_model,
            session_id=session_id,
            tokens=count,
        )
        key = ("project_id", "bucket_start", "kind", "base_model", "session_id")
        await db.execute(
            row.on_conflict_do_update(index_elements=key, set_={"tokens": TokenUsage.tokens + row.excluded.tokens})
        )


async def tokens_between(db: AsyncSession, project_id: str, start: datetime, end: datetime) -> list[TokenUsageRecord]:
    """The hours of a project with `start <= hour < end`: by hour, then the most tokens first."""
    wanted = (TokenUsage.project_id == project_id, TokenUsage.bucket_start >= start, TokenUsage.bucket_start < end)
    order = (TokenUsage.bucket_start, TokenUsage.tokens.desc(), TokenUsage.kind, TokenUsage.session_id)
    rows = await db.scalars(select(TokenUsage).where(*wanted).order_by(*order))
    return [
        TokenUsageRecord(row.bucket_start, cast(TokenKind, row.kind), row.base_model, row.session_id, row.tokens)
        for row in rows
    ]


async def begin_storage(
    db: AsyncSession,
    *,
    checkpoint_id: str,
    project_id: str,
    session_id: str,
    base_model: str,
    size_bytes: int,
    now: datetime,
) -> None:
    """A checkpoint takes storage from now on."""
    db.add(
        StoredCheckpoint(
            checkpoint_id=checkpoint_id,
            project_id=project_id,
            session_id=session_id,
            base_model=base_model,
            size_bytes=size_bytes,
            created_at=now,
        )
    )
    await db.flush()


async def end_storage(db: AsyncSession, checkpoint_id: str, now: datetime) -> None:
    """A checkpoint takes no storage any more."""
    live = (StoredCheckpoint.checkpoint_id == checkpoint_id, StoredCheckpoint.deleted_at.is_(None))
    await db.execute(update(StoredCheckpoint).where(*live).values(deleted_at=now))


async def storage_between(db: AsyncSession, project_id: str, start: datetime, end: datetime) -> list[StorageRecord]:
    """Every checkpoint of a project, deleted ones included, that took storage at some time in `[start, end)`."""
    wanted = (
        StoredCheckpoint.project_id == project_id,
        StoredCheckpoint.created_at < end,
        or_(StoredCheckpoint.deleted_at.is_(None), StoredCheckpoint.deleted_at > start),
    )
    columns = (
        StoredCheckpoint.base_model,
        StoredCheckpoint.session_id,
        StoredCheckpoint.size_bytes,
        StoredCheckpoint.created_at,
        StoredCheckpoint.deleted_at,
    )
    rows = await db.execute(select(*columns).where(*wanted).order_by(StoredCheckpoint.created_at))
    return [
        StorageRecord(
            base_model=row.base_model,
            session_id=row.session_id,
            size_bytes=row.size_bytes,
            created_at=row.created_at,
            deleted_at=row.deleted_at,
        )
        for row in rows
    ]


async def current_storage(db: AsyncSession, project_id: str) -> tuple[int, int]:
    """How many checkpoints a project has stored now, those without a name included, and their size in bytes."""
    sizes = (func.count(), func.coalesce(func.sum(Checkpoint.size_bytes), 0))
    row = (await db.execute(select(*sizes).where(Checkpoint.project_id == project_id))).one()
    return int(row[0]), int(row[1])


async def stored_bytes(db: AsyncSession, project_id: str, keys: Collection[str] | None) -> int:
    """Bytes of all checkpoints of a project, or of those of runs that were made with these keys."""
    wanted = [Checkpoint.project_id == project_id]
    if keys is not None:
        wanted.append(Checkpoint.model_id.in_(select(Run.model_id).where(Run.key_id.in_(list(keys)))))
    return int(await db.scalar(select(func.coalesce(func.sum(Checkpoint.size_bytes), 0)).where(*wanted)) or 0)


async def metadata_of_sessions(
    db: AsyncSession, project_id: str, session_ids: Collection[str]
) -> dict[str, dict[str, Any]]:
    """The `user_metadata` of sessions of a project, by session id; ids of other projects are left out."""
    found: dict[str, dict[str, Any]] = {}
    wanted = list(session_ids)
    for begin in range(0, len(wanted), 500):  # SQLite bounds the parameters of a statement
        chosen = (Session.project_id == project_id, Session.session_id.in_(wanted[begin : begin + 500]))
        rows = await db.execute(select(Session.session_id, Session.user_metadata).where(*chosen))
        found.update((row.session_id, row.user_metadata) for row in rows)
    return found
