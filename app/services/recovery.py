"""What a start does with what an earlier process left: live models come back, accepted operations run on. The same for
what another server on the same database left.

Responsible for handing all of it to the runtimes. Not responsible for bringing models back
(`workers/recovery.py`) or for their past (`history.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from app.services.base_models import BaseModels
from app.services.history import ModelHistory
from app.services.loads import Loads
from app.services.operations import Operations, unreadable
from app.services.runs import Runs, lost, session_of_scope, unloaded
from app.services.sample_results import KIND as SAMPLE
from app.services.sampling import Sampling
from app.services.saves import Saves
from app.services.submission import Submission
from app.services.training import Training
from schemas.errors import TinsmithError, Unavailable
from schemas.fail_points import fail_point
from store import checkpoints, sessions
from store import operations as log
from store import runs as run_rows
from store import snapshots as snapshot_rows
from store.artifacts import ArtifactStore
from store.bodies import Bodies
from store.database import Store
from store.edges import PendingOperation, pending_of_runs
from store.records import OperationRecord, RunRecord
from store.under_way import UnderWayFile
from workers.recovery import CREATION

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 1.0
"""Seconds before the log is looked at again that could not be read; doubled with each try, up to `_LONGEST_PAUSE`."""
_LONGEST_PAUSE = 30.0
_SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")


@dataclass(slots=True)
class Report:
    """What a start found."""

    models: int = 0
    lost: int = 0
    unserved: int = 0
    operations: int = 0
    samples: int = 0
    failed: int = 0

    @property
    def text(self) -> str:
        """For the log."""
        waiting = f", {self.unserved} wait for base models that are not served" if self.unserved else ""
        return (
            f"an earlier process left {self.models + self.lost + self.unserved} live training runs: {self.models} come "
            f"back, {self.lost} are lost{waiting}; of its unfinished operations {self.operations} of training and "
            f"{self.samples} samples run on, {self.failed} cannot"
        )


class Recovery:
    """`run` once, before the runtimes start; with several servers the rest instead, whenever a server is gone."""

    def __init__(
        self,
        *,
        store: Store,
        bodies: Bodies,
        artifacts: ArtifactStore,
        models: BaseModels,
        operations: Operations,
        runs: Runs,
        training: Training,
        saves: Saves,
        loads: Loads,
        sampling: Sampling,
        history: ModelHistory,
        under_way: UnderWayFile,
    ) -> None:
        self._store = store
        self._bodies = bodies
        self._artifacts = artifacts
        self._models = models
        self._operations = operations
        self._runs = runs
        self._training = training
        self._saves = saves
        self._loads = loads
        self._sampling = sampling
        self._history = history
        self._under_way = under_way
        self._late_models: set[str] = set()
        """Base models of which it is not yet known what waits for them: the database did not answer."""
        self._late_samples: set[str] = set()
        """Samples that cannot be read back now."""
        self._trying: asyncio.Task[None] | None = None

    async def run(self) -> Report:
        """Sweep what is incomplete, reopen the live runs and queue what was not finished."""
        report = Report()
        await self.count_deaths()
        # Before anything runs: a save that was cut off may have left the folder that it is to write.
        await self._artifacts.sweep_incomplete(await self._store.read(checkpoints.checkpoint_folders))
        await self._bodies.sweep(await self._store.read(log.body_names))
        await self._history.sweep_at_start()
        unfinished = await self._store.read(log.unfinished)
        live = await self._store.read(run_rows.live_runs)
        if live:
            fail_point("start.swept")
        for run in live:
            await self._bring_back(run, unfinished, report)
        await self._go_on(unfinished, report)
        if report != Report():
            logger.warning("%s", report.text)
        return report

    async def take_over(self, model_ids: Collection[str], sample_ids: Collection[str]) -> Report:
        """Go on with live runs, and samples, that another server executed until now; nothing is swept."""
        report = Report()
        pending = [one for one in await self._store.read(pending_of_runs) if model_of(one) in model_ids]
        wanted = [*(one.request_id for one in pending), *sample_ids]
        unfinished = await self._store.read(lambda db: log.still_pending(db, wanted))
        for model_id in model_ids:
            run = await self._store.read(partial(run_rows.find_run, model_id=model_id))
            mine = [one for one in unfinished if one.kind != SAMPLE and model_of(one) == model_id]
            if run is not None and run.state in run_rows.LIVE:
                await self._begin(run, mine, report)
            else:
                await self._resume(mine, report)
                self._runs.unserved.discard(model_id)
        await self._go_on([one for one in unfinished if one.kind == SAMPLE], report)
        return report

    async def _begin(self, run: RunRecord, mine: list[OperationRecord], report: Report) -> None:
        """Bring a run back while its runtime is running: first what was accepted before, and only then what is new."""
        await self._bring_back(run, mine, report)
        if run.base_model in self._models.runtimes:
            await self._resume(mine, report)
            self._runs.unserved.discard(run.model_id)
        else:
            for record in mine:
                self._operations.left.note_unserved(record.request_id, run.base_model, run.session_id)

    async def serve(self, base_model: str) -> None:
        """A base model is served that was not at the start: go on with what waited for it.

        If the database does not answer, it is tried again beside other work.
        """
        try:
            await self._serve(base_model)
        except Unavailable:
            self._later(base_model=base_model)

    async def _serve(self, base_model: str) -> None:
        report = Report()
        wanted = self._operations.left.waiting_for(base_model)
        unfinished = await self._store.read(lambda db: log.still_pending(db, wanted))
        for run in await self._store.read(run_rows.live_runs):
            if run.base_model == base_model and run.model_id in self._runs.unserved:
                mine = [one for one in unfinished if one.kind != SAMPLE and model_of(one) == run.model_id]
                await self._begin(run, mine, report)
        await self._go_on([one for one in unfinished if one.kind == SAMPLE], report)
        if report != Report():
            logger.warning("base model %s is served again: %s", base_model, report.text)

    def _later(self, *, base_model: str | None = None, sample: str | None = None) -> None:
        if base_model is not None:
            self._late_models.add(base_model)
        if sample is not None:
            self._late_samples.add(sample)
        if self._trying is None or self._trying.done():
            self._trying = asyncio.create_task(self._try_again(), name="what an earlier process left")

    async def _try_again(self) -> None:
        pause = _FIRST_PAUSE
        while self._late_models or self._late_samples:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            models, self._late_models = self._late_models, set()
            samples, self._late_samples = self._late_samples, set()
            try:
                for base_model in models:
                    await self._serve(base_model)
                await self.submit(samples)
            except TinsmithError as error:
                logger.warning("what an earlier process left cannot be read now: %s", error.message)
                self._late_models |= models
                self._late_samples |= samples

    async def stop(self) -> None:
        """Try nothing any more; what was not begun stays in the log."""
        if self._trying is not None:
            self._trying.cancel()
            await asyncio.gather(self._trying, return_exceptions=True)

    async def submit(self, request_ids: Collection[str]) -> None:
        """Queue operations that another server accepted for runs that are executed here."""
        records = await self._store.read(lambda db: log.still_pending(db, request_ids))
        await self._go_on([record for record in records if not self._operations.has(record.request_id)], Report())

    async def _bring_back(self, run: RunRecord, unfinished: list[OperationRecord], report: Report) -> None:
        if await self._session_over(run):  # it ended, and the process did before its runs were closed
            await self._runs.close_session(run.session_id)
        elif run.base_model not in self._models.runtimes:
            # A start with another list of base models, by mistake or for a while, must not cost anybody their training.
            self._runs.unserved.add(run.model_id)
            report.unserved += 1
        elif await self._reopen(run, unfinished):
            report.models += 1
        else:
            await self._runs.mark_lost([run.model_id])
            report.lost += 1

    async def _go_on(self, unfinished: list[OperationRecord], report: Report) -> None:
        training: list[OperationRecord] = []
        for record in sorted(unfinished, key=_order):
            if record.kind == SAMPLE:
                await self._resubmit(record, report)
            elif model_of(record) in self._runs.unserved:
                await self._leave_waiting(record)
            else:
                training.append(record)
        await self._resume(training, report)

    async def _resubmit(self, record: OperationRecord, report: Report) -> None:
        try:
            report.samples += await self._sampling.resubmit(record)
        except Unavailable as error:
            logger.warning("sample %s waits: %s", record.request_id, error.message)
            self._operations.left.note_unread(record.request_id, error, session_of_scope(record.scope))
            self._later(sample=record.request_id)

    async def _leave_waiting(self, record: OperationRecord) -> None:
        run = await self._store.read(lambda db: run_rows.find_run(db, model_of(record)))
        if run is not None:
            self._operations.left.note_unserved(record.request_id, run.base_model, run.session_id)

    async def _resume(self, unfinished: list[OperationRecord], report: Report) -> None:
        """Queue operations of models again. All at once, when all are prepared: a runtime that is running begins with
        the first, and goes back to a state that the others come after."""
        prepared: list[tuple[OperationRecord, Submission]] = []
        for record in sorted(unfinished, key=_order):
            submission = await self._prepared(record)
            if submission is None:
                report.failed += 1
            else:
                prepared.append((record, submission))
                report.operations += 1
        for record, submission in prepared:
            if not self._operations.has(record.request_id):
                self._operations.dispatch(record, submission)

    async def count_deaths(self) -> None:
        """Count the death of the earlier process for what it was executing: see `MAX_SERVER_DEATHS`."""
        running, again = await asyncio.to_thread(self._under_way.take)
        if running or again:
            counted = await self._store.write(lambda db: log.count_deaths(db, running, again))
            if counted:
                logger.warning("an earlier process was killed while it executed %d operations", counted)

    async def _session_over(self, run: RunRecord) -> bool:
        session = await self._store.read(lambda db: sessions.get_session(db, run.project_id, run.session_id))
        return session is None or session.state != "active"

    async def _reopen(self, run: RunRecord, unfinished: list[OperationRecord]) -> bool:
        """Have a run brought back; False if that is not possible: its creation is not in the log any more."""
        runtime = self._models.runtimes[run.base_model]
        cut_off: set[int] = set()
        if run.state == "creating":
            if not any(record.kind != SAMPLE and model_of(record) == run.model_id for record in unfinished):
                return False
            cut_off.add(CREATION)
        next_seq, pending, refused = await self._store.read(lambda db: snapshot_rows.place_in_log(db, run.model_id))
        cut_off.update(seq for seq in pending if seq < next_seq)
        runtime.reopen_model(run.model_id, next_seq, frozenset(cut_off))
        for seq_id in refused:
            runtime.note_refused(run.model_id, seq_id)
        return True

    async def _prepared(self, record: OperationRecord) -> Submission | None:
        """An operation of a model as it was submitted; None if it had to be failed instead."""
        model_id = model_of(record)
        run = await self._store.read(lambda db: run_rows.find_run(db, model_id))
        try:
            if run is None or run.state == "lost":
                raise lost(model_id)
            if run.state not in run_rows.LIVE:
                raise unloaded(model_id)
            submission = await self._submission(record, run)
            if submission.cleanup is not None:  # a save that was cut off may have left the folder that it is to write
                await submission.cleanup()
        except TinsmithError as error:
            await self._operations.settling.fail_now([record.request_id], error)
            return None
        return submission

    async def _submission(self, record: OperationRecord, run: RunRecord) -> Submission:
        if record.kind in _SAVES:
            of_weights: Saves | Loads = self._saves
        elif record.kind == "load_weights":
            of_weights = self._loads
        else:
            return self._training.resume(record, run)
        try:
            return of_weights.resume(record, run, await self._bodies.get_patiently(record.body))
        except (KeyError, ValueError) as error:
            logger.exception("the stored request %s (%s) cannot be read back", record.request_id, record.kind)
            raise unreadable() from error


def model_of(record: OperationRecord | PendingOperation) -> str:
    """The model that an operation belongs to: its scope names it, or its session and its number there."""
    kind, _, rest = record.scope.partition(":")
    return rest if kind in ("model", "unload") else f"{rest}:{record.seq_id}"


def _order(record: OperationRecord) -> tuple[int, str, int]:
    """Creations first, what is to run last in its model last."""
    place = {"session": 0, "model": 1, "unload": 2}.get(record.scope.partition(":")[0], 3)
    return place, record.scope, record.seq_id or 0
