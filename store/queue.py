"""What of a project has no outcome yet, what failed, and how long operations of the same scopes took lately.

Read without bodies: those may be large. Not responsible for reasons and estimates (`app/services/queue.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.error_codec import error_from_json
from store.records import FailureRecord, WaitingRecord
from store.tables import Operation

RECENT = 20
"""Operations of a scope that say how long the next ones take."""


async def count_waiting(db: AsyncSession, project_id: str) -> int:
    """How many operations of a project have no outcome."""
    mine = (Operation.state == "pending", Operation.project_id == project_id)
    return await db.scalar(select(func.count()).select_from(Operation).where(*mine)) or 0


async def waiting(db: AsyncSession, project_id: str, limit: int) -> list[WaitingRecord]:
    """Operations of a project without an outcome, the oldest first."""
    columns = (Operation.request_id, Operation.kind, Operation.scope, Operation.seq_id, Operation.created_at)
    mine = (Operation.state == "pending", Operation.project_id == project_id)
    order = (Operation.created_at, Operation.scope, Operation.seq_id)
    rows = await db.execute(select(*columns).where(*mine).order_by(*order).limit(limit))
    return [WaitingRecord(*row) for row in rows]


async def failures(db: AsyncSession, project_id: str, since: datetime, limit: int) -> list[FailureRecord]:
    """Operations of a project that failed since then, the newest first; those that somebody cancelled are none."""
    mine = (Operation.state == "failed", Operation.project_id == project_id, Operation.finished_at >= since)
    columns = (
        Operation.request_id,
        Operation.kind,
        Operation.scope,
        Operation.seq_id,
        Operation.error,
        Operation.finished_at,
    )
    rows = await db.execute(select(*columns).where(*mine).order_by(Operation.finished_at.desc()).limit(limit))
    return [
        FailureRecord(row.request_id, row.kind, row.scope, row.seq_id, error_from_json(row.error), row.finished_at)
        for row in rows
        if row.error is not None and row.finished_at is not None and row.error.get("code") != "cancelled"
    ]


@dataclass(frozen=True, slots=True)
class Took:
    """An operation that has an outcome: seconds from its start to there, and when that was."""

    seconds: float
    finished_at: datetime


async def recently(db: AsyncSession, scopes: Collection[str]) -> dict[str, dict[str, list[Took]]]:
    """Scope -> kind -> the last operations that ran, the newest first."""
    found: dict[str, dict[str, list[Took]]] = {}
    for scope in scopes:
        last = (
            select(Operation.kind, Operation.started_at, Operation.finished_at)
            .where(Operation.scope == scope, Operation.settled_seq.is_not(None))
            .order_by(Operation.settled_seq.desc())
            .limit(RECENT)
        )
        kinds: dict[str, list[Took]] = defaultdict(list)
        for row in await db.execute(last):
            if row.started_at is not None and row.finished_at is not None:
                seconds = max(0.0, (row.finished_at - row.started_at).total_seconds())
                kinds[row.kind].append(Took(seconds, row.finished_at))
        found[scope] = dict(kinds)
    return found
