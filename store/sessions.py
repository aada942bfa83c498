"""Sessions: one per client program, kept alive by heartbeats. Not responsible for what ends with a session."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from sqlalchemy import ColumnElement, Select, String, and_, false, func, or_, select, update
from sqlalchemy import cast as cast_to
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import SeqIdConflict
from store.events import add_event
from store.holding import held, held_alone
from store.records import SessionRecord, SessionState, SessionSummaryRecord
from store.tables import Checkpoint, Run, Session

SEARCHED = 1000
"""How many sessions of a search by pairs are looked at together: anybody can make many that only seem to match."""


async def create_session(
    db: AsyncSession,
    *,
    session_id: str,
    project_id: str,
    tags: Sequence[str],
    user_metadata: Mapping[str, Any],
    sdk_version: str | None,
    display_name: str | None,
    idempotency_key: str | None,
    now: datetime,
    by: str | None = None,
) -> SessionRecord:
    """Add a session; the same idempotency key in the same project gives the session that it made before.

    `by` is the id of the key that asked for it, for the audit log.

    Raises:
        SeqIdConflict: the idempotency key was used for another session.
    """
    if idempotency_key is not None:
        known = await db.scalar(
            select(Session).where(Session.project_id == project_id, Session.idempotency_key == idempotency_key)
        )
        if known is not None:
            given = (list(tags), dict(user_metadata), sdk_version, display_name)
            if (known.tags, known.user_metadata, known.sdk_version, known.display_name) != given:
                raise SeqIdConflict(
                    "this X-Idempotency-Key was used before with another request",
                    field="X-Idempotency-Key",
                    hint="Send the same request to get its session again, or use another key for a new one.",
                )
            return _record(known)
    row = Session(
        session_id=session_id,
        project_id=project_id,
        idempotency_key=idempotency_key,
        tags=list(tags),
        user_metadata=dict(user_metadata),
        sdk_version=sdk_version,
        display_name=display_name,
        state="active",
        created_at=now,
        last_seen_at=now,
    )
    db.add(row)
    await db.flush()
    details = {"session_id": session_id, "display_name": display_name, "key_id": by}
    await add_event(db, project_id, "session_created", now, details)
    return _record(row)


async def get_session(db: AsyncSession, project_id: str, session_id: str) -> SessionRecord | None:
    """The session, or None if it does not exist or belongs to another project."""
    row = await _find(db, project_id, session_id)
    return None if row is None else _record(row)


async def list_sessions(db: AsyncSession, project_id: str, limit: int, offset: int) -> tuple[list[SessionRecord], int]:
    """One page of a project's sessions, newest first, and how many there are in all."""
    mine = Session.project_id == project_id
    order = (Session.created_at.desc(), Session.session_id)
    rows = await db.scalars(select(Session).where(mine).order_by(*order).limit(limit).offset(offset))
    total = await db.scalar(select(func.count()).select_from(Session).where(mine))
    return [_record(row) for row in rows], total or 0


async def search_sessions(
    db: AsyncSession,
    project_id: str,
    *,
    session_id: str | None = None,
    words: Sequence[str] = (),
    user_metadata: Mapping[str, str] | None = None,
    statuses: Collection[tuple[SessionState, str | None]] | None = None,
    after: tuple[datetime, str] | None = None,
    limit: int,
) -> list[SessionSummaryRecord]:
    """Sessions of a project, newest first, that match every condition that is given.

    Args:
        session_id, words: a session of this id, or one whose name holds every word. Letters out of ASCII match in
            either case.
        user_metadata: pairs that the session must have.
        statuses: any of these states; one with a reason matches only sessions that were finished for it.
        after: (created_at, session_id) of the last session of the page before.
    """
    wanted: list[ColumnElement[bool]] = [Session.project_id == project_id]
    either: list[ColumnElement[bool]] = []
    if session_id is not None:
        either.append(Session.session_id == session_id)
    if words:
        shown = func.lower(Session.display_name)
        either.append(and_(*(shown.contains(word.lower(), autoescape=True) for word in words)))
    if either:
        wanted.append(or_(*either))
    pairs = dict(user_metadata or {})
    for pair in pairs.items():
        # Narrows the search; a pair that is nested deeper looks the same, so what is found is looked at again.
        written = json.dumps(dict([pair]))[1:-1]
        wanted.append(cast_to(Session.user_metadata, String).contains(written, autoescape=True))
    if statuses is not None:
        wanted.append(or_(false(), *(_has_status(state, reason) for state, reason in statuses)))
    rows: list[Session] = []
    size = max(limit, SEARCHED) if pairs else limit
    while len(rows) < limit:
        page = await _page(db, wanted, after, size)
        rows += [row for row in page if pairs.items() <= _texts(row.user_metadata).items()]
        if len(page) < size:
            break
        after = (page[-1].created_at, page[-1].session_id)
    rows = rows[:limit]
    stored = await _stored(db, [row.session_id for row in rows])
    return [SessionSummaryRecord(_record(row), *stored.get(row.session_id, (0, 0))) for row in rows]


async def finish_session(
    db: AsyncSession,
    project_id: str,
    session_id: str,
    reason: str,
    detail: str | None,
    now: datetime,
    *,
    by: str | None = None,
) -> SessionRecord | None:
    """End a session for the client's own reason. The first reason wins: a session that is over stays as it ended.

    `by` is the id of the key that asked for it, for the audit log.
    """
    row = await _find(db, project_id, session_id, held_alone)
    if row is None:
        return None
    if row.state == "active":
        row.state, row.finish_reason, row.finish_detail, row.ended_at = "finished", reason, detail, now
        await db.flush()
        details = {"session_id": session_id, "reason": reason, "key_id": by}
        await add_event(db, project_id, "session_finished", now, details)
    return _record(row)


async def touch_sessions(db: AsyncSession, last_seen: Mapping[str, datetime]) -> None:
    """Note when sessions were last heard of. Time only moves forward; ended and unknown sessions are left alone."""
    for session_id, seen in last_seen.items():
        live = (Session.session_id == session_id, Session.state == "active", Session.last_seen_at < seen)
        await db.execute(update(Session).where(*live).values(last_seen_at=seen))


async def silent_sessions(db: AsyncSession, before: datetime) -> list[SessionRecord]:
    """Active sessions that were last heard of before `before`, the most silent first."""
    silent = (Session.state == "active", Session.last_seen_at < before)
    rows = await db.scalars(select(Session).where(*silent).order_by(Session.last_seen_at))
    return [_record(row) for row in rows]


async def expire_session(db: AsyncSession, session_id: str, now: datetime) -> bool:
    """End a silent session. False if it was over already (or never was)."""
    row = await db.scalar(held_alone(db, select(Session).where(Session.session_id == session_id)))
    if row is None or row.state != "active":
        return False
    row.state, row.ended_at = "expired", now
    await db.flush()
    await add_event(db, row.project_id, "session_expired", now, {"session_id": session_id})
    return True


async def _page(
    db: AsyncSession, wanted: Sequence[ColumnElement[bool]], after: tuple[datetime, str] | None, limit: int
) -> list[Session]:
    chosen = select(Session).where(*wanted)
    if after is not None:
        created_at, last_id = after
        older = and_(Session.created_at == created_at, Session.session_id < last_id)
        chosen = chosen.where(or_(Session.created_at < created_at, older))
    order = (Session.created_at.desc(), Session.session_id.desc())
    return list(await db.scalars(chosen.order_by(*order).limit(limit)))


def _texts(user_metadata: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in user_metadata.items() if isinstance(value, str)}


def _has_status(state: SessionState, reason: str | None) -> ColumnElement[bool]:
    matches = Session.state == state
    return matches if reason is None else and_(matches, Session.finish_reason == reason)


async def _stored(db: AsyncSession, session_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Number and bytes of the named checkpoints of each session that has any."""
    sizes = select(Run.session_id, func.count(), func.sum(Checkpoint.size_bytes)).join(
        Checkpoint, Checkpoint.model_id == Run.model_id
    )
    wanted = (Run.session_id.in_(session_ids), Checkpoint.name.is_not(None))
    rows = await db.execute(sizes.where(*wanted).group_by(Run.session_id))
    return {session_id: (count, int(size)) for session_id, count, size in rows}


async def _find(
    db: AsyncSession, project_id: str, session_id: str, hold: Callable[[AsyncSession, Select[Any]], Select[Any]] = held
) -> Session | None:
    row: Session | None = await db.scalar(hold(db, select(Session).where(Session.session_id == session_id)))
    return row if row is not None and row.project_id == project_id else None


def _record(row: Session) -> SessionRecord:
    return SessionRecord(
        session_id=row.session_id,
        project_id=row.project_id,
        tags=tuple(row.tags),
        user_metadata=row.user_metadata,
        sdk_version=row.sdk_version,
        display_name=row.display_name,
        state=cast(SessionState, row.state),
        finish_reason=row.finish_reason,
        finish_detail=row.finish_detail,
        created_at=row.created_at,
        last_seen_at=row.last_seen_at,
        ended_at=row.ended_at,
    )
