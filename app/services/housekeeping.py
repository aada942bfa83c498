"""What happens by itself: expiry, and the batched bookkeeping of activity.

Responsible for one sweeper task. Not responsible for the rules of what expires when (the settings), for the rows
themselves (`store`), or for what an earlier process left (`recovery.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.checkpoints import Checkpoints
from app.services.futures import Futures
from app.services.history import ModelHistory
from app.services.key_uses import KeyUses
from app.services.operations import Operations
from app.services.runs import Runs
from app.services.stability import Stability
from store import operations as log
from store import sessions
from store.artifacts import ArtifactStore
from store.bodies import Bodies
from store.custom_losses import forget_losses
from store.database import Store
from store.forgetting import forget_operations
from store.keys import touch_keys

logger = logging.getLogger(__name__)

MOST_WRITES = 40
"""Writes of one duty in one sweep: each is short, so that no other one waits long for it, and what a busy server
finishes in a day must not be left for longer than it says."""
JUMP_SECONDS = 60.0
"""What the clock may gain or lose between two sweeps: more than any correction that is not a jump."""


class Housekeeping:
    """One background task; everything it does is safe to repeat.

    Args:
        interval: seconds between sweeps.
        session_timeout: seconds of silence after which a session ends.
        keep_delivered, keep_undelivered: seconds that results are kept.
        keep_lines: seconds that lines of the log are kept after the end of their session.
        clock: the time, aware UTC.
        monotonic: seconds of a clock that nobody sets.
        more: further duties of every server.
        sweeps: whether this server is the one, of those that share the database, to drop what has expired.
    """

    def __init__(
        self,
        *,
        store: Store,
        bodies: Bodies,
        operations: Operations,
        futures: Futures,
        runs: Runs,
        saved: Checkpoints,
        artifacts: ArtifactStore,
        stability: Stability,
        history: ModelHistory,
        key_uses: KeyUses,
        interval: float,
        session_timeout: float,
        keep_delivered: float,
        keep_undelivered: float,
        keep_lines: float,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float] = time.monotonic,
        sweeps: Callable[[], Awaitable[bool]] | None = None,
        more: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        self._store = store
        self._bodies = bodies
        self._operations = operations
        self._futures = futures
        self._runs = runs
        self._saved = saved
        self._artifacts = artifacts
        self._stability = stability
        self._history = history
        self._key_uses = key_uses
        self._more = more
        self._interval = interval
        self._session_timeout = timedelta(seconds=session_timeout)
        self._keep_delivered = timedelta(seconds=keep_delivered)
        self._keep_undelivered = timedelta(seconds=keep_undelivered)
        self._keep_lines = timedelta(seconds=keep_lines)
        self._clock = clock
        self._seen: dict[str, datetime] = {}
        self._monotonic = monotonic
        self._sweeps = sweeps
        self._started = clock()
        """Since when signs of life can be believed: the start, or the last jump of the clock."""
        self._jumped: datetime | None = None
        self._last = (self._started, monotonic())
        self._task: asyncio.Task[None] | None = None

    def touch(self, session_id: str) -> None:
        """Note a sign of life of a session; written with the next sweep. Sessions that are over stay over."""
        self._seen[session_id] = self._clock()

    async def start(self) -> None:
        """Begin to sweep; returns at once."""
        self._task = asyncio.create_task(self._loop(), name="housekeeping")

    async def stop(self) -> None:
        """End the task and write what is still in memory."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.write_activity()

    async def sweep(self) -> None:
        """Do every duty once; one that fails does not keep the others from being done."""
        duties: list[Callable[[], Awaitable[None]]] = [
            self._operations.settling.retry_unsettled,
            self.write_activity,
            self._saved.remove_replaced,
            self._artifacts.collect,
            *self._more,
        ]
        if self._sweeps is None or await self._sweeps():
            duties += [
                self._expire_sessions,
                self._expire_results,
                self._forget_operations,
                self._saved.sweep_expired,
                self._stability.sweep,
                self._history.sweep,
            ]
        for duty in duties:
            try:
                await duty()
            except Exception:
                logger.exception("housekeeping: %s failed; it is tried again with the next sweep", duty.__name__)

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self.notice_clock()
            await self.sweep()

    def notice_clock(self) -> None:
        """Look whether the clock was set, or stood still with a sleeping machine, since the last look.

        How long a client was silent, and for how long it could have fetched a result, is not known then: both periods
        begin anew.
        """
        (time_before, seconds_before), (now, seconds) = self._last, (self._clock(), self._monotonic())
        self._last = (now, seconds)
        jump = (now - time_before).total_seconds() - (seconds - seconds_before)
        if abs(jump) > JUMP_SECONDS:
            logger.warning("the clock jumped by %.0f s; nothing expires for it", jump)
            self._started = self._jumped = now

    async def write_activity(self) -> None:
        """Write signs of life, uses of keys and deliveries that are known in memory only."""
        seen, self._seen = self._seen, {}
        used = self._key_uses.take()
        delivered = self._futures.take_delivered()
        if not seen and not used and not delivered:
            return

        async def rows(db: AsyncSession) -> None:
            await sessions.touch_sessions(db, seen)
            await touch_keys(db, used)
            await log.mark_delivered(db, delivered)

        try:
            await self._store.write(rows)
        except BaseException:
            self._seen = {**seen, **self._seen}
            self._key_uses.give_back(used)
            raise

    async def _expire_sessions(self) -> None:
        now = self._clock()
        if now - self._started < self._session_timeout:
            return  # clients could not send signs of life while the server was down, or the clock was another one
        silent = await self._store.read(lambda db: sessions.silent_sessions(db, now - self._session_timeout))
        for session in silent:
            if session.session_id not in self._seen:
                await self._expire_session(session.session_id)

    async def _expire_session(self, session_id: str) -> None:
        if await self._runs.expire_session(session_id):
            logger.info("session %s was silent for too long; its adapters are freed", session_id)

    async def _expire_results(self) -> None:
        now = self._clock()
        if self._jumped is not None and now - self._jumped < self._keep_delivered:
            return
        for _ in range(MOST_WRITES):
            expired, refs = await self._store.write(
                lambda db: log.expire_results(db, now - self._keep_delivered, now - self._keep_undelivered)
            )
            if refs:
                await self._bodies.delete(refs)
            if expired < log.EXPIRED_AT_ONCE:
                return

    async def _forget_operations(self) -> None:
        now = self._clock()
        if self._jumped is None or now - self._jumped >= self._keep_delivered:
            before = now - self._keep_lines
            for _ in range(MOST_WRITES):
                if await self._store.write(lambda db: forget_operations(db, before)) < log.EXPIRED_AT_ONCE:
                    break
            await self._store.write(lambda db: forget_losses(db, before))
