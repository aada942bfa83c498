"""Servers that share a PostgreSQL database: who is alive, who executes which run, and who took what over.

Times are the database's clock, so servers need not agree about theirs. A run has one holder at a time; its `fence`
grows with every change of hands, and whoever writes for a run shows holder and fence in the same transaction, so that
one who was asleep cannot write any more. Not responsible for what a server does with what it holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import bindparam, delete, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from store.holding import held
from store.records import RunState
from store.runs import LIVE
from store.tables import Operation, Run, RunLease

CHANNEL = "tinsmith"
_NOW = "(clock_timestamp() AT TIME ZONE 'UTC')"
_BEAT = text(
    f"INSERT INTO edges (edge_id, started_at, until) VALUES (:edge, {_NOW}, {_NOW} + make_interval(secs => :seconds)) "
    "ON CONFLICT (edge_id) DO UPDATE SET until = excluded.until"
)
ALIVE_QUERY = f"SELECT edge_id FROM edges WHERE until > {_NOW}"
_ALIVE = f"(SELECT edge_id FROM edges WHERE NOT :expired OR until > {_NOW})"
_TAKE_RUNS = text(
    "UPDATE run_leases SET edge_id = :edge, fence = run_leases.fence + 1 WHERE model_id IN ("
    "SELECT held.model_id FROM run_leases AS held JOIN runs ON runs.model_id = held.model_id "
    "WHERE held.edge_id <> :edge AND (runs.state IN :live AND runs.base_model IN :served "
    # One that ended while nobody served it has nobody to end what it had accepted.
    "OR runs.state NOT IN :live AND EXISTS (SELECT 1 FROM operations WHERE operations.state = 'pending' "
    "AND (operations.scope IN ('model:' || held.model_id, 'unload:' || held.model_id) OR operations.scope = "
    "'session:' || runs.session_id || '\\:train' AND operations.seq_id = runs.model_seq_id))) "
    f"AND held.edge_id NOT IN {_ALIVE} "
    "FOR UPDATE OF held SKIP LOCKED) RETURNING model_id, fence"
).bindparams(bindparam("live", expanding=True), bindparam("served", expanding=True))
_TAKE_SAMPLES = text(
    "UPDATE operations SET edge_id = :edge WHERE request_id IN ("
    "SELECT request_id FROM operations WHERE state = 'pending' AND kind = 'sample' AND edge_id IS NOT NULL "
    f"AND edge_id <> :edge AND edge_id NOT IN {_ALIVE} "
    "AND NOT EXISTS (SELECT 1 FROM samplers JOIN sessions ON sessions.session_id = samplers.session_id "
    "WHERE samplers.sampler_id = substr(operations.scope, 9) "  # sampler:ID
    "AND samplers.base_model NOT IN :served AND sessions.state = 'active') "
    "FOR UPDATE SKIP LOCKED) RETURNING request_id"
).bindparams(bindparam("served", expanding=True))


@dataclass(frozen=True, slots=True)
class Lease:
    """A run that a server holds, and its state."""

    fence: int
    state: RunState


@dataclass(frozen=True, slots=True)
class PendingOperation:
    """An operation without an outcome; `scope` and `seq_id` say of which model it is."""

    request_id: str
    scope: str
    seq_id: int | None


async def beat(db: AsyncSession, edge_id: str, seconds: float) -> None:
    """A sign of life, good for as many seconds."""
    await db.execute(_BEAT, {"edge": edge_id, "seconds": seconds})


async def others_alive(db: AsyncSession, edge_id: str) -> int:
    """How many other servers have given a sign of life that is still good."""
    others = text(f"SELECT COUNT(*) FROM edges WHERE edge_id <> :edge AND until > {_NOW}")
    return int(await db.scalar(others, {"edge": edge_id}) or 0)


async def leave(db: AsyncSession, edge_id: str) -> None:
    """A server ends: what it holds may be taken at once. Servers that ended long ago are forgotten too."""
    await db.execute(text("DELETE FROM edges WHERE edge_id = :edge"), {"edge": edge_id})
    await db.execute(text(f"DELETE FROM edges WHERE until < {_NOW} - interval '1 day'"))


async def hold_run(db: AsyncSession, model_id: str, edge_id: str) -> None:
    """A new run is executed where it was accepted."""
    db.add(RunLease(model_id=model_id, edge_id=edge_id, fence=1))
    await db.flush()


async def holder(db: AsyncSession, model_id: str) -> tuple[str, int] | None:
    """Who holds a run, and the fence. Within a write nobody takes it over before the commit."""
    lease = await db.scalar(held(db, select(RunLease).where(RunLease.model_id == model_id)))
    return None if lease is None else (lease.edge_id, lease.fence)


async def take_runs(db: AsyncSession, edge_id: str, served: Collection[str], *, expired: bool) -> dict[str, int]:
    """Take the live runs, on base models that are `served` here, of servers that are gone, and runs that are over and
    have unanswered operations; `expired`: also of servers whose time is over. Run -> fence."""
    about = {"edge": edge_id, "expired": expired, "live": list(LIVE), "served": list(served)}
    rows = await db.execute(_TAKE_RUNS, about)
    return {row.model_id: row.fence for row in rows}


async def take_samples(db: AsyncSession, edge_id: str, served: Collection[str], *, expired: bool) -> list[str]:
    """Take the unfinished samples of servers that are gone, as `take_runs`. Returns their request ids."""
    rows = await db.execute(_TAKE_SAMPLES, {"edge": edge_id, "expired": expired, "served": list(served)})
    return [row.request_id for row in rows]


async def set_sample_edge(db: AsyncSession, request_id: str, edge_id: str) -> None:
    """Note which server runs a sample."""
    await db.execute(update(Operation).where(Operation.request_id == request_id).values(edge_id=edge_id))


async def leases_of(db: AsyncSession, edge_id: str) -> dict[str, Lease]:
    """What a server holds, by model id."""
    chosen = select(RunLease.model_id, RunLease.fence, Run.state).join(Run, Run.model_id == RunLease.model_id)
    rows = await db.execute(chosen.where(RunLease.edge_id == edge_id))
    return {row.model_id: Lease(row.fence, row.state) for row in rows}


async def drop_leases(db: AsyncSession, edge_id: str, model_ids: Collection[str]) -> None:
    """These runs are over."""
    mine = (RunLease.edge_id == edge_id, RunLease.model_id.in_(list(model_ids)))
    await db.execute(delete(RunLease).where(*mine))


async def pending_of_runs(db: AsyncSession) -> list[PendingOperation]:
    """Every operation of a run that has no outcome, in order."""
    columns = (Operation.request_id, Operation.scope, Operation.seq_id)
    chosen = select(*columns).where(Operation.state == "pending", Operation.kind != "sample")
    rows = await db.execute(chosen.order_by(Operation.scope, Operation.seq_id))
    return [PendingOperation(row.request_id, row.scope, row.seq_id) for row in rows]


async def notify(db: AsyncSession, payload: str) -> None:
    """Tell every server, once this transaction is committed."""
    await db.execute(select(func.pg_notify(CHANNEL, payload)))
