"""Training runs: the life of one adapter, from its creation to its end. Not responsible for the weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, cast

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import SeqIdConflict
from schemas.operations import LoraSpec
from store.holding import held_alone
from store.records import RunRecord, RunState
from store.tables import Run

LIVE: tuple[RunState, ...] = ("creating", "ready")
"""States in which a run takes work, and what it did may have to be done again."""
_FROM: Mapping[RunState, tuple[RunState, ...]] = {
    "creating": (),
    "ready": ("creating",),
    "failed": ("creating",),
    "lost": LIVE,
    "closed": ("creating", "ready", "failed", "lost"),
}
"""From which states a state can be reached. Lost weights never come back, and what is closed stays closed."""


async def create_run(
    db: AsyncSession,
    *,
    model_id: str,
    project_id: str,
    session_id: str,
    model_seq_id: int,
    base_model: str,
    lora: LoraSpec | None,
    user_metadata: Mapping[str, Any],
    optimizer_type: str | None,
    now: datetime,
    key_id: str | None = None,
) -> RunRecord:
    """Add a run in state `creating`, made with the key `key_id`.

    Raises:
        SeqIdConflict: the session has a run with this `model_seq_id`. (A repeated request is recognised by the
            operation log before it comes here.)
    """
    taken = (Run.session_id == session_id, Run.model_seq_id == model_seq_id)
    if await db.scalar(select(Run.model_id).where(*taken)) is not None:
        raise SeqIdConflict(f"model_seq_id {model_seq_id} was used before in this session", field="model_seq_id")
    row = Run(
        model_id=model_id,
        project_id=project_id,
        session_id=session_id,
        model_seq_id=model_seq_id,
        base_model=base_model,
        lora=None if lora is None else asdict(lora),
        user_metadata=dict(user_metadata),
        optimizer_type=optimizer_type,
        state="creating",
        created_at=now,
        last_request_at=now,
        key_id=key_id,
    )
    db.add(row)
    await db.flush()
    return _record(row)


async def get_run(db: AsyncSession, project_id: str, model_id: str) -> RunRecord | None:
    """The run, or None if it does not exist or belongs to another project. Within a write it stays as it is."""
    row = await db.scalar(held_alone(db, select(Run).where(Run.model_id == model_id)))
    return _record(row) if row is not None and row.project_id == project_id else None


async def find_run(db: AsyncSession, model_id: str) -> RunRecord | None:
    """The run of any project, for the server's own purposes."""
    row = await db.get(Run, model_id)
    return None if row is None else _record(row)


async def list_runs(db: AsyncSession, project_id: str, limit: int, offset: int) -> tuple[list[RunRecord], int]:
    """One page of a project's runs, newest first, and how many there are in all; those never created are left out."""
    mine = (Run.project_id == project_id, Run.state != "failed")
    order = (Run.created_at.desc(), Run.model_id)
    rows = await db.scalars(select(Run).where(*mine).order_by(*order).limit(limit).offset(offset))
    total = await db.scalar(select(func.count()).select_from(Run).where(*mine))
    return [_record(row) for row in rows], total or 0


async def set_run_state(db: AsyncSession, model_id: str, state: RunState) -> bool:
    """Move a run on. False if it cannot get there from where it is, e.g. a late `ready` for a run that was closed."""
    reachable = (Run.model_id == model_id, Run.state.in_(_FROM[state]))
    moved = await db.scalars(update(Run).where(*reachable).values(state=state).returning(Run.model_id))
    return moved.one_or_none() is not None


async def set_run_lora(db: AsyncSession, model_id: str, lora: LoraSpec) -> None:
    """Note the geometry of the adapter, once it is known."""
    await db.execute(update(Run).where(Run.model_id == model_id).values(lora=asdict(lora)))


async def touch_run(db: AsyncSession, model_id: str, now: datetime) -> None:
    """Note that a request for this run was accepted. Time only moves forward."""
    await db.execute(update(Run).where(Run.model_id == model_id, Run.last_request_at < now).values(last_request_at=now))


async def runs_of_session(db: AsyncSession, session_id: str) -> list[RunRecord]:
    """All runs of a session in order of their creation. The caller has checked whose session it is."""
    rows = await db.scalars(select(Run).where(Run.session_id == session_id).order_by(Run.model_seq_id))
    return [_record(row) for row in rows]


async def key_of_run(db: AsyncSession, model_id: str) -> str | None:
    """The key that a run was made with, if that is known."""
    row = await db.get(Run, model_id)
    return None if row is None else row.key_id


async def count_live(db: AsyncSession, project_id: str, keys: Collection[str] | None) -> int:
    """How many runs of a project, or of them those made with these keys, take work."""
    wanted = [Run.state.in_(LIVE), Run.project_id == project_id]
    if keys is not None:
        wanted.append(Run.key_id.in_(list(keys)))
    return await db.scalar(select(func.count()).select_from(Run).where(*wanted)) or 0


async def live_runs(db: AsyncSession) -> list[RunRecord]:
    """Every run of all projects that takes work: at start-up, no adapter of them is in any memory."""
    rows = await db.scalars(select(Run).where(Run.state.in_(LIVE)).order_by(Run.created_at, Run.model_id))
    return [_record(row) for row in rows]


def _record(row: Run) -> RunRecord:
    return RunRecord(
        model_id=row.model_id,
        project_id=row.project_id,
        session_id=row.session_id,
        model_seq_id=row.model_seq_id,
        base_model=row.base_model,
        lora=None if row.lora is None else LoraSpec(**row.lora),
        user_metadata=row.user_metadata,
        optimizer_type=row.optimizer_type,
        state=cast(RunState, row.state),
        created_at=row.created_at,
        last_request_at=row.last_request_at,
    )
