"""Sampled sequences whose statistics were asked to be remembered. Not responsible for what is done with them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.records import SequenceRecord
from store.tables import SampledSequence

_AT_ONCE = 500
"""Ids in one statement: SQLite bounds their number."""


async def add_sequences(db: AsyncSession, records: Sequence[SequenceRecord]) -> None:
    """Keep sequences. Their ids are new: a sequence id is made once, with its request."""
    db.add_all(
        SampledSequence(
            sequence_id=record.sequence_id,
            project_id=record.project_id,
            base_model=record.base_model,
            checkpoint_id=record.checkpoint_id,
            temperature=record.temperature,
            tokens=record.tokens,
            logprobs=record.logprobs,
            plain_logprobs=record.plain_logprobs,
            created_at=record.created_at,
        )
        for record in records
    )
    await db.flush()


async def get_sequences(db: AsyncSession, project_id: str, sequence_ids: Collection[str]) -> dict[str, SequenceRecord]:
    """The sequences of this project among these ids, by id."""
    ids = sorted(set(sequence_ids))
    found: dict[str, SequenceRecord] = {}
    for start in range(0, len(ids), _AT_ONCE):
        wanted = (
            SampledSequence.project_id == project_id,
            SampledSequence.sequence_id.in_(ids[start : start + _AT_ONCE]),
        )
        rows = await db.scalars(select(SampledSequence).where(*wanted))
        found.update((row.sequence_id, _record(row)) for row in rows)
    return found


async def expire_sequences(db: AsyncSession, before: datetime, *, limit: int = 500) -> int:
    """Forget sequences that were sampled before a time, at most `limit` at once; returns how many."""
    old = select(SampledSequence.sequence_id).where(SampledSequence.created_at < before).limit(limit)
    gone = delete(SampledSequence).where(SampledSequence.sequence_id.in_(old))
    return len((await db.scalars(gone.returning(SampledSequence.sequence_id))).all())


def _record(row: SampledSequence) -> SequenceRecord:
    return SequenceRecord(
        sequence_id=row.sequence_id,
        project_id=row.project_id,
        base_model=row.base_model,
        checkpoint_id=row.checkpoint_id,
        temperature=row.temperature,
        tokens=row.tokens,
        logprobs=row.logprobs,
        plain_logprobs=row.plain_logprobs,
        created_at=row.created_at,
    )
