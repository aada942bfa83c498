"""Waiting for outcomes: long polls, woken the moment an outcome is durable.

Responsible for who may see a future, for holding a poll and for what state it is in. Not responsible for writing
outcomes (`operations.py`) or for HTTP shapes (`app/routes/futures.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from schemas.errors import Gone, InvalidRequest, NotFound, TinsmithError
from store import operations as log
from store.bodies import Bodies
from store.database import Store
from store.records import OperationRecord

Disconnected = Callable[[], Awaitable[None]]
"""Returns when the client has gone away."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A finished future: the stored result."""

    record: OperationRecord
    data: bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed future: what to tell the client."""

    record: OperationRecord
    error: TinsmithError


@dataclass(frozen=True, slots=True)
class Pending:
    """Not done within the hold (or the client left)."""

    record: OperationRecord


Outcome = Ready | Failed | Pending


class Futures:
    """Long polls over the operation log. Results and failures can be fetched again and again until they expire.

    Args:
        cancel: told which sample to drop; unknown ids are fine.
    """

    def __init__(self, store: Store, bodies: Bodies, cancel: Callable[[str], None]) -> None:
        self._store = store
        self._bodies = bodies
        self._cancel = cancel
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._delivered: set[str] = set()
        self._closing = False

    def wake(self, request_id: str) -> None:
        """Wake every poll that waits for `request_id`; its outcome is durable."""
        for waiter in self._waiters.pop(request_id, set()):
            if not waiter.done():
                waiter.set_result(None)

    def wake_all(self) -> None:
        """End every held poll (the server is stopping); later polls are not held."""
        self._closing = True
        for request_id in list(self._waiters):
            self.wake(request_id)

    def take_delivered(self) -> list[str]:
        """Request ids delivered since the last call, for one batched write."""
        delivered, self._delivered = list(self._delivered), set()
        return delivered

    async def retrieve(self, project_id: str, request_id: str, hold: float, disconnected: Disconnected) -> Outcome:
        """Wait up to `hold` seconds for the outcome.

        Raises:
            NotFound: unknown here, which another project's future is too; nothing about it changes.
            Gone: the result is past its retention.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._waiters.setdefault(request_id, set())
        waiters.add(waiter)
        try:
            record = await self._record(project_id, request_id)
            if record.state == "pending" and hold > 0 and not self._closing:
                await self._wait(waiter, hold, disconnected)
                record = await self._record(project_id, request_id)
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiters.get(request_id) is waiters:
                del self._waiters[request_id]
        return await self._outcome(record)

    async def cancel(self, project_id: str, request_id: str) -> None:
        """Drop a sample that nobody wants any more; one that is finished stays as it is.

        Raises:
            NotFound: unknown, or another project's.
            InvalidRequest: not a sample. A training request cannot be taken back: later ones build on it.
        """
        record = await self._record(project_id, request_id)
        if record.kind != "sample":
            raise InvalidRequest(
                f"request_id {request_id!r} is a {record.kind}; only samples can be cancelled", field="request_id"
            )
        self._cancel(request_id)

    async def _record(self, project_id: str, request_id: str) -> OperationRecord:
        record = await self._store.read(lambda db: log.get_operation(db, project_id, request_id))
        if record is None or record.state == "refused":
            raise NotFound(f"no future {request_id[:200]!r}", field="request_id")
        return record

    async def _wait(self, waiter: asyncio.Future[None], hold: float, disconnected: Disconnected) -> None:
        gone = asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait({waiter, gone}, timeout=hold, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()

    async def _outcome(self, record: OperationRecord) -> Outcome:
        if record.state == "pending":
            return Pending(record)
        if record.state == "expired":
            raise Gone(
                f"the result of {record.request_id!r} has expired", field="request_id", hint="submit the request again"
            )
        if record.error is not None:
            outcome: Outcome = Failed(record, record.error)
        else:
            outcome = await self._ready(record)
        self._delivered.add(record.request_id)
        return outcome

    async def _ready(self, record: OperationRecord) -> Ready:
        if record.result is None or record.content_type is None:
            raise Gone(f"the result of {record.request_id!r} has expired", field="request_id")
        return Ready(record, await self._bodies.get(record.result), record.content_type)
