"""The audit log: what happened to the things of a project, written in the transaction that makes it true.

A line is never changed or removed. It holds ids and names, never a key, a prompt or a body. Not responsible for who
may read it, nor for `tinker://` paths (`app/services/audit.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, cast

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from store.records import EventRecord
from store.tables import Event

EventName = Literal[
    "project_created",
    "project_archived",
    "user_created",
    "user_deleted",
    "member_added",
    "member_changed",
    "member_removed",
    "project_limits_changed",
    "key_created",
    "key_changed",
    "key_rotated",
    "key_revoked",
    "key_limits_changed",
    "session_created",
    "session_finished",
    "session_expired",
    "checkpoint_created",
    "checkpoint_deleted",
    "checkpoint_ttl_set",
    "checkpoint_published",
    "checkpoint_unpublished",
    "checkpoint_copied",
    "checkpoint_imported",
]
"""`{resource}_{action}`."""


async def add_event(
    db: AsyncSession, project_id: str, event: EventName, now: datetime, details: Mapping[str, Any]
) -> None:
    """Add a line. `details` is a JSON object: who did it (`key_id`, where it is known) and what it was about."""
    resource = event.partition("_")[0]
    db.add(Event(project_id=project_id, at=now, resource=resource, event=event, details=dict(details)))
    await db.flush()


async def list_events(
    db: AsyncSession, project_id: str, since: datetime, until: datetime, resource: str | None = None
) -> list[EventRecord]:
    """The lines of a project with `since <= time < until`, oldest first; `resource` None = all of them."""
    wanted = [Event.project_id == project_id, Event.at >= since, Event.at < until]
    if resource is not None:
        wanted.append(Event.resource == resource)
    rows = await db.scalars(select(Event).where(*wanted).order_by(Event.at, Event.event_id))
    return [EventRecord(cast(EventName, row.event), row.at, row.details) for row in rows]
