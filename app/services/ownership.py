"""Several servers on one database: signs of life, taking over what a dead server did, and what they tell each other.

Every live run is executed by one server, which holds a lease on it; a sample by the server that accepted it. Whoever
accepts an operation for a run writes it to the log and tells its holder. Responsible for noticing who is gone and which
leases this server has lost, and for acting on notices. Not responsible for what belongs into the transactions of
operations (`leases.py`), nor for bringing runs back (`recovery.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.base_models import BaseModels
from app.services.completions import Completions
from app.services.futures import Futures
from app.services.history import STRAY_SECONDS
from app.services.leases import Leases
from app.services.operations import Operations
from app.services.recovery import Recovery, model_of
from app.services.runs import Runs
from schemas.errors import TinsmithError, Unavailable
from store import checkpoints, edges
from store import operations as log
from store import runs as run_rows
from store.artifacts import ArtifactStore
from store.bodies import Bodies
from store.database import Store
from store.notices import Notices

logger = logging.getLogger(__name__)

ROUNDS = 5
"""How often within a lease a server gives a sign of life and looks around."""


class Ownership:
    """The part of a server that knows of others.

    Args:
        seconds: how long a sign of life is good for.
        alone: no other server may use the database beside this one.
        make_notices: makes the listening connection: (heard, connected) -> it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        store: Store,
        leases: Leases,
        seconds: float,
        alone: bool,
        make_notices: Callable[[Callable[[str], None], Callable[[], None]], Notices],
        bodies: Bodies,
        artifacts: ArtifactStore,
        models: BaseModels,
        operations: Operations,
        runs: Runs,
        recovery: Recovery,
        futures: Futures,
        completions: Completions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._leases = leases
        self._seconds = seconds
        self._alone = alone
        self._notices = make_notices(self._hear, self._connected)
        self._bodies = bodies
        self._artifacts = artifacts
        self._models = models
        self._operations = operations
        self._runs = runs
        self._recovery = recovery
        self._futures = futures
        self._completions = completions
        self._clock = clock
        self._heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._changing = asyncio.Lock()
        """Held while what this server executes changes, so that nothing is queued twice or for a run on its way."""
        self._steady_since = clock()
        """Since when this server has given signs of life without a break."""
        self._beaten = clock()
        self._missing: set[str] = set()
        """Operations for this server that it did not have at the last look."""
        self._taken_runs: set[str] = set()
        """Runs that were taken over in the database, until that is done here: if the database goes away in between, the
        next round does it."""
        self._taken_samples: set[str] = set()
        self._leaving = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Make this server known, take what others have left, begin to listen.

        Raises `Unavailable` if it must be alone and is not.
        """
        if self._alone:
            await self._wait_until_alone()
        await self._artifacts.sweep_incomplete(await self._store.read(checkpoints.checkpoint_folders), STRAY_SECONDS)
        await self._bodies.sweep(await self._store.read(log.body_names), STRAY_SECONDS)
        self._notices.start()
        await self._round()
        self._tasks = [
            asyncio.create_task(self._keep_looking(), name="ownership"),
            asyncio.create_task(self._keep_hearing(), name="notices of other servers"),
        ]

    async def _wait_until_alone(self) -> None:
        """For as long as the last sign of life of a server that was killed may still be good."""
        deadline = self._clock() + self._seconds + 1
        while await self._store.read(lambda db: edges.others_alive(db, self._leases.edge_id)):
            if self._clock() > deadline:
                raise Unavailable(
                    "another server uses this database; one that computes on a shared Ray cluster must be the only one",
                    hint="stop the other server, or start this one without the setting ray, or with ray = local",
                    code="database_in_use",
                )
            await asyncio.sleep(0.5)

    def leaving(self) -> None:
        """This server is about to stop: it keeps what it has until then, and takes nothing more."""
        self._leaving = True

    async def stop(self) -> None:
        """Let others have at once what this server held."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._notices.stop()
        try:
            await self._store.write(lambda db: edges.leave(db, self._leases.edge_id))
        except TinsmithError as error:
            logger.warning("other servers are not told that this one ends: %s", error.message)

    async def sweeps(self) -> bool:
        """Whether this server is the one that drops what has expired."""
        try:
            return await self._notices.sweeps()
        except Exception as error:
            logger.warning("it is not known who sweeps: %s", type(error).__name__)
            return False

    # -- rounds ----------------------------------------------------------------------------------------------------
    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / ROUNDS)
            try:
                await self._round()
            except TinsmithError as error:
                self._steady_since = self._clock()
                logger.warning("no sign of life could be given: %s", error.message)
            except Exception:
                logger.exception("looking after other servers failed; it is tried again")

    async def _round(self) -> None:
        await self._store.write(lambda db: edges.beat(db, self._leases.edge_id, self._seconds))
        now = self._clock()
        if now - self._beaten > self._seconds:  # it was asleep, or the database was away: for the others, too
            self._steady_since = now
        self._beaten = now
        async with self._changing:
            await self._compare()
            if not self._leaving:
                await self._take_over(expired=now - self._steady_since >= self._seconds)
            await self._look_for_missing()

    async def _compare(self) -> None:
        """Let go of runs that another server has taken, and of those that are over: when all of it is answered."""
        before = dict(self._leases.held)

        async def look(db: AsyncSession) -> tuple[dict[str, edges.Lease], set[str]]:
            found = await edges.leases_of(db, self._leases.edge_id)
            return found, {model_of(one) for one in await edges.pending_of_runs(db)}

        found, unanswered = await self._store.read(look)
        ended = [model_id for model_id, lease in found.items() if lease.state not in run_rows.LIVE]
        for model_id, fence in before.items():
            lease = found.get(model_id)
            if lease is None or lease.fence != fence:
                logger.warning("run %s is executed by another server now", model_id)
                self._let_go(model_id)
        for model_id in ended:
            self._close(model_id)
        over = [model_id for model_id in ended if model_id not in unanswered]
        for model_id in over:
            self._leases.held.pop(model_id, None)
        if over:
            await self._store.write(lambda db: edges.drop_leases(db, self._leases.edge_id, over))

    def _let_go(self, model_id: str) -> None:
        self._leases.held.pop(model_id, None)
        self._taken_runs.discard(model_id)
        self._runs.unserved.discard(model_id)
        self._close(model_id)

    def _close(self, model_id: str) -> None:
        for runtime in {id(runtime): runtime for runtime in self._models.runtimes.values()}.values():
            runtime.close_model(model_id)

    async def _take_over(self, *, expired: bool) -> None:
        me = self._leases.edge_id
        served = self._models.names
        taken = await self._store.write(lambda db: edges.take_runs(db, me, served, expired=expired))
        self._runs.unserved.update(taken)  # until what was accepted for them before is in line
        self._taken_runs.update(taken)
        self._leases.held.update(taken)
        self._taken_samples.update(
            await self._store.write(lambda db: edges.take_samples(db, me, served, expired=expired))
        )
        if not self._taken_runs and not self._taken_samples:
            return
        report = await self._recovery.take_over(self._taken_runs, self._taken_samples)
        self._taken_runs.clear()
        self._taken_samples.clear()
        logger.warning("took over from a server that is gone: %s", report.text)

    async def _look_for_missing(self) -> None:
        """Queue what a notice should have told: what is not here though it was not at the last look either."""
        pending = await self._store.read(edges.pending_of_runs)
        missing = {
            one.request_id
            for one in pending
            if self._is_mine(model_of(one)) and not self._operations.has(one.request_id)
        }
        late, self._missing = missing & self._missing, missing
        if late:
            await self._recovery.submit(late)

    def _is_mine(self, model_id: str) -> bool:
        """Whether a run is executed here, and what was accepted for it before is in line."""
        return model_id in self._leases.held and model_id not in self._runs.unserved

    # -- notices ---------------------------------------------------------------------------------------------------
    def _connected(self) -> None:
        """Notices may have been missed: whoever waits looks again."""
        self._futures.look_again()
        self._completions.wake(None)

    def _hear(self, payload: str) -> None:
        notice = json.loads(payload)
        if notice["what"] == "settled":
            self._futures.wake(notice["request"])
            self._completions.wake(notice["scope"])
        else:
            self._heard.put_nowait(notice)

    async def _keep_hearing(self) -> None:
        while True:
            notice = await self._heard.get()
            try:
                await self._act(notice)
            except TinsmithError as error:
                logger.warning("a notice (%s) is left to the next round: %s", notice["what"], error.message)
            except Exception:
                logger.exception("a notice (%s) could not be acted on", notice["what"])

    async def _act(self, notice: dict[str, Any]) -> None:
        match notice["what"]:
            case "operation":
                async with self._changing:
                    if self._is_mine(notice["model"]) and not self._operations.has(notice["request"]):
                        await self._recovery.submit([notice["request"]])
            case "refused":
                if notice["model"] in self._leases.held:
                    for runtime in self._models.runtimes.values():
                        runtime.note_refused(notice["model"], notice["seq_id"])
            case "ended":
                await self._runs.free_session(notice["session"])
            case "cancelled":
                self._operations.cancel_here(notice["request"])
