"""What is done of a sampling client's requests: one long poll for all of them.

Responsible for the list of outcomes behind a cursor and for dropping results that a client says it has. The results
themselves are fetched one by one (`futures.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime

from app.services.runs import sampler_scope
from app.services.waiting import Disconnected, Waiters
from schemas.errors import NotFound
from store import samplers
from store.bodies import Bodies
from store.completions import Client, completions, release
from store.database import Store
from store.records import Completion

CLIENT_BLOCK = 1_000_000_000
"""The clients of a sampling session number their requests in blocks of this many."""
PAGE = 1000
"""Most outcomes in one answer."""


@dataclass(frozen=True, slots=True)
class Page:
    """Outcomes in order, and the cursor to ask for what is behind them."""

    completions: list[Completion]
    cursor: int


class Completions:
    """The outcomes of sampling sessions, in the order in which they became durable. `clock` is the time, aware UTC."""

    def __init__(self, store: Store, bodies: Bodies, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._bodies = bodies
        self._clock = clock
        self._waiters = Waiters()

    def wake(self, scope: str | None) -> None:
        """Something of this scope of the operation log is durable; None = perhaps of any scope."""
        if scope is None:
            self._waiters.wake_all()
        else:
            self._waiters.wake(scope)

    def close(self) -> None:
        """End every held poll (the server is stopping); later polls are not held."""
        self._waiters.close()

    async def poll(
        self,
        project_id: str,
        sampler_id: str,
        clone: int,
        cursor: int,
        retrieved: Collection[str],
        hold: float,
        disconnected: Disconnected,
    ) -> Page:
        """What was settled behind `cursor` for one client (`clone` 0 = the first) of a sampling session.

        Waits up to `hold` seconds for there to be something. The results in `retrieved` are dropped.

        Raises:
            NotFound: this project has no such sampling session.
        """
        if await self._store.look_up(lambda db: samplers.get_sampler(db, project_id, sampler_id)) is None:
            raise NotFound(f"no sampling session {sampler_id[:200]!r}", field="target.sampling_session_id")
        first = clone * CLIENT_BLOCK
        client = Client(project_id, sampler_scope(sampler_id), first, first + CLIENT_BLOCK - 1)
        if retrieved:
            await self._bodies.delete(await self._store.write(lambda db: release(db, client, retrieved, self._clock())))
        found = await self._wait(client, cursor, hold, disconnected)
        return Page(found, found[-1].place if found else cursor)

    async def _wait(self, client: Client, cursor: int, hold: float, disconnected: Disconnected) -> list[Completion]:
        """Outcomes behind `cursor`, as soon as there are any. Those of other clients of the session wake as well."""
        now = asyncio.get_running_loop().time
        until, again = now() + hold, True
        while True:
            with self._waiters.waiter(client.scope) as waiter:
                found = await self._behind(client, cursor)
                if found or not again:
                    return found
                again = await self._waiters.wait(waiter, until - now(), disconnected)

    async def _behind(self, client: Client, cursor: int) -> list[Completion]:
        return await self._store.read(lambda db: completions(db, client, cursor, PAGE))
