"""Lines of the operation log that nobody can ask for any more.

A line outlives its outcome, so that a late repeat of its request is recognised. Once its session has been over for
long, no repeat is taken anyway; then the line goes too. Lines without a session go by the time of their own outcome:
samples of the doors for other protocols, which are never repeated, and copies and imports, whose repeats come soon or
not at all. What was used and what was done stays in its own tables.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ColumnElement, Select, and_, delete, exists, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.tables import Operation, Project, Session
from store.timeline import scopes_of

_DIRECT = "direct:"
"""What the scope of a project's samples without a session begins with; the rest is the project's id."""
_UNLOAD = "unload:"
"""The same of the one request that frees a model; the rest is the model's id, which begins with its session's."""
_SINGLE = ("copy", "import")
"""Kinds of scopes with one line each: every such request has its own."""

_STATE = Operation.state.concat("")
"""The state, in a form for which no database uses its index: nearly every line of a log that is kept for a week has
expired, so to go through those, once for each session, takes minutes where the index of scopes takes milliseconds."""
_OVER = _STATE.in_(("expired", "refused"))


async def forget_operations(db: AsyncSession, before: datetime, *, sessions: int = 20, lines: int = 1000) -> int:
    """Delete expired and refused lines of sessions that ended before, and expired ones without a session that finished
    before.

    At most those of `sessions` sessions, and about `lines` of the others, so that no other write waits long; the next
    sweep takes the rest.

    Returns:
        The number of lines that are gone.
    """
    inside = _lines_of(Session.session_id.expression)
    ended = select(Session.session_id).where(Session.ended_at < before, exists().where(_OVER, inside))
    gone = 0
    for session_id in (await db.scalars(ended.limit(sessions))).all():
        gone += await _delete(db, select(Operation.request_id).where(_OVER, _lines_of(literal(session_id))))
    gone += await _forget_single(db, before, lines)
    return gone + await _forget_direct(db, before, lines)


async def _forget_single(db: AsyncSession, before: datetime, lines: int) -> int:
    """Requests with a scope of their own. Each of them made a checkpoint, so there are few to look through."""
    mine = or_(*(_below(literal(kind)) for kind in _SINGLE))
    return await _delete(db, select(Operation.request_id).where(mine, *_expired(before)).limit(lines))


async def _forget_direct(db: AsyncSession, before: datetime, lines: int) -> int:
    """Samples without a session, those of the project first whose lines are over for longest.

    They are numbered as they are accepted and finish in about that order, so a project whose first line is not over
    has none to forget, and only the first ones are looked at: the log may keep millions. The last number of a project
    stays, for the next one is the number after it, and none is given twice.
    """
    scope = literal(_DIRECT) + Project.project_id
    numbers = select(Operation.seq_id).where(Operation.scope == scope).correlate(Project)
    first = numbers.with_only_columns(func.min(Operation.seq_id)).scalar_subquery()
    last = numbers.with_only_columns(func.max(Operation.seq_id)).scalar_subquery()
    old = (
        select(Operation.scope, last)
        .join_from(Project, Operation, and_(Operation.scope == scope, Operation.seq_id == first))
        .where(*_expired(before), first < last)
        .order_by(Operation.finished_at)
        .limit(lines)
    )
    gone = 0
    for scope_name, last_seq in (await db.execute(old)).all():
        if gone >= lines:
            break
        mine = (Operation.scope == scope_name, Operation.seq_id < last_seq)
        begin = select(Operation.request_id).where(*mine).order_by(Operation.seq_id).limit(lines - gone)
        gone += await _delete(db, begin, *_expired(before))
    return gone


async def _delete(db: AsyncSession, chosen: Select[str], *conditions: ColumnElement[bool]) -> int:
    """Delete the lines with these request ids that also meet the conditions; returns how many."""
    these = (Operation.request_id.in_(chosen), *conditions)
    return len((await db.execute(delete(Operation).where(*these).returning(Operation.request_id))).all())


def _expired(before: datetime) -> tuple[ColumnElement[bool], ...]:
    return (_STATE == "expired", Operation.finished_at < before)


def _lines_of(session_id: ColumnElement[str]) -> ColumnElement[bool]:
    return or_(scopes_of(session_id), _below(literal(_UNLOAD) + session_id))


def _below(begin: ColumnElement[str]) -> ColumnElement[bool]:
    """That a scope begins so, with a colon behind it. A range and not LIKE, for the reasons of `scopes_of`."""
    return and_(Operation.scope >= begin + ":", Operation.scope < begin + ";")
