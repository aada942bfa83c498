"""The audit log as its project reads it: a day at a time, with the paths that people know.

Responsible for days and for `tinker://` paths. Not responsible for writing lines (`store/events.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Literal

from app.services.paths import CheckpointPath
from store import events
from store.database import Store
from store.records import EventRecord

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]
_RESOURCES: Mapping[EventType, str | None] = {
    "all": None,
    "checkpoints": "checkpoint",
    "projects": "project",
    "teams": "team",
    "organizations": "organization",
}
"""There are no teams and organizations here, so nothing ever happens to them; everything else is in `all` only."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One event. `model_id` and `tinker_path` are set for events of checkpoints."""

    at: datetime
    event: str
    details: Mapping[str, Any]
    model_id: str | None
    tinker_path: str | None


class Audit:
    """Reads the audit log. `clock` is the time, aware UTC."""

    def __init__(self, store: Store, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._clock = clock

    async def day(self, project_id: str, event_type: EventType, day: date | None) -> list[AuditEntry]:
        """The events of one UTC day (default: today) of a project, oldest first."""
        begin = datetime.combine(day or self._clock().date(), time(tzinfo=UTC))
        # The last date that there is has no day after it.
        end = datetime.max.replace(tzinfo=UTC) if begin.date() == date.max else begin + timedelta(days=1)
        resource = _RESOURCES[event_type]
        found = await self._store.read(lambda db: events.list_events(db, project_id, begin, end, resource))
        return [_entry(record) for record in found]


def _entry(record: EventRecord) -> AuditEntry:
    details = record.details
    path = None
    if record.event.startswith("checkpoint_"):
        path = str(CheckpointPath(details["model_id"], details["kind"], details["name"]))
        details = {**details, "tinker_path": path}
    known = {name: value for name, value in details.items() if value is not None}
    return AuditEntry(record.at, record.event, known, details.get("model_id"), path)
