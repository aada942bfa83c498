"""Executes training operations: batches and steps of many models in turns, everything else as a call of its own.

Responsible for the life of the models (new, live, failed, closed) and for what a failure means to the operations behind
it. Not responsible for turns (`workers/turn_runner.py`), for models that were set back (`workers/setbacks.py`), nor for
restarting workers (`workers/runtime.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeGuard

from schemas.errors import (
    InvalidRequest,
    ModelLost,
    NonFiniteGradient,
    NotFound,
    NotNow,
    TinsmithError,
    WorkerDied,
    is_adapters_busy,
)
from schemas.operations import (
    CreateModel,
    LoadWeights,
    Operation,
    OperationResult,
)
from workers.adapters import Adapters, WorkerCall, create_adapter, start_call
from workers.models import Model, Models
from workers.recovery import MAX_DEATHS, MAX_SERVER_DEATHS, History
from workers.reruns import MAX_RERUNS
from workers.scheduler import TrainingLine
from workers.setbacks import Failures, Setbacks
from workers.snapshots import SnapshotPolicy, Snapshots
from workers.throughput import ThroughputMeter
from workers.tickets import Desk, Entry
from workers.turn_runner import TurnRunner, gone
from workers.turns import CALL_TOKENS, Composer, Heads

COMPANION_SECONDS = 1.0
"""A model is waited for only this long after its last operation: one that is idle delays nobody."""


class TrainingLane:
    """All open models of one base model.

    Args:
        budget: tokens of a turn, once the base model is loaded.
        meter: told what each turn cost.
        history: the log and the snapshots from which models are brought back; None = a model that was on a worker which
            died is lost.
        policy: when snapshots are taken.
        death_limit: how often in a row a server may be killed while it executes an operation.
        tell_lost: told which models cannot be brought back, before their operations fail.
        wake: told that there is something to do that nobody else told.
    """

    def __init__(
        self,
        desk: Desk,
        call: WorkerCall,
        *,
        budget: Callable[[], int],
        meter: ThroughputMeter,
        gap_timeout: float,
        max_adapters: int,
        history: History | None,
        policy: SnapshotPolicy,
        tell_lost: Callable[[Sequence[str]], Awaitable[None]],
        clock: Callable[[], float],
        wake: Callable[[], None],
        death_limit: int = MAX_SERVER_DEATHS,
    ) -> None:
        self._desk = desk
        self._death_limit = death_limit
        self._call = call
        self._max_adapters = max_adapters
        self._clock = clock
        self._models = Models()
        self._adapters = Adapters(call, clock)
        self._line = TrainingLine(gap_timeout)
        self._composer = Composer(
            self._line, Heads(), banned=self._banned, check=self._check, refuse=self._refuse, wake=wake
        )
        self._turns = TurnRunner(
            call,
            self._composer,
            meter,
            budget=budget,
            is_open=lambda model_id: model_id in self._models,
            expects_company=self._expects_company,
            finish=self._finish,
            distrust=lambda model_ids: self._setbacks.distrust(model_ids),
            clock=clock,
        )
        self._snapshots = None if history is None else Snapshots(history, call, policy, clock)
        self._setbacks = Setbacks(
            self._models,
            self._line,
            self._turns,
            self._adapters,
            desk,
            call,
            history=history,
            snapshots=self._snapshots,
            tell_lost=tell_lost,
            death_limit=death_limit,
            clock=clock,
        )
        self._single: Entry | None = None
        """The operation that runs as a call of its own."""
        self._again: deque[Entry] = deque()
        """Creations that were lost with a worker; nothing else of their models can have run."""

    # -- what the edge does ----------------------------------------------------------------------------------------
    def open_model(self, model_id: str) -> None:
        """Expect the operations of a training run, from seq_id 0."""
        if model_id not in self._models:
            self._models[model_id] = Model()
            self._line.open_model(model_id)

    def reopen_model(self, model_id: str, next_seq: int, cut_off: frozenset[int]) -> None:
        """A model of an earlier process: bring it back, then go on with `next_seq`, the first that was not in line yet.

        `cut_off`: seq_ids before it that are submitted next; they were under way, and run again in their places.
        """
        self._models[model_id] = Model(cut_off=cut_off)
        self._line.open_model(model_id, next_seq)
        self._setbacks.set_back(model_id, [])

    def submit(self, entry: Entry) -> None:
        """Queue an entry; one that can never run is answered at once."""
        model_id = entry.ticket.model_id or ""
        model = self._models.get(model_id)
        try:
            if model is None:
                raise NotFound(f"model {model_id!r} is not open on this server", field="model_id")
            if model.error is not None:
                raise model.error
            model.seen = self._clock()
            seq_id = entry.ticket.seq_id
            if seq_id in model.cut_off:
                model.cut_off, entry.seq_id = model.cut_off - {seq_id}, seq_id
                self._setbacks.wait(model_id, entry)
                return
            self._line.add(model_id, entry, model.seen)
            self._composer.prefetch()
        except TinsmithError as error:
            self._desk.finish(entry, error)

    def note_refused(self, model_id: str, seq_id: int) -> None:
        """A refused request consumed this seq_id."""
        self._line.note_refused(model_id, seq_id)

    def close_model(self, model_id: str) -> None:
        """Fail what waits with `Gone` and free the adapter after the running call."""
        if self._models.pop(model_id, None) is None:
            return
        again = [entry for entry in self._again if entry.ticket.model_id == model_id]
        self._again = deque(entry for entry in self._again if entry.ticket.model_id != model_id)
        waiting = self._setbacks.forget(model_id)
        if self._snapshots is not None:
            self._snapshots.forget(model_id)
        for entry in [*again, *waiting, *self._turns.close(model_id), *self._line.close_model(model_id)]:
            self._desk.finish(entry, gone())
        running = self._single is not None and self._single.ticket.model_id == model_id
        if running or model_id in self._adapters.on_worker:
            self._adapters.free(model_id)

    def reason(self, entry: Entry) -> str:
        """Why an entry has no result yet, for people."""
        if entry in self._again:
            return "waiting to run again"
        model_id = entry.ticket.model_id or ""
        head = self._line.head(model_id)
        if head is not None and head.unread is not None and not entry.running:
            return head.unread
        recovering = self._setbacks.reason(model_id)
        if recovering is not None:
            return recovering
        if entry.running:
            return self._turns.progress(entry)
        if self._composer.parked.blocks(model_id) and self._line.head(model_id) is entry:
            return f"waiting for memory for its adapter: {len(self._composer.under_way)} batches are under way"
        return self._line.reason(entry, self._turns.tokens)

    @property
    def adapters(self) -> int:
        """Adapters on the worker, in its memory or idle on disk."""
        return len(self._adapters.on_worker)

    # -- what the loop does ----------------------------------------------------------------------------------------
    def expire(self) -> None:
        """Answer what waited too long behind a seq_id that never came."""
        for entry, error in self._line.expire(self._clock()):
            self._desk.finish(entry, error)

    def next_deadline(self) -> float | None:
        """When the lane wants to be looked at without news from outside."""
        parts = (self._adapters, self._line, self._setbacks, self._snapshots)
        deadlines = [None if part is None else part.next_deadline() for part in parts]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    async def close(self) -> None:
        """Wait until what is being recorded is recorded."""
        if self._snapshots is not None:
            await self._snapshots.close()

    async def run_next(self) -> bool:
        """Free what is due, bring a model back, or run one turn or one call; False if there was nothing to do.

        Raises `WorkerDied`; what was running then stays with the lane until `lose_models`.
        """
        removed = await self._adapters.free_due(self._turns.forget_dropped)
        if removed:
            self._composer.parked.freed()
        await self._setbacks.record_given_up()
        if self._snapshots is not None:
            await self._snapshots.advance(self._is_free)
        brought = await self._setbacks.bring_back_some()
        if self._again:
            entry = self._again.popleft()
            entry.start()
            await self._run_single(entry)
            return True
        due = await self._turns.compose()
        if isinstance(due, Entry):
            await self._run_single(due)
        elif due is not None:
            await self._turns.run(due)
        else:
            await self._turns.forget_dropped()
        return removed or brought or due is not None

    def lose_models(self) -> tuple[list[str], Failures]:
        """The worker died with every adapter. Returns the models that are lost and the entries to fail, with errors.

        With a history, models are set back instead and their operations that were running run again. Models that were
        not created yet are not lost either way: a creation that was running is run again.
        """
        running = [*([] if self._single is None else [self._single]), *self._turns.lose()]
        self._single = None
        self._adapters.lose()
        if self._snapshots is not None:
            self._snapshots.lose()
        gone_models, failed = self._setbacks.worker_died(running)
        for entry in running:
            if not entry.over and entry.again is None:
                failed += self._after_death(entry)
        return gone_models, failed

    # -- what turns ask ---------------------------------------------------------------------------------------------
    def _check(self, model_id: str, operation: Operation) -> TinsmithError | None:
        """Why this model cannot run this operation."""
        if self._models.is_live(model_id) or _creates(operation):
            return None
        return NotFound(f"model {model_id!r} was never created", field="model_id", code="model_not_created")

    def _refuse(self, entry: Entry, error: TinsmithError) -> None:
        self._desk.finish(entry, self._note_failure(entry, error))

    def _expects_company(self, present: set[str]) -> bool:
        """Whether a model that is not present was busy a moment ago."""
        since = self._clock() - COMPANION_SECONDS
        return any(m.live and m.seen >= since and model_id not in present for model_id, m in self._models.items())

    def _finish(self, entry: Entry, outcome: OperationResult | TinsmithError) -> None:
        model_id, ticket = entry.ticket.model_id or "", entry.ticket
        model = self._models.get(model_id)
        if model is not None:
            model.seen = self._clock()
            lost_live = isinstance(outcome, ModelLost) and entry.again is None and model.live
            if lost_live and self._setbacks.runs_again(entry):
                return
            if self._setbacks.restoring(model_id):  # set back earlier in the same turn
                entry.running = False
                self._setbacks.wait(model_id, entry)
                return
            if self._snapshots is not None and ticket.seq_id is not None:
                failed = isinstance(outcome, TinsmithError) and not isinstance(outcome, NonFiniteGradient)
                self._snapshots.note(model_id, ticket.seq_id, ticket.size, ticket.changes and not failed)
        self._desk.finish(entry, outcome)

    def _banned(self, entry: Entry) -> TinsmithError | None:
        """Why an operation must not run at all."""
        return _deadly("server") if entry.ticket.deaths >= self._death_limit else None

    def _is_free(self, model_id: str) -> bool:
        """Whether nothing of a model is open on the worker."""
        return self._models.is_live(model_id) and model_id not in self._composer.under_way

    # -- calls of their own ----------------------------------------------------------------------------------------
    async def _run_single(self, entry: Entry) -> None:
        """Run and answer it; one that finds no room for its adapter waits for a batch that is under way to end."""
        self._single = entry
        model_id = entry.ticket.model_id or ""
        try:
            await self._turns.forget_dropped()
            operation = await entry.load()
            if (entry.attempts or entry.ticket.begun) and entry.ticket.undo is not None:
                await entry.ticket.undo()
            outcome: OperationResult | TinsmithError = await self._execute(entry, operation)
        except WorkerDied:
            raise
        except NotNow as error:
            self._put_off(model_id, entry, error)
            return
        except TinsmithError as error:
            if is_adapters_busy(error) and self._turns.holds_adapters:
                self._single = None
                if not self._composer.put_back(model_id, [entry], CALL_TOKENS):
                    self._finish(entry, gone())
                return
            outcome = self._note_failure(entry, error)
        self._single = None
        self._composer.parked.passed(model_id)
        self._finish(entry, outcome)

    def _put_off(self, model_id: str, entry: Entry, error: NotNow) -> None:
        """It waits in its place until what it reads can be read."""
        self._single = None
        self._composer.put_off(model_id, entry, error)
        if not self._line.put_back(model_id, [entry]):
            self._finish(entry, gone())

    async def _execute(self, entry: Entry, operation: Operation) -> OperationResult:
        model_id = entry.ticket.model_id or ""
        model = self._models.get(model_id)
        if model is None:
            raise gone()
        call = partial(self._call, executes=(entry,))
        if _creates(operation):
            return await self._create(call, model_id, model, operation)
        self._composer.prefetch()
        if self._snapshots is not None and isinstance(operation, LoadWeights):
            self._snapshots.hurry(model_id)  # once it is taken, nobody needs the checkpoint any more
        result: OperationResult = await start_call(call, model_id, operation)
        return result

    async def _create(
        self, call: WorkerCall, model_id: str, model: Model, operation: CreateModel | LoadWeights
    ) -> OperationResult:
        if model.live:
            raise InvalidRequest(f"model {model_id!r} exists already", field="model_id")
        if len(self._adapters.on_worker) + self._setbacks.waiting >= self._max_adapters:
            raise InvalidRequest(
                f"this base model already trains {self._max_adapters} models, its limit",
                hint="finish a session that is no longer needed, or ask the operator to raise max_adapters",
                code="adapter_limit",
            )
        result = await create_adapter(call, model_id, operation)
        self._adapters.on_worker.add(model_id)
        model.live = True
        if self._snapshots is not None and isinstance(operation, LoadWeights):
            self._snapshots.hurry(model_id)
        return result

    def _note_failure(self, entry: Entry, error: TinsmithError) -> TinsmithError:
        """A failed operation leaves its model usable, unless it was the one to create it."""
        model_id = entry.ticket.model_id or ""
        model = self._models.get(model_id)
        if model is None or model.live or model.error is not None or error.code == "model_not_created":
            return error
        model.error = NotFound(
            f"model {model_id!r} was not created: {error.message}",
            field="model_id",
            hint=error.hint,
            code="model_not_created",
        )
        for waiting in self._line.close_model(model_id):
            self._desk.finish(waiting, model.error)
        return error

    def _after_death(self, entry: Entry) -> Failures:
        """What becomes of the operation that was running when the worker died."""
        model_id = entry.ticket.model_id or ""
        model = self._models.get(model_id)
        entry.running = False
        entry.attempts += 1
        if model is None:
            return [(entry, gone())]
        if model.error is not None:
            return [(entry, model.error)]
        if self._setbacks.restoring(model_id):
            if entry.attempts <= MAX_DEATHS:
                entry.unload()
                self._setbacks.wait(model_id, entry)
                return []
            return [(entry, _deadly("worker"))]
        if entry.attempts <= MAX_RERUNS:
            self._again.append(entry)
            return []
        error = WorkerDied("the worker died each time that it created this model")
        return [(entry, self._note_failure(entry, error))]


def _deadly(victim: str) -> WorkerDied:
    return WorkerDied(
        f"the {victim} died each time that it executed this operation",
        hint="it may need more memory than there is: send fewer or shorter datums at a time",
    )


def _creates(operation: Operation) -> TypeGuard[CreateModel | LoadWeights]:
    return isinstance(operation, CreateModel) or (isinstance(operation, LoadWeights) and operation.create)
