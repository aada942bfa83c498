"""Why work waits: every unfinished operation of a project, its place, the reason in words, and about how long.

An estimate is made of what the last operations of the same run or sampler took, waiting between turns included, so it
holds as long as the server is about as busy as it was. Not responsible for order or reasons (`workers`), or for rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import fmean
from typing import Literal

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.operations import Operations
from app.services.paths import is_direct, model_id_of
from schemas.errors import TinsmithError
from store import queue as rows_of
from store.database import Store
from store.records import FailureRecord, WaitingRecord

MOST_SHOWN = 500
MOST_SCOPES = 100
"""Runs and samplers for which an estimate is made at once."""
MOST_FAILURES = 50
FAILURES_OF = timedelta(hours=24)

Owner = Literal["run", "sampler", "project"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """One operation without an outcome. `place` counts from 1 within its run or sampler; `seconds_left` None: nothing
    of its kind has been finished there yet."""

    request_id: str
    kind: str
    owner: Owner
    owner_id: str
    seq_id: int | None
    base_model: str | None
    state: str
    running: bool
    place: int
    reason: str
    accepted: datetime
    started: datetime | None
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class Failure:
    """One operation that failed in the last day."""

    request_id: str
    kind: str
    owner: Owner
    owner_id: str
    seq_id: int | None
    error: TinsmithError
    at: datetime


@dataclass(frozen=True, slots=True)
class QueueView:
    """What waits, of `total` operations in all, and what failed lately."""

    waiting: Sequence[Waiting]
    total: int
    failures: Sequence[Failure]


class Queue:
    """Reads the queue of a project. `clock` is the time, aware UTC."""

    def __init__(self, store: Store, operations: Operations, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._operations = operations
        self._clock = clock

    async def view(self, project_id: str) -> QueueView:
        """What a project waits for, the oldest first, and what failed in the last day, the newest first."""
        now = self._clock()

        async def read(
            db: AsyncSession,
        ) -> tuple[list[WaitingRecord], int, list[FailureRecord], dict[str, dict[str, list[rows_of.Took]]]]:
            waiting = await rows_of.waiting(db, project_id, MOST_SHOWN)
            total = len(waiting)
            if total == MOST_SHOWN:
                total = await rows_of.count_waiting(db, project_id)
            scopes = list(dict.fromkeys(one.scope for one in waiting))[:MOST_SCOPES]
            failed = await rows_of.failures(db, project_id, now - FAILURES_OF, MOST_FAILURES)
            return waiting, total, failed, await rows_of.recently(db, scopes)

        waiting, total, failed, took = await self._store.read(read)
        return QueueView(self._placed(waiting, took, now), total, [_failure(one) for one in failed])

    def _placed(
        self, waiting: Sequence[WaitingRecord], took: Mapping[str, Mapping[str, Sequence[rows_of.Took]]], now: datetime
    ) -> list[Waiting]:
        ahead: dict[str, list[float | None]] = {}
        found: dict[str, Waiting] = {}
        for one in sorted(waiting, key=lambda each: (each.scope, each.seq_id or 0, each.created_at)):
            before = ahead.setdefault(one.scope, [])
            started = self._operations.started_at(one.request_id)
            recent = took.get(one.scope, {}).get(one.kind, ())
            before.append(_left(recent, started, now))
            # Samples of a sampler run beside each other, operations of a run one after the other.
            left = _beside(recent, len(before), started, now) if one.kind == "sample" else _sum(before)
            found[one.request_id] = self._shown(one, len(before), started, left)
        return [found[one.request_id] for one in waiting]

    def _shown(self, one: WaitingRecord, place: int, started: datetime | None, left: float | None) -> Waiting:
        here = self._operations.has(one.request_id)
        queue = self._operations.queue_state(one.request_id)
        owner, owner_id = owner_of(one.scope, one.seq_id)
        elsewhere = (
            "another server of this installation has it" if self._store.shared is not None else "about to be done"
        )
        reason = queue.reason or ("about to start" if here else elsewhere)
        return Waiting(
            request_id=one.request_id,
            kind=one.kind,
            owner=owner,
            owner_id=owner_id,
            seq_id=one.seq_id,
            base_model=self._operations.base_model(one.request_id),
            state=queue.state,
            running=started is not None and queue.state == "active",
            place=place,
            reason=reason,
            accepted=one.created_at,
            started=started,
            seconds_left=left,
        )


def owner_of(scope: str, seq_id: int | None) -> tuple[Owner, str]:
    """Whose an operation is: a run's, a sampler's, or the project's own; and the id ("" for the project)."""
    kind, _, rest = scope.partition(":")
    if is_direct(scope):
        return "project", ""
    if kind == "session":  # it creates a run, whose number is its own
        return "run", model_id_of(rest.rpartition(":")[0], seq_id or 0)
    return ("sampler", rest) if kind == "sampler" else ("run", rest)


def _failure(one: FailureRecord) -> Failure:
    owner, owner_id = owner_of(one.scope, one.seq_id)
    return Failure(one.request_id, one.kind, owner, owner_id, one.seq_id, one.error, one.finished_at)


def _left(recent: Sequence[rows_of.Took], started: datetime | None, now: datetime) -> float | None:
    """What the mean of the last ones leaves."""
    if not recent:
        return None
    spent = 0.0 if started is None else (now - started).total_seconds()
    return max(0.0, fmean(one.seconds for one in recent) - spent)


def _beside(recent: Sequence[rows_of.Took], place: int, started: datetime | None, now: datetime) -> float | None:
    """How long until `place` more are done, at the rate of the last ones; one that runs already needs its own time."""
    own = _left(recent, started, now)
    if own is None or started is not None or len(recent) < 2:
        return own
    span = (recent[0].finished_at - recent[-1].finished_at).total_seconds()
    return own + (place - 1) * span / (len(recent) - 1)


def _sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
