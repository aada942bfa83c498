"""Which sessions are alive, answered without waiting for the writer.

A heartbeat must be answered whatever the writer is doing, or clients believe that the server is gone; so it costs a
look into memory, now and then a read, and noting a time. Not responsible for writing those times or for ending silent
sessions (`app/services/housekeeping.py`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from schemas.errors import Gone, NotFound
from store.database import Store
from store.sessions import get_session

TRUST_SECONDS = 60.0
"""How long a session that was found active is taken for active without another look."""
MAX_REMEMBERED = 100_000


class Presence:
    """Signs of life of sessions.

    Args:
        touch: notes in memory that a session has just been heard of.
        clock: monotonic seconds.
    """

    def __init__(
        self, store: Store, touch: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._touch = touch
        self._clock = clock
        self._active: OrderedDict[tuple[str, str], float] = OrderedDict()

    async def beat(self, project_id: str, session_id: str) -> None:
        """Note a sign of life.

        Raises:
            NotFound: the project has no such session.
            Gone: the session is finished or has expired.
        """
        if self._active.get((project_id, session_id), 0.0) <= self._clock():
            await self._look(project_id, session_id)
        self._touch(session_id)

    def forget(self, project_id: str, session_id: str) -> None:
        """The session has ended: look at the store again at its next heartbeat."""
        self._active.pop((project_id, session_id), None)

    async def _look(self, project_id: str, session_id: str) -> None:
        self._active.pop((project_id, session_id), None)
        record = await self._store.look_up(lambda db: get_session(db, project_id, session_id))
        if record is None:
            raise no_such_session(session_id)
        if record.state != "active":
            raise Gone(
                f"session {session_id[:200]!r} is {record.state}",
                field="session_id",
                hint="create a new session",
                code="session_ended",
            )
        self._active[(project_id, session_id)] = self._clock() + TRUST_SECONDS
        while len(self._active) > MAX_REMEMBERED:
            self._active.popitem(last=False)


def no_such_session(session_id: str) -> NotFound:
    """The same answer for a session that never was and for another project's."""
    return NotFound(f"there is no session {session_id[:200]!r}", field="session_id")
