"""The timeline of a session as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is the Trace Event Format of Chrome: a JSON object whose `traceEvents` are complete slices (`ph` "X", times
in microseconds) and names (`ph` "M"). Each training run and each sampler is a track group of its own (a "process").
An operation is one slice from its acceptance to its first delivery, with `queued`, `run` and `delivery` inside. Slices
of one track must nest, so operations that overlap lie on lanes ("threads") beside each other.
Not responsible for noting the times (`operations.py`, `housekeeping.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
from sqlalchemy.ext.asyncio import AsyncSession

from app.services.signed_urls import SignedUrls
from schemas.errors import NotFound, PayloadTooLarge
from store import timeline
from store.database import Store
from store.records import TimelineRecord
from store.sessions import get_session

FILE = "trace.json"
MAX_OPERATIONS = 100_000
"""More would be a file that no viewer opens, put together in memory."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Traces:
    """Hands out traces by signed addresses.

    Args:
        flush: writes what is known in memory only, such as deliveries of the last moments.
        clock: the time, aware UTC.
    """

    def __init__(
        self, store: Store, signed: SignedUrls, flush: Callable[[], Awaitable[None]], clock: Callable[[], datetime]
    ) -> None:
        self._store = store
        self._signed = signed
        self._flush = flush
        self._clock = clock

    async def address(self, project_id: str, session_id: str) -> str:
        """Where the trace of a session can be fetched without a key: path and query below the root of the API.

        Raises:
            NotFound: the project has no such session.
            PayloadTooLarge: the session has too many operations for one trace.
        """

        async def read(db: AsyncSession) -> int | None:
            if await get_session(db, project_id, session_id) is None:
                return None
            return await timeline.count_operations(db, session_id)

        count = await self._store.read(read)
        if count is None:
            raise NotFound(f"there is no session {session_id[:200]!r}", field="session_id")
        _check_size(count)
        return self._signed.sign(f"sessions/{session_id}", FILE, self._signed.expiry())

    async def content(self, session_id: str, expires: int, signature: str) -> bytes:
        """The trace as JSON, of this moment.

        Raises:
            NotFound: the signature is not this server's for this session, or has expired.
            PayloadTooLarge: as in `address`.
        """
        self._signed.check(f"sessions/{session_id}", FILE, expires, signature)
        await self._flush()

        async def read(db: AsyncSession) -> list[TimelineRecord]:
            if not await timeline.session_exists(db, session_id):
                raise NotFound(f"there is no session {session_id[:200]!r}", field="session_id")
            _check_size(await timeline.count_operations(db, session_id))
            return await timeline.session_timeline(db, session_id)

        records = await self._store.read(read)
        return await asyncio.to_thread(lambda: orjson.dumps(trace_of(session_id, records, self._clock())))


def trace_of(session_id: str, records: Iterable[TimelineRecord], now: datetime) -> dict[str, Any]:
    """The trace object of a session's operations; what is still going on ends at `now`."""
    tracks: dict[str, list[TimelineRecord]] = {}
    for record in records:
        tracks.setdefault(track_of(record), []).append(record)
    events: list[dict[str, Any]] = []
    for pid, (track, operations) in enumerate(sorted(tracks.items()), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": track}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        lanes: list[datetime] = []
        for record in sorted(operations, key=lambda each: (each.created_at, each.seq_id or 0)):
            end = _end(record, now)
            lane = _lane(lanes, record.created_at, end)
            events.extend(_slices(record, end, pid, lane + 1))
        for lane in range(len(lanes)):
            name = {"name": f"lane {lane + 1}"}
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": lane + 1, "args": name})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"session_id": session_id, "exported_at": now.isoformat(), "server": "tinsmith"},
    }


def track_of(record: TimelineRecord) -> str:
    """The run or sampler that an operation belongs to: `create_model` lies on the track of the run that it made."""
    kind, _, rest = record.scope.partition(":")
    return f"{rest}:{record.seq_id}" if kind == "session" else rest


def _check_size(count: int) -> None:
    if count > MAX_OPERATIONS:
        raise PayloadTooLarge(
            f"the session has {count} operations; a trace of at most {MAX_OPERATIONS} can be exported",
            field="session_id",
        )


def _end(record: TimelineRecord, now: datetime) -> datetime:
    if record.state == "pending":
        return max(now, record.created_at)
    return max(record.delivered_at or record.finished_at or record.created_at, record.created_at)


def _lane(lanes: list[datetime], begin: datetime, end: datetime) -> int:
    """The first lane that is free at `begin`, taken until `end`; a new one if there is none."""
    for number, busy_until in enumerate(lanes):
        if busy_until <= begin:
            lanes[number] = end
            return number
    lanes.append(end)
    return len(lanes) - 1


def _slices(record: TimelineRecord, end: datetime, pid: int, tid: int) -> list[dict[str, Any]]:
    about = {"request_id": record.request_id, "seq_id": record.seq_id, "state": record.state}
    if record.error_code is not None:
        about["error"] = record.error_code
    name = record.kind if record.seq_id is None else f"{record.kind} #{record.seq_id}"
    slices = [_slice(name, record.kind, record.created_at, end, pid, tid, about)]
    began, finished = record.started_at, record.finished_at
    phases = [("queued", record.created_at, began or finished or end)]
    if began is not None:
        phases.append(("run", began, finished or end))
    if finished is not None and record.delivered_at is not None:
        phases.append(("delivery", finished, record.delivered_at))
    cursor = record.created_at
    for phase, begin, until in phases:
        begin = min(max(begin, cursor), end)  # a clock that was set back must not make slices cross
        cursor = min(max(until, begin), end)
        slices.append(_slice(phase, "phase", begin, cursor, pid, tid, {"request_id": record.request_id}))
    return slices


def _slice(
    name: str, category: str, begin: datetime, end: datetime, pid: int, tid: int, args: dict[str, Any]
) -> dict[str, Any]:
    micro = timedelta(microseconds=1)
    times = {"ts": (begin - _EPOCH) // micro, "dur": (end - begin) // micro}
    return {"ph": "X", "name": name, "cat": category, **times, "pid": pid, "tid": tid, "args": args}
