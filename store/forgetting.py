"""Lines of the operation log that nobody can ask for any more.

A line outlives its outcome, so that a late repeat of its request is recognised. Once its session has been over for
long, no repeat is taken anyway; then the line goes too. What was used and what was done stays in its own tables.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ColumnElement, and_, delete, exists, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import Operation, Session

_OVER = Operation.state.in_(("expired", "refused"))


async def forget_operations(db: AsyncSession, before: datetime, *, sessions: int = 20, lines: int = 500) -> int:
    """Delete expired and refused lines of sessions that ended before, and expired ones without a place in any order.

    At most those of `sessions` sessions, and `lines` of the others, so that no other write waits long; the next sweep
    takes the rest.

    Returns:
        The number of lines that are gone.
    """
    inside = _scopes(Session.session_id.expression)
    ended = select(Session.session_id).where(Session.ended_at < before, exists().where(_OVER, inside))
    gone = 0
    for session_id in (await db.scalars(ended.limit(sessions))).all():
        dropped = await db.execute(
            delete(Operation).where(_OVER, _scopes(literal(session_id))).returning(Operation.request_id)
        )
        gone += len(dropped.all())
    placeless = (Operation.state == "expired", Operation.seq_id.is_(None), Operation.finished_at < before)
    old = select(Operation.request_id).where(*placeless).limit(lines)
    dropped = await db.execute(delete(Operation).where(Operation.request_id.in_(old)).returning(Operation.request_id))
    return gone + len(dropped.all())


def _scopes(session_id: ColumnElement[str]) -> ColumnElement[bool]:
    """The scopes of a session. Ranges and not LIKE: they use the index, and no character means anything else."""
    begins = [literal(kind) + session_id for kind in ("model:", "sampler:", "session:")]
    return or_(*(and_(Operation.scope >= begin + ":", Operation.scope < begin + ";") for begin in begins))
