"""Which sessions have given a sign of life, in memory, written to the store now and then.

A heartbeat must be answered whatever the writer is doing, or clients believe that the server is gone; so a sign of
life only notes a time, and `flush` writes many at once. Not responsible for ending silent sessions
(`app/services/housekeeping.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

from schemas.errors import Gone, NotFound
from store.database import Store
from store.sessions import get_session, touch_sessions

logger = logging.getLogger(__name__)

TRUST_SECONDS = 60.0
"""How long a session that was found active is taken for active without another look."""
FLUSH_SECONDS = 15.0
MAX_REMEMBERED = 100_000


def utc_now() -> datetime:
    """The time, aware UTC."""
    return datetime.now(UTC)


class Presence:
    """Signs of life of sessions.

    Args:
        clock: monotonic seconds.
        now: aware UTC time, what the store records.
    """

    def __init__(
        self, store: Store, *, clock: Callable[[], float] = time.monotonic, now: Callable[[], datetime] = utc_now
    ) -> None:
        self._store = store
        self._clock = clock
        self._now = now
        self._active: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._unwritten: dict[str, datetime] = {}
        self._task: asyncio.Task[None] | None = None

    async def beat(self, project_id: str, session_id: str) -> None:
        """Note a sign of life. Never waits for the writer.

        Raises:
            NotFound: the project has no such session.
            Gone: the session is finished or has expired.
        """
        known_until = self._active.get((project_id, session_id), 0.0)
        if known_until <= self._clock():
            await self._look(project_id, session_id)
        self._unwritten[session_id] = self._now()

    def forget(self, project_id: str, session_id: str) -> None:
        """The session has ended: look at the store again at its next heartbeat, and write nothing more for it."""
        self._active.pop((project_id, session_id), None)
        self._unwritten.pop(session_id, None)

    async def flush(self) -> None:
        """Write what is noted; on failure it stays noted."""
        noted, self._unwritten = self._unwritten, {}
        if not noted:
            return
        try:
            await self._store.write(lambda db: touch_sessions(db, noted))
        except BaseException:
            self._unwritten = {**noted, **self._unwritten}
            raise

    def start(self) -> None:
        """Begin flushing every `FLUSH_SECONDS`."""
        self._task = asyncio.create_task(self._loop())

    async def stop(self) -> None:
        """Stop flushing, after a last flush."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self.flush()

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            try:
                await self.flush()
            except Exception:
                logger.exception("signs of life could not be written; trying again in %.0f s", FLUSH_SECONDS)

    async def _look(self, project_id: str, session_id: str) -> None:
        self._active.pop((project_id, session_id), None)
        record = await self._store.read(lambda db: get_session(db, project_id, session_id))
        if record is None:
            raise no_such_session(session_id)
        if record.state != "active":
            raise Gone(
                f"session {session_id[:200]!r} is {record.state}",
                field="session_id",
                hint="create a new session",
                code="session_finished",
            )
        self._active[(project_id, session_id)] = self._clock() + TRUST_SECONDS
        while len(self._active) > MAX_REMEMBERED:
            self._active.popitem(last=False)


def no_such_session(session_id: str) -> NotFound:
    """The same answer for a session that never was and for another project's."""
    return NotFound(f"there is no session {session_id[:200]!r}", field="session_id")
