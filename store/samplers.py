"""Samplers: which weights a sampling session samples. Not responsible for the sampling."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import SeqIdConflict
from store.records import SamplerRecord
from store.tables import Sampler


async def create_sampler(
    db: AsyncSession,
    *,
    sampler_id: str,
    project_id: str,
    session_id: str,
    seq_id: int,
    base_model: str,
    model_path: str | None,
    checkpoint_id: str | None,
    now: datetime,
    follows_model_id: str | None = None,
) -> SamplerRecord:
    """Add a sampler. The same `(session_id, seq_id)` with the same content gives the one that was made before.

    Raises:
        SeqIdConflict: the same `(session_id, seq_id)` with other content.
    """
    known = await db.scalar(select(Sampler).where(Sampler.session_id == session_id, Sampler.seq_id == seq_id))
    if known is not None:
        wanted = (project_id, base_model, model_path, checkpoint_id, follows_model_id)
        present = (known.project_id, known.base_model, known.model_path, known.checkpoint_id, known.follows_model_id)
        if wanted != present:
            raise SeqIdConflict(
                f"sampling_session_seq_id {seq_id} was used before in this session with other content",
                field="sampling_session_seq_id",
            )
        return _record(known)
    row = Sampler(
        sampler_id=sampler_id,
        project_id=project_id,
        session_id=session_id,
        seq_id=seq_id,
        base_model=base_model,
        model_path=model_path,
        checkpoint_id=checkpoint_id,
        follows_model_id=follows_model_id,
        clones=0,
        created_at=now,
    )
    db.add(row)
    await db.flush()
    return _record(row)


async def get_sampler(db: AsyncSession, project_id: str, sampler_id: str) -> SamplerRecord | None:
    """The sampler, or None if it does not exist or belongs to another project."""
    row = await db.get(Sampler, sampler_id)
    return _record(row) if row is not None and row.project_id == project_id else None


async def count_clone(db: AsyncSession, sampler_id: str) -> int:
    """Count one more client of an existing sampler; returns its number, from 1 (the first client is 0)."""
    change = update(Sampler).where(Sampler.sampler_id == sampler_id).values(clones=Sampler.clones + 1)
    return (await db.scalars(change.returning(Sampler.clones))).one()


async def samplers_of_session(db: AsyncSession, session_id: str) -> list[SamplerRecord]:
    """All samplers of a session in order of their creation. The caller has checked whose session it is."""
    rows = await db.scalars(select(Sampler).where(Sampler.session_id == session_id).order_by(Sampler.seq_id))
    return [_record(row) for row in rows]


def _record(row: Sampler) -> SamplerRecord:
    return SamplerRecord(
        sampler_id=row.sampler_id,
        project_id=row.project_id,
        session_id=row.session_id,
        seq_id=row.seq_id,
        base_model=row.base_model,
        model_path=row.model_path,
        checkpoint_id=row.checkpoint_id,
        created_at=row.created_at,
        follows_model_id=row.follows_model_id,
    )
