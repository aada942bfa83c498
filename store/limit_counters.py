"""What projects and keys have used of their limits, one row for each.

Everything is counted in the transaction that accepts or settles an operation, so a crash neither loses a count nor
counts twice, and several servers on one database count together. What was counted for an operation stands in its own
row (`Operation.limited`), and is taken back from there when it is settled. Not responsible for which limits there are
or what happens at one (`app/services/tenant_limits.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, Literal

from sqlalchemy import Select, Update, bindparam, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from store.holding import held_alone, may_meet_others
from store.tables import LimitCounter, Operation
from store.usage import TokenKind

BucketName = Literal["requests", "training", "sampling"]
MOST_AHEAD = 60.0
"""Seconds by which the clocks of servers on one database may differ. A time that lies further ahead was told by a clock
that was wrong."""
_NEWEST = 1 / 16
"""Weight of the newest sample in what a sequence is thought to draw."""


@dataclass(slots=True)
class Counters:
    """The row of one subject, held until the commit. See `store.tables.LimitCounter`."""

    subject: str
    requests_level: float | None = None
    requests_at: float | None = None
    training_level: float | None = None
    training_at: float | None = None
    sampling_level: float | None = None
    sampling_at: float | None = None
    sequence_tokens: float | None = None
    operations: int = 0
    held: int = 0
    training_used: int = 0
    training_reserved: int = 0
    sampling_used: int = 0
    sampling_reserved: int = 0

    def available(self, bucket: BucketName, now: float, rate: float, burst: float) -> float:
        """What is in a bucket that gets `rate` a second and holds `burst`; negative if it is promised already."""
        level, at = getattr(self, f"{bucket}_level"), getattr(self, f"{bucket}_at")
        if level is None or at is None:
            return burst
        return min(burst, float(level) + max(0.0, now - float(at)) * rate)

    def take(self, bucket: BucketName, amount: float, now: float, rate: float, burst: float) -> float:
        """Take an amount out of a bucket; returns the seconds until it will really have been there."""
        left = self.available(bucket, now, rate, burst) - amount
        at = getattr(self, f"{bucket}_at")
        setattr(self, f"{bucket}_level", left)
        # Else nothing would flow in until the time of a clock that was once far ahead.
        setattr(self, f"{bucket}_at", now if at is None or at > now + MOST_AHEAD else max(now, at))
        return max(0.0, -left / rate)


_COLUMNS = tuple(field.name for field in fields(Counters))


async def counters_of(db: AsyncSession, subject: str) -> Counters:
    """The counters of a subject. Within a write the caller has them alone until the commit; whoever needs several
    takes them in the order of their names."""
    statement = held_alone(db, _look_up()).where(LimitCounter.subject == bindparam("wanted"))
    row = (await db.execute(statement, {"wanted": subject})).one_or_none()
    return Counters(subject) if row is None else Counters(*row)


async def keep(db: AsyncSession, counters: Counters) -> None:
    """Write the counters that `counters_of` gave within the same write."""
    values = {f"new_{name}": value for name, value in asdict(counters).items()}
    connection = await db.connection()
    changed = await connection.execute(_change(), values)
    if changed.rowcount:
        return
    insert = postgresql.insert if may_meet_others(db) else sqlite.insert
    await connection.execute(insert(LimitCounter).values(**asdict(counters)))


async def restart_budget(db: AsyncSession, subject: str, kind: Literal["training", "sampling"]) -> None:
    """A budget was set: what is used of it is counted from here on. What is under way stays reserved."""
    counters = await counters_of(db, subject)
    setattr(counters, f"{kind}_used", 0)
    await keep(db, counters)


async def settled(
    db: AsyncSession, limited: Mapping[str, Any], tokens: Mapping[TokenKind, int] | None, *, whole: bool
) -> None:
    """An operation has its outcome: free what was held for it, and count what it used.

    Args:
        limited: what `Operation.limited` holds.
        tokens: what it used; None = it failed, which uses nothing of a budget.
        whole: whether it was finished. A sample that was cancelled would have drawn at least as much as it did.
    """
    for subject, share in sorted(limited["subjects"].items()):
        counters = await counters_of(db, subject)
        if "slot" in share and limited.get("held"):
            counters.held -= 1
        elif "slot" in share:
            counters.operations -= 1
        used = tokens or {}
        training = used.get("training", 0)
        prompt = used.get("sampling_prefill", 0) + used.get("sampling_prefill_cached", 0)
        drawn = used.get("sampling_sample", 0)
        if "training" in share:
            counters.training_reserved -= share["training"]
            counters.training_used += training
        if "sampling" in share:
            counters.sampling_reserved -= share["sampling"]
            counters.sampling_used += prompt + drawn
        if "charged" in share and tokens is not None:
            counters.sampling_level = (counters.sampling_level or 0.0) - (prompt + drawn - share["charged"])
            mean, before = drawn / share["sequences"], counters.sequence_tokens
            if before is None and whole:
                counters.sequence_tokens = mean
            elif before is not None and (whole or mean > before):
                counters.sequence_tokens = before + _NEWEST * (mean - before)
        await keep(db, counters)


async def note_limited(db: AsyncSession, request_id: str, limited: Mapping[str, Any]) -> None:
    """Keep with a pending operation what was counted for it."""
    row = update(Operation).where(Operation.request_id == request_id, Operation.state == "pending")
    await db.execute(row.values(limited=dict(limited)))


async def limited_of(db: AsyncSession, request_id: str) -> dict[str, Any] | None:
    """What was counted for an operation that is still pending."""
    pending = (Operation.request_id == request_id, Operation.state == "pending")
    found = await db.scalar(held_alone(db, select(Operation.limited).where(*pending)))
    return None if found is None else dict(found)


async def others_wait(db: AsyncSession, scope: str, seq_id: int) -> bool:
    """Whether an operation with a later number in the same order is pending already."""
    later = (Operation.scope == scope, Operation.seq_id > seq_id, Operation.state == "pending")
    return await db.scalar(select(Operation.request_id).where(*later).limit(1)) is not None


@cache
def _look_up() -> Select[Any]:
    return select(*(getattr(LimitCounter, name) for name in _COLUMNS))


@cache
def _change() -> Update:
    table = LimitCounter.__table__
    values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in _COLUMNS if name != "subject"}
    return update(table).where(table.c.subject == bindparam("new_subject")).values(**values)  # type: ignore[arg-type]
