"""The operation log as a list of outcomes: what was settled in a scope, in order, and what may be dropped of it.

Places are given with the outcome itself, one after the other (`store.operations`), so the list has no holes and
survives restarts; a client that remembers the last place it saw misses nothing. Not responsible for waiting
(`app/services/completions.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from store.records import BodyRef, Completion
from store.tables import Operation

_SETTLED = ("done", "failed", "expired")
_AT_ONCE = 500
"""Ids in one statement: SQLite bounds their number."""


@dataclass(frozen=True, slots=True)
class Client:
    """One client of a scope: the requests whose `seq_id` is from `first` to `last`."""

    project_id: str
    scope: str
    first: int
    last: int


async def completions(db: AsyncSession, client: Client, after: int, limit: int) -> list[Completion]:
    """Up to `limit` outcomes behind place `after`, in order. An expired result counts as failed: it cannot be had."""
    size = func.coalesce(func.length(Operation.result_inline), Operation.result_ref["size"].as_integer())
    columns = (Operation.request_id, Operation.settled_seq, Operation.state, size)
    behind = (*_of(client), Operation.settled_seq > after, Operation.state.in_(_SETTLED))
    rows = await db.execute(select(*columns).where(*behind).order_by(Operation.settled_seq).limit(limit))
    return [
        Completion(request_id, place or 0, state == "done", length if state == "done" else None)
        for request_id, place, state, length in rows
    ]


async def release(db: AsyncSession, client: Client, request_ids: Collection[str], now: datetime) -> list[BodyRef]:
    """Drop the results that a client says it has; ids that are not its own, or not finished, are passed over.

    Returns:
        The files that nobody needs any more, to be deleted after the commit.
    """
    ids = sorted(request_ids)
    refs: list[BodyRef] = []
    for start in range(0, len(ids), _AT_ONCE):
        chosen = (*_of(client), Operation.state == "done", Operation.request_id.in_(ids[start : start + _AT_ONCE]))
        rows = await db.execute(select(Operation.body_ref, Operation.result_ref).where(*chosen))
        refs += [BodyRef(**ref) for row in rows for ref in row if ref is not None]
        empty = dict.fromkeys(("body_inline", "body_ref", "result_inline", "result_ref", "content_type"))
        delivered = func.coalesce(Operation.delivered_at, now)
        await db.execute(update(Operation).where(*chosen).values(state="expired", delivered_at=delivered, **empty))
    return refs


def _of(client: Client) -> tuple[ColumnElement[bool], ...]:
    return (
        Operation.scope == client.scope,
        Operation.project_id == client.project_id,
        Operation.seq_id.between(client.first, client.last),
    )
