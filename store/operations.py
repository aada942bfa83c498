"""The operation log: every accepted request under its natural key, and what came of it.

The log decides what a repeat is: `(scope, seq_id)` with the same kind and digest is the same operation, with another
it is a conflict. Outcomes survive restarts and can be handed out again and again until `expire_results`; the line
itself stays, so that a late repeat is still recognised. Not responsible for running anything, nor for body files.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import cache
from typing import Any, cast

from sqlalchemy import bindparam, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.sql.dml import ReturningUpdate

from schemas.errors import SeqIdConflict, TinsmithError
from store.error_codec import error_from_json, error_to_json
from store.holding import held_alone, in_turn, may_meet_others
from store.limit_counters import settled
from store.records import Body, BodyRef, NewOperation, OperationRecord, OperationState
from store.snapshots import needed_for_replay
from store.tables import Operation
from store.usage import TokenKind

_REFUSED = "refused"
_AT_ONCE = 500
"""Ids in one statement: databases bound their number."""


async def append(db: AsyncSession, new: NewOperation) -> tuple[OperationRecord, bool]:
    """Write a request to the log, once.

    Returns:
        The operation, and whether it is new. If it is not, the body that came with `new` is not used: where it is a
        file, the caller deletes it. A line that holds the place of a refused request is replaced by a corrected one.

    Raises:
        SeqIdConflict: this `seq_id` was used in this scope for another request.
    """
    known = None
    if new.seq_id is not None:
        under_key = select(Operation).where(Operation.scope == new.scope, Operation.seq_id == new.seq_id)
        known = await db.scalar(held_alone(db, under_key))
    if known is not None and known.state != _REFUSED:
        if (known.project_id, known.kind, known.digest) != (new.project_id, new.kind, new.digest):
            raise SeqIdConflict(
                f"seq_id {new.seq_id} was used before with another request",
                field="seq_id",
                hint="Send the same request to get its result again, or use the next seq_id for a new one.",
            )
        return _record(known), False
    if known is not None:
        await db.delete(known)
        await db.flush()
    inline, ref = _split(new.body)
    row = Operation(
        request_id=new.request_id,
        project_id=new.project_id,
        kind=new.kind,
        scope=new.scope,
        seq_id=new.seq_id,
        digest=new.digest,
        state="pending",
        created_at=new.created_at,
        checkpoint_id=new.checkpoint_id,
        body_inline=inline,
        body_ref=ref,
    )
    db.add(row)
    await db.flush()
    return _record(row), True


async def record_refusal(db: AsyncSession, project_id: str, scope: str, seq_id: int, now: datetime) -> None:
    """Note that a refused request consumed its `seq_id`, so that later ones need not wait for it.

    An operation or refusal that is there already stays as it is.
    """
    taken = select(Operation.request_id).where(Operation.scope == scope, Operation.seq_id == seq_id)
    if await db.scalar(taken) is not None:
        return
    row = Operation(
        request_id=f"refused-{secrets.token_hex(16)}",
        project_id=project_id,
        kind=_REFUSED,
        scope=scope,
        seq_id=seq_id,
        digest="",
        state=_REFUSED,
        created_at=now,
        finished_at=now,
    )
    db.add(row)
    await db.flush()


async def highest_seq(db: AsyncSession, scope: str) -> int | None:
    """The highest `seq_id` that was used in a scope, refused ones included; None if none was.

    Within a write the number after it is the caller's, who uses it before anybody else gets one.
    """
    await in_turn(db, f"number {scope}")
    return await db.scalar(select(func.max(Operation.seq_id)).where(Operation.scope == scope))


async def get_operation(db: AsyncSession, project_id: str, request_id: str) -> OperationRecord | None:
    """The operation, or None if it does not exist, was refused, or belongs to another project."""
    row = await db.get(Operation, request_id)
    return _record(row) if row is not None and row.project_id == project_id and row.state != _REFUSED else None


async def find_operation(db: AsyncSession, project_id: str, scope: str, seq_id: int) -> OperationRecord | None:
    """The operation under a natural key, or None as `get_operation`."""
    row = await db.scalar(select(Operation).where(Operation.scope == scope, Operation.seq_id == seq_id))
    return _record(row) if row is not None and row.project_id == project_id and row.state != _REFUSED else None


async def finish(
    db: AsyncSession,
    request_id: str,
    result: Body,
    content_type: str,
    now: datetime,
    *,
    started_at: datetime | None = None,
    tokens: Mapping[TokenKind, int] | None = None,
) -> bool:
    """Keep the result of a pending operation, which began to run at `started_at` and used `tokens`.

    Returns:
        False if the operation is not pending (any more): the first outcome stands, and where `result` is a file the
        caller deletes it.
    """
    inline, ref = _split(result)
    outcome = {
        "result_inline": inline,
        "result_ref": ref,
        "content_type": content_type,
        "started_at": started_at,
    }
    return await _settle(db, request_id, "done", now, outcome, tokens or {})


async def fail(
    db: AsyncSession,
    request_id: str,
    error: TinsmithError,
    now: datetime,
    *,
    started_at: datetime | None = None,
    tokens: Mapping[TokenKind, int] | None = None,
) -> bool:
    """Keep the failure of a pending operation (`started_at` None: it never ran).

    Args:
        tokens: what it used, of a sample that was cancelled; None = it failed, which uses nothing.

    Returns:
        False if the operation is not pending (any more).
    """
    return await _settle(
        db, request_id, "failed", now, {"error": error_to_json(error), "started_at": started_at}, tokens
    )


async def mark_delivered(db: AsyncSession, delivered: Mapping[str, datetime]) -> None:
    """Note when outcomes were handed out. Only the first time counts, so that polling does not keep a result alive."""
    if not delivered:
        return
    settled = (
        Operation.request_id == bindparam("delivered_id"),
        or_(Operation.state == "done", Operation.state == "failed"),
        Operation.delivered_at.is_(None),
    )
    change = update(Operation.__table__).where(*settled).values(delivered_at=bindparam("delivered_time"))  # type: ignore[arg-type]
    rows = [{"delivered_id": request_id, "delivered_time": time} for request_id, time in delivered.items()]
    await (await db.connection()).execute(change, rows)


async def unfinished(db: AsyncSession) -> list[OperationRecord]:
    """Every pending operation of all projects, by scope and `seq_id`; what a restarted server has to settle."""
    order = (Operation.scope, Operation.seq_id, Operation.created_at)
    rows = await db.scalars(select(Operation).where(Operation.state == "pending").order_by(*order))
    return [_record(row) for row in rows]


async def count_deaths(db: AsyncSession, running: Collection[str], again: Collection[str]) -> int:
    """A server was killed while it executed these, of which those that are settled were not cut off, and executed the
    others again. Returns how many are counted."""
    cut_off = Operation.request_id.in_(running) & (Operation.state == "pending")
    executed = Operation.request_id.in_(again) & (Operation.state != "pending")
    change = update(Operation).where(or_(cut_off, executed)).values(deaths=Operation.deaths + 1)
    return len((await db.scalars(change.returning(Operation.request_id))).all())


async def still_pending(db: AsyncSession, request_ids: Collection[str]) -> list[OperationRecord]:
    """Those of these operations that have no outcome yet, in the order of `unfinished`."""
    order = (Operation.scope, Operation.seq_id, Operation.created_at)
    ids, found = list(request_ids), []
    for start in range(0, len(ids), _AT_ONCE):
        chosen = (Operation.state == "pending", Operation.request_id.in_(ids[start : start + _AT_ONCE]))
        found += [_record(row) for row in await db.scalars(select(Operation).where(*chosen).order_by(*order))]
    return found


EXPIRED_AT_ONCE = 500
"""Operations whose outcomes are dropped in one write."""


async def expire_results(
    db: AsyncSession, delivered_before: datetime, undelivered_before: datetime, *, limit: int = EXPIRED_AT_ONCE
) -> tuple[int, list[BodyRef]]:
    """Drop the outcomes and bodies of operations that were delivered, or finished and never asked for, long ago.

    Bodies stay (and failures as they are) where a live run may have to do it again: see `store.snapshots`. At most
    `limit` operations at a time, so that no other write waits long; the next call takes the rest.

    Returns:
        How many operations that were, and the files that nobody needs any more, to be deleted after the commit.
    """
    over = (
        Operation.state.in_(("done", "failed")),
        or_(
            Operation.delivered_at < delivered_before,
            Operation.delivered_at.is_(None) & (Operation.finished_at < undelivered_before),
        ),
    )
    needed = needed_for_replay()
    columns = (Operation.request_id, Operation.body_ref, Operation.result_ref, needed.label("needed"))
    chosen = select(*columns).where(*over, or_(Operation.state == "done", ~needed))
    rows = (await db.execute(chosen.order_by(Operation.finished_at).limit(limit))).all()
    refs: list[BodyRef] = []
    outcome = dict.fromkeys(("result_inline", "result_ref", "error", "content_type"))
    for keeps in (False, True):
        some = [row for row in rows if bool(row.needed) is keeps]
        gone = outcome if keeps else outcome | dict.fromkeys(("body_inline", "body_ref"))
        refs += [BodyRef(**row.result_ref) for row in some if row.result_ref is not None]
        refs += [BodyRef(**row.body_ref) for row in some if row.body_ref is not None and not keeps]
        ids = Operation.request_id.in_([row.request_id for row in some])
        await db.execute(update(Operation).where(ids).values(state="expired", **gone))
    return len(rows), refs


async def body_names(db: AsyncSession) -> frozenset[str]:
    """The names of all body files in use: what `Bodies.sweep` keeps."""
    in_use = or_(Operation.body_ref.is_not(None), Operation.result_ref.is_not(None))
    rows = await db.execute(select(Operation.body_ref, Operation.result_ref).where(in_use))
    return frozenset(ref["name"] for row in rows for ref in row if ref is not None)


async def _settle(
    db: AsyncSession,
    request_id: str,
    state: OperationState,
    now: datetime,
    outcome: dict[str, Any],
    tokens: Mapping[TokenKind, int] | None = None,
) -> bool:
    pending = (Operation.request_id == request_id, Operation.state == "pending")
    if may_meet_others(db):
        # Whoever reads a place has all places before it: the next one is given when the one before is committed.
        scope = await db.scalar(select(Operation.scope).where(*pending))
        await in_turn(db, f"settle {scope}")
    new = {f"new_{name}": value for name, value in (outcome | {"state": state, "finished_at": now}).items()}
    await db.flush()
    change = _settling(frozenset(outcome) | {"state", "finished_at"})
    row = (await (await db.connection()).execute(change, {"settled_id": request_id, **new})).one_or_none()
    if row is not None and row.limited is not None:
        await settled(db, row.limited, tokens, whole=state == "done")
    return row is not None


@cache
def _settling(columns: frozenset[str]) -> ReturningUpdate[tuple[str, Any]]:
    """The change that settles a pending operation and gives it the next place of its scope.

    Every operation runs it. It is kept, since to build it takes longer than to run it: `finish` took 10.5 ms of CPU
    with a new one each time, and takes 4.9 ms.
    """
    operations = Operation.__table__
    before = operations.alias()
    last = select(func.coalesce(func.max(before.c.settled_seq), 0)).where(before.c.scope == operations.c.scope)
    values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in columns}
    change = (
        update(Operation.__table__)  # type: ignore[arg-type]
        .where(operations.c.request_id == bindparam("settled_id"), operations.c.state == "pending")
        .values(**values, settled_seq=last.scalar_subquery() + 1, deaths=0)
    )
    return change.returning(operations.c.request_id, operations.c.limited)


def _split(body: Body) -> tuple[bytes | None, dict[str, Any] | None]:
    return (None, asdict(body)) if isinstance(body, BodyRef) else (body, None)


def _join(inline: bytes | None, ref: dict[str, Any] | None) -> Body | None:
    return inline if ref is None else BodyRef(**ref)


def _record(row: Operation) -> OperationRecord:
    body = _join(row.body_inline, row.body_ref)
    return OperationRecord(
        request_id=row.request_id,
        project_id=row.project_id,
        kind=row.kind,
        scope=row.scope,
        seq_id=row.seq_id,
        digest=row.digest,
        body=b"" if body is None else body,
        state=cast(OperationState, row.state),
        result=_join(row.result_inline, row.result_ref),
        content_type=row.content_type,
        error=None if row.error is None else error_from_json(row.error),
        created_at=row.created_at,
        finished_at=row.finished_at,
        delivered_at=row.delivered_at,
        checkpoint_id=row.checkpoint_id,
        deaths=row.deaths,
        limited=row.limited,
    )
