"""Waiting for outcomes: long polls, woken the moment an outcome is durable.

Responsible for who may see a future, for holding a poll and for what state it is in. Not responsible for writing
outcomes (`operations.py`), for lists of them (`completions.py`) or for HTTP shapes (`app/routes/futures.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from app.services.waiting import Disconnected, Waiters
from schemas.errors import Gone, InvalidRequest, NotFound, NotNow, TinsmithError
from store import operations as log
from store.bodies import Bodies
from store.database import Store
from store.records import BodyRef, OperationRecord

logger = logging.getLogger(__name__)

MOST_ANNOUNCED = 10_000
"""Results whose size was told and that were not fetched yet, remembered at once."""
_UNREAD_PAUSE = 0.5
"""Seconds before a result is read again that could not be: a poll that is held need not come back for that."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A finished future: the stored result."""

    record: OperationRecord
    data: bytes
    content_type: str


@dataclass(frozen=True, slots=True)
class Announced:
    """A finished future whose result is large: its size in bytes. The next poll gets the result itself."""

    record: OperationRecord
    size: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A failed future: what to tell the client."""

    record: OperationRecord
    error: TinsmithError


@dataclass(frozen=True, slots=True)
class Pending:
    """Not done within the hold (or the client left). `unread`: why the result, which is there, cannot be read now."""

    record: OperationRecord
    unread: str | None = None


Outcome = Ready | Announced | Failed | Pending


class Futures:
    """Long polls over the operation log. Results and failures can be fetched again and again until they expire.

    Args:
        cancel: told which sample to drop; unknown ids are fine.
        clock: the time, aware UTC.
    """

    def __init__(
        self, store: Store, bodies: Bodies, cancel: Callable[[str], None], clock: Callable[[], datetime]
    ) -> None:
        self._store = store
        self._bodies = bodies
        self._cancel = cancel
        self._waiters = Waiters()
        self._clock = clock
        self._delivered: dict[str, datetime] = {}
        self._announced: dict[str, None] = {}

    def wake(self, request_id: str) -> None:
        """Wake every poll that waits for `request_id`; its outcome is durable."""
        self._waiters.wake(request_id)

    def look_again(self) -> None:
        """Wake every poll: something may have become durable unnoticed."""
        self._waiters.wake_all()

    def wake_all(self) -> None:
        """End every held poll (the server is stopping); later polls are not held."""
        self._waiters.close()

    def take_delivered(self) -> dict[str, datetime]:
        """Request ids delivered since the last call, and when first, for one batched write."""
        delivered, self._delivered = self._delivered, {}
        return delivered

    async def retrieve(
        self,
        project_id: str,
        request_id: str,
        hold: float,
        disconnected: Disconnected,
        *,
        announce_above: int | None = None,
    ) -> Outcome:
        """Wait up to `hold` seconds for the outcome.

        Args:
            announce_above: a result of more bytes is announced instead of delivered, but never twice in a row; None =
                every result is delivered.

        Raises:
            NotFound: unknown here, which another project's future is too; nothing about it changes.
            Gone: the result is past its retention.
        """
        until = time.monotonic() + hold
        with self._waiters.waiter(request_id) as waiter:
            record = await self._record(project_id, request_id)
            if record.state == "pending" and hold > 0:
                await self._waiters.wait(waiter, hold, disconnected)
                record = await self._record(project_id, request_id)
        if announce_above is not None and self._announces(record, announce_above):
            return Announced(record, _size(record))
        outcome = await self._outcome(record)
        while isinstance(outcome, Pending) and outcome.unread is not None:
            began = time.monotonic()
            pause = min(_UNREAD_PAUSE, until - began)
            with self._waiters.waiter(request_id) as waiter:
                await self._waiters.wait(waiter, pause, disconnected)
            if self._waiters.closing or pause < _UNREAD_PAUSE or time.monotonic() - began < pause:  # or the client left
                break
            outcome = await self._outcome(record)
        return outcome

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
        record = await self._store.look_up(lambda db: log.get_operation(db, project_id, request_id))
        if record is None or record.state == "refused":
            raise NotFound(f"no future {request_id[:200]!r}", field="request_id")
        return record

    def _announces(self, record: OperationRecord, above: int) -> bool:
        """Whether to answer with the size. Notes it, so that whoever asks again gets the result, however they ask."""
        if record.state != "done" or _size(record) <= above or record.request_id in self._announced:
            return False
        while len(self._announced) >= MOST_ANNOUNCED:
            del self._announced[next(iter(self._announced))]
        self._announced[record.request_id] = None
        return True

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
            if isinstance(outcome, Pending):
                return outcome
        self._announced.pop(record.request_id, None)
        self._delivered.setdefault(record.request_id, self._clock())
        return outcome

    async def _ready(self, record: OperationRecord) -> Ready | Pending:
        if record.result is None or record.content_type is None:
            raise Gone(f"the result of {record.request_id!r} has expired", field="request_id")
        try:
            data = await self._bodies.get(record.result)
        except NotNow as error:
            logger.warning("the stored result of %s cannot be read now: %s", record.request_id, error.message)
            return Pending(record, f"its result is there, but cannot be read now: {error.message}")
        except (TinsmithError, OSError) as error:
            # Not a 5xx: the SDK would ask again for ever, without a pause.
            logger.exception("the stored result of %s (%s) cannot be read", record.request_id, record.kind)
            raise Gone(
                f"the result of {record.request_id!r} cannot be read back from the server's disk",
                field="request_id",
                code="result_lost",
            ) from error
        return Ready(record, data, record.content_type)


def _size(record: OperationRecord) -> int:
    result = record.result
    return 0 if result is None else result.size if isinstance(result, BodyRef) else len(result)
