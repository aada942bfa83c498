"""Snapshots of live runs, and which part of the log is needed to go on from them.

The two newest snapshots of a run are kept, and the requests after the older one: should the newest be damaged, that
one serves. Before there are two, everything since the run's creation is kept. Not responsible for the files
(`store/snapshot_files.py`), nor for executing anything again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import ColumnElement, and_, case, delete, func, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from store.records import BodyRef, LoggedOperation, SnapshotRecord
from store.runs import LIVE
from store.tables import Operation, Run, Snapshot

KEPT = 2
CHANGING = ("forward_backward", "optim_step", "zero_grad", "load_weights")
"""Kinds of operations that change a model."""
MODEL_SCOPE = "model:"
"""What the scope of a model's operations begins with, before its id."""


async def snapshots_of(db: AsyncSession, model_id: str) -> list[SnapshotRecord]:
    """The snapshots of a run, the newest first."""
    order = (Snapshot.applied_seq.desc(), Snapshot.created_at.desc())
    rows = await db.scalars(select(Snapshot).where(Snapshot.model_id == model_id).order_by(*order))
    return [_record(row) for row in rows]


async def add_snapshot(db: AsyncSession, new: SnapshotRecord) -> tuple[list[str], list[BodyRef]] | None:
    """Record a file that is durable; older snapshots, and the bodies of requests that it covers, are forgotten.

    Returns:
        What nobody needs any more, to be deleted after the commit: files of snapshots, and bodies. None if it cannot be
        used (yet): an operation that it contains has no durable outcome, or the run is not live; nothing was changed.
    """
    scope = MODEL_SCOPE + new.model_id
    state = await db.scalar(select(Run.state).where(Run.model_id == new.model_id))
    contained = (Operation.scope == scope, Operation.seq_id <= new.applied_seq)
    open_ones = select(func.count()).where(*contained, Operation.state == "pending")
    if state != "ready" or await db.scalar(open_ones):
        return None
    db.add(
        Snapshot(
            file=new.file,
            model_id=new.model_id,
            applied_seq=new.applied_seq,
            size_bytes=new.size_bytes,
            sha256=new.sha256,
            created_at=new.created_at,
        )
    )
    await db.flush()
    known = await snapshots_of(db, new.model_id)
    old = [snapshot.file for snapshot in known[KEPT:]]
    await db.execute(delete(Snapshot).where(Snapshot.file.in_(old)))
    if len(known) < KEPT:
        return old, []
    return old, await _drop_bodies(db, scope, known[KEPT - 1].applied_seq)


async def drop_snapshot(db: AsyncSession, file: str) -> None:
    """Forget a snapshot, its file being gone or of no use."""
    await db.execute(delete(Snapshot).where(Snapshot.file == file))


async def snapshot_files(db: AsyncSession) -> frozenset[str]:
    """The files of all snapshots."""
    return frozenset(await db.scalars(select(Snapshot.file)))


async def collect_ended(db: AsyncSession, limit: int = 500) -> tuple[list[str], list[BodyRef]]:
    """Forget snapshots of runs that are over, and the requests that were kept for them. Returns as `add_snapshot`."""
    ended = select(Run.model_id).where(Run.state.not_in(LIVE))
    chosen = select(Snapshot.file, Snapshot.model_id).where(Snapshot.model_id.in_(ended)).limit(limit)
    rows = (await db.execute(chosen)).all()
    await db.execute(delete(Snapshot).where(Snapshot.file.in_([row.file for row in rows])))
    refs: list[BodyRef] = []
    for model_id in dict.fromkeys(row.model_id for row in rows):
        refs += await _drop_bodies(db, MODEL_SCOPE + model_id, None)
    return [row.file for row in rows], refs


async def drop_unneeded(db: AsyncSession) -> list[BodyRef]:
    """At start-up: drop the bodies of expired operations that no run needs any more. Returns their files."""
    kept = or_(Operation.body_inline.is_not(None), Operation.body_ref.is_not(None))
    chosen = (Operation.state == "expired", kept, ~needed_for_replay())
    rows = (await db.execute(select(Operation.request_id, Operation.body_ref).where(*chosen))).all()
    for row in rows:
        mine = Operation.request_id == row.request_id
        await db.execute(update(Operation).where(mine).values(body_inline=None, body_ref=None))
    return [BodyRef(**row.body_ref) for row in rows if row.body_ref is not None]


async def place_in_log(db: AsyncSession, model_id: str) -> tuple[int, list[int], list[int]]:
    """How far a run has come: the seq_id after all settled ones, those that are pending, and those above it that were
    refused."""
    mine = (Operation.scope == MODEL_SCOPE + model_id, Operation.seq_id.is_not(None))
    settled = select(Operation.seq_id).where(*mine, Operation.state.in_(("done", "failed", "expired")))
    last = await db.scalar(settled.order_by(Operation.seq_id.desc()).limit(1)) or 0
    order = select(Operation.seq_id).where(*mine).order_by(Operation.seq_id)
    pending = await db.scalars(order.where(Operation.state == "pending"))
    refused = await db.scalars(order.where(Operation.state == "refused", Operation.seq_id > last))
    return (
        last + 1,
        [seq_id for seq_id in pending if seq_id is not None],
        [seq_id for seq_id in refused if seq_id is not None],
    )


async def log_of(db: AsyncSession, model_id: str, after_seq: int) -> list[LoggedOperation]:
    """The operations of a run after `after_seq`, in order, without its creation."""
    size = case(
        (Operation.body_inline.is_not(None), func.length(Operation.body_inline)),
        (Operation.body_ref.is_not(None), Operation.body_ref["size"].as_integer()),
    )
    columns = (
        Operation.request_id,
        Operation.kind,
        Operation.seq_id,
        Operation.state,
        Operation.error["code"].as_string(),
        size,
        Operation.deaths,
    )
    chosen = select(*columns).where(Operation.scope == MODEL_SCOPE + model_id, Operation.seq_id > after_seq)
    return [LoggedOperation(*row) for row in (await db.execute(chosen.order_by(Operation.seq_id))).all()]


def needed_for_replay() -> ColumnElement[bool]:
    """SQL: whether the body of an operation may be needed to bring a live run back.

    The creation of a run is always kept: it is small, and also says how the run was made.
    """
    older = (
        select(Snapshot.applied_seq)
        .where(Snapshot.model_id == Run.model_id)
        .order_by(Snapshot.applied_seq.desc(), Snapshot.created_at.desc())
        .limit(1)
        .offset(KEPT - 1)
        .correlate(Run)
        .scalar_subquery()
    )
    live = (
        select(literal(1))
        .where(
            Run.model_id == func.substr(Operation.scope, len(MODEL_SCOPE) + 1),
            Run.state.in_(LIVE),
            Operation.seq_id > func.coalesce(older, -1),
        )
        .correlate(Operation)
        .exists()
    )
    changing = and_(Operation.scope.startswith(MODEL_SCOPE, autoescape=True), Operation.kind.in_(CHANGING), live)
    creating = and_(
        Operation.scope.startswith("session:", autoescape=True),
        Operation.kind.in_(("create_model", "load_weights")),
        Operation.state.in_(("done", "expired")),
    )
    return or_(changing, creating)


async def _drop_bodies(db: AsyncSession, scope: str, covered_seq: int | None) -> list[BodyRef]:
    """Drop the bodies of settled operations up to `covered_seq`; None = of all that have expired."""
    settled: tuple[ColumnElement[bool], ...]
    if covered_seq is None:
        settled = (Operation.scope == scope, Operation.state == "expired")
    else:
        states = Operation.state.in_(("done", "failed", "expired"))
        settled = (Operation.scope == scope, Operation.seq_id <= covered_seq, states)
    kept = or_(Operation.body_inline.is_not(None), Operation.body_ref.is_not(None))
    refs: Iterable[dict[str, Any] | None] = await db.scalars(select(Operation.body_ref).where(*settled, kept))
    files = [BodyRef(**ref) for ref in refs if ref is not None]
    await db.execute(update(Operation).where(*settled, kept).values(body_inline=None, body_ref=None))
    return files


def _record(row: Snapshot) -> SnapshotRecord:
    return SnapshotRecord(
        file=row.file,
        model_id=row.model_id,
        applied_seq=row.applied_seq,
        size_bytes=row.size_bytes,
        sha256=row.sha256,
        created_at=row.created_at,
    )
