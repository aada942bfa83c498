"""What happens by itself: recovery at start-up, expiry, and the batched bookkeeping of activity.

Responsible for one sweeper task and for what an earlier process left behind. Not responsible for the rules of what
expires when (the settings) or for the rows themselves (`store`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.checkpoints import Checkpoints
from app.services.futures import Futures
from app.services.operations import Operations
from app.services.runs import Runs
from app.services.sample_results import KIND as SAMPLE
from app.services.sampling import Sampling
from app.services.stability import Stability
from schemas.errors import ModelLost
from store import checkpoints, sessions
from store import operations as log
from store import runs as run_rows
from store.artifacts import Artifacts
from store.bodies import Bodies
from store.database import Store

logger = logging.getLogger(__name__)


class Housekeeping:
    """One background task; everything it does is safe to repeat.

    Args:
        interval: seconds between sweeps.
        session_timeout: seconds of silence after which a session ends.
        keep_delivered, keep_undelivered: seconds that results are kept.
        clock: the time, aware UTC.
    """

    def __init__(
        self,
        *,
        store: Store,
        bodies: Bodies,
        artifacts: Artifacts,
        operations: Operations,
        futures: Futures,
        runs: Runs,
        sampling: Sampling,
        saved: Checkpoints,
        stability: Stability,
        interval: float,
        session_timeout: float,
        keep_delivered: float,
        keep_undelivered: float,
        clock: Callable[[], datetime],
    ) -> None:
        self._store = store
        self._bodies = bodies
        self._artifacts = artifacts
        self._operations = operations
        self._futures = futures
        self._runs = runs
        self._sampling = sampling
        self._saved = saved
        self._stability = stability
        self._interval = interval
        self._session_timeout = timedelta(seconds=session_timeout)
        self._keep_delivered = timedelta(seconds=keep_delivered)
        self._keep_undelivered = timedelta(seconds=keep_undelivered)
        self._clock = clock
        self._seen: dict[str, datetime] = {}
        self._started = clock()
        self._task: asyncio.Task[None] | None = None

    def touch(self, session_id: str) -> None:
        """Note a sign of life of a session; written with the next sweep. Sessions that are over stay over."""
        self._seen[session_id] = self._clock()

    async def recover(self) -> None:
        """Settle what an earlier process left: its live runs are lost, its unfinished samples run again."""
        models = await self._store.write(run_rows.mark_live_runs_lost)
        unfinished = await self._store.read(log.unfinished)
        for record in unfinished:
            if record.kind == SAMPLE:
                await self._sampling.resubmit(record)
        orphans = [record.request_id for record in unfinished if record.kind != SAMPLE]
        await self._operations.fail_now(orphans, _left_behind())
        await self._artifacts.sweep_incomplete(await self._store.read(checkpoints.checkpoint_folders))
        await self._bodies.sweep(await self._store.read(log.body_names))
        if models or unfinished:
            logger.warning(
                "an earlier process left %d live training runs, which are lost, and %d unfinished operations",
                len(models),
                len(unfinished),
            )

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
            self._operations.retry_unsettled,
            self.write_activity,
            self._expire_sessions,
            self._expire_results,
            self._saved.sweep_expired,
            self._stability.sweep,
        ]
        for duty in duties:
            try:
                await duty()
            except Exception:
                logger.exception("housekeeping: %s failed; it is tried again with the next sweep", duty.__name__)

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self.sweep()

    async def write_activity(self) -> None:
        """Write signs of life and deliveries that are known in memory only."""
        seen, self._seen = self._seen, {}
        delivered = self._futures.take_delivered()
        if not seen and not delivered:
            return

        async def rows(db: AsyncSession) -> None:
            await sessions.touch_sessions(db, seen)
            await log.mark_delivered(db, delivered)

        try:
            await self._store.write(rows)
        except BaseException:
            self._seen = {**seen, **self._seen}
            raise

    async def _expire_sessions(self) -> None:
        now = self._clock()
        if now - self._started < self._session_timeout:
            return  # clients could not send signs of life while the server was down
        silent = await self._store.read(lambda db: sessions.silent_sessions(db, now - self._session_timeout))
        for session in silent:
            if session.session_id not in self._seen:
                await self._expire_session(session.session_id, now)

    async def _expire_session(self, session_id: str, now: datetime) -> None:
        if await self._store.write(lambda db: sessions.expire_session(db, session_id, now)):
            await self._runs.close_session(session_id)
            logger.info("session %s was silent for too long; its adapters are freed", session_id)

    async def _expire_results(self) -> None:
        now = self._clock()
        refs = await self._store.write(
            lambda db: log.expire_results(db, now - self._keep_delivered, now - self._keep_undelivered)
        )
        if refs:
            await self._bodies.delete(refs)


def _left_behind() -> ModelLost:
    return ModelLost(
        "the server was restarted before this request was executed, and the live weights of its model are lost",
        hint="create a new training client from the last saved state",
    )
