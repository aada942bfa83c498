"""Lines of the operation log that nobody can ask for any more.

A line outlives its outcome, so that a late repeat of its request is recognised. Once its session has been over for
long, no repeat is taken anyway; then the line goes too. What was used and what was done stays in its own tables.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, exists, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import Operation, Session
from store.timeline import scopes_of

_OVER = Operation.state.in_(("expired", "refused"))


async def forget_operations(db: AsyncSession, before: datetime, *, sessions: int = 20, lines: int = 500) -> int:
    """Delete expired and refused lines of sessions that ended before, and expired ones without a place in any order.

    At most those of `sessions` sessions, and `lines` of the others, so that no other write waits long; the next sweep
    takes the rest.

    Returns:
        The number of lines that are gone.
    """
    inside = scopes_of(Session.session_id.expression)
    ended = select(Session.session_id).where(Session.ended_at < before, exists().where(_OVER, inside))
    gone = 0
    for session_id in (await db.scalars(ended.limit(sessions))).all():
        dropped = await db.execute(
            delete(Operation).where(_OVER, scopes_of(literal(session_id))).returning(Operation.request_id)
        )
        gone += len(dropped.all())
    placeless = (Operation.state == "expired", Operation.seq_id.is_(None), Operation.finished_at < before)
    old = select(Operation.request_id).where(*placeless).limit(lines)
    dropped = await db.execute(delete(Operation).where(Operation.request_id.in_(old)).returning(Operation.request_id))
    return gone + len(dropped.all())
