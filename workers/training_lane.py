"""Executes training operations: batches and steps of many models in turns, everything else as a call of its own.

Responsible for the life of the adapters on the worker (new, live, failed, lost, freed) and for what a failure means to
the operations behind it. Not responsible for turns (`workers/turn_runner.py`), nor for restarting workers
(`workers/runtime.py`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from schemas.errors import (
    EngineFailure,
    InvalidRequest,
    ModelLost,
    NotFound,
    TinsmithError,
    WorkerDied,
    is_adapters_busy,
)
from schemas.operations import (
    CreateModel,
    LoadWeights,
    Operation,
    OperationResult,
    SaveWeights,
    ZeroGrad,
)
from workers.scheduler import TrainingLine
from workers.throughput import ThroughputMeter
from workers.tickets import Desk, Entry
from workers.turn_runner import TurnRunner, WorkerCall, gone
from workers.turns import CALL_TOKENS, Composer, Heads

_log = logging.getLogger("tinsmith.runtime")

MAX_RERUNS = 2
"""How often work that a dying worker took with it is run again, if running it again is harmless."""
COMPANION_SECONDS = 1.0
"""A model is waited for only this long after its last operation: one that is idle delays nobody."""
_LONGEST_REMOVAL_PAUSE = 60.0


@dataclass(slots=True)
class _Model:
    """An open training run. `error` is why it cannot be used any more: never created, or lost."""

    live: bool = False
    error: TinsmithError | None = None
    seen: float = float("-inf")
    """When it was last told of an operation or answered one."""


@dataclass(slots=True)
class _Removal:
    model_id: str
    attempts: int = 0
    not_before: float = 0.0


class TrainingLane:
    """All open models of one base model.

    Args:
        budget: tokens of a turn, once the base model is loaded.
        meter: told what each turn cost.
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
        clock: Callable[[], float],
    ) -> None:
        self._desk = desk
        self._call = call
        self._line = TrainingLine(gap_timeout)
        self._composer = Composer(self._line, Heads(), check=self._check, refuse=self._refuse)
        self._turns = TurnRunner(
            call,
            self._composer,
            meter,
            budget=budget,
            is_open=lambda model_id: model_id in self._models,
            expects_company=self._expects_company,
            finish=self._finish,
            clock=clock,
        )
        self._max_adapters = max_adapters
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._adapters: set[str] = set()
        """Adapters on the worker, those that wait for removal included."""
        self._removals: deque[_Removal] = deque()
        self._single: Entry | None = None
        """The operation that runs as a call of its own."""
        self._again: deque[Entry] = deque()
        """Creations that were lost with a worker; nothing else of their models can have run."""

    # -- what the edge does ----------------------------------------------------------------------------------------
    def open_model(self, model_id: str) -> None:
        """Expect the operations of a training run, from seq_id 0."""
        if model_id not in self._models:
            self._models[model_id] = _Model()
            self._line.open_model(model_id)

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
        for entry in [*again, *self._turns.close(model_id), *self._line.close_model(model_id)]:
            self._desk.finish(entry, gone())
        running = self._single is not None and self._single.ticket.model_id == model_id
        if running or model_id in self._adapters:
            self._removals.append(_Removal(model_id))

    def reason(self, entry: Entry) -> str:
        """Why an entry has no result yet, for people."""
        if entry in self._again:
            return "waiting to run again"
        if entry.running:
            return self._turns.progress(entry)
        model_id = entry.ticket.model_id or ""
        if self._composer.parked.blocks(model_id) and self._line.head(model_id) is entry:
            return f"waiting for memory for its adapter: {len(self._composer.under_way)} batches are under way"
        return self._line.reason(entry, self._turns.tokens)

    @property
    def adapters(self) -> int:
        """Adapters on the worker, in its memory or idle on disk."""
        return len(self._adapters)

    # -- what the loop does ----------------------------------------------------------------------------------------
    def expire(self) -> None:
        """Answer what waited too long behind a seq_id that never came."""
        for entry, error in self._line.expire(self._clock()):
            self._desk.finish(entry, error)

    def next_deadline(self) -> float | None:
        """When the lane wants to be looked at without news from outside."""
        deadlines = [removal.not_before for removal in self._removals]
        gap = self._line.next_deadline()
        return min([*deadlines, gap] if gap is not None else deadlines, default=None)

    async def run_next(self) -> bool:
        """Free what is due, then run one turn or one call; False if there was nothing to do.

        Raises `WorkerDied`; what was running then stays with the lane until `lose_models`.
        """
        removed = await self._remove_due()
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
        return removed or due is not None

    def lose_models(self) -> tuple[list[str], list[tuple[Entry, TinsmithError]]]:
        """The worker died: every adapter is gone. Returns the lost models and the entries to fail, with their errors.

        Models that were not created yet are not lost: a creation that was running is run again.
        """
        lost = [model_id for model_id in self._adapters if model_id in self._models]
        failed: list[tuple[Entry, TinsmithError]] = []
        running = [*([] if self._single is None else [self._single]), *self._turns.lose()]
        self._single = None
        for model_id in lost:
            error = _model_lost(model_id)
            self._models[model_id].live, self._models[model_id].error = False, error
            failed += [(waiting, error) for waiting in self._line.close_model(model_id)]
        for entry in running:
            if not entry.over:
                failed += self._after_death(entry)
        self._adapters.clear()
        self._removals.clear()
        return lost, failed

    # -- what turns ask ---------------------------------------------------------------------------------------------
    def _check(self, model_id: str, operation: Operation) -> TinsmithError | None:
        """Why this model cannot run this operation."""
        model = self._models.get(model_id)
        if (model is not None and model.live) or _creates(operation):
            return None
        return NotFound(f"model {model_id!r} was never created", field="model_id", code="model_not_created")

    def _refuse(self, entry: Entry, error: TinsmithError) -> None:
        self._desk.finish(entry, self._note_failure(entry, error))

    def _expects_company(self, present: set[str]) -> bool:
        """Whether a model that is not present was busy a moment ago."""
        since = self._clock() - COMPANION_SECONDS
        return any(m.live and m.seen >= since and model_id not in present for model_id, m in self._models.items())

    def _finish(self, entry: Entry, outcome: OperationResult | TinsmithError) -> None:
        model = self._models.get(entry.ticket.model_id or "")
        if model is not None:
            model.seen = self._clock()
        self._desk.finish(entry, outcome)

    # -- calls of their own ----------------------------------------------------------------------------------------
    async def _run_single(self, entry: Entry) -> None:
        """Run and answer it; one that finds no room for its adapter waits for a batch that is under way to end."""
        self._single = entry
        model_id = entry.ticket.model_id or ""
        try:
            await self._turns.forget_dropped()
            outcome: OperationResult | TinsmithError = await self._execute(entry, await entry.load())
        except WorkerDied:
            raise
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

    async def _execute(self, entry: Entry, operation: Operation) -> OperationResult:
        model_id = entry.ticket.model_id or ""
        model = self._models.get(model_id)
        if model is None:
            raise gone()
        if _creates(operation):
            return await self._create(model_id, model, operation)
        self._composer.prefetch()
        result: OperationResult = await self._start_call(model_id, operation)
        return result

    async def _create(self, model_id: str, model: _Model, operation: CreateModel | LoadWeights) -> OperationResult:
        if model.live:
            raise InvalidRequest(f"model {model_id!r} exists already", field="model_id")
        if len(self._adapters) >= self._max_adapters:
            raise InvalidRequest(
                f"this base model already trains {self._max_adapters} models, its limit",
                hint="finish a session that is no longer needed, or ask the operator to raise max_adapters",
                code="adapter_limit",
            )
        if isinstance(operation, CreateModel):
            await self._call("create_adapter", model_id, operation.lora, operation.optimizer)
            result: OperationResult = None
        else:
            result = await self._call(
                "load_checkpoint", model_id, operation.folder, operation.with_optimizer, True, operation.optimizer
            )
        self._adapters.add(model_id)
        model.live = True
        return result

    def _start_call(self, model_id: str, operation: Operation) -> Awaitable[Any]:
        match operation:
            case ZeroGrad():
                return self._call("optimizer_zero_grad", model_id)
            case SaveWeights():
                return self._call("save_checkpoint", model_id, operation.folder, operation.with_optimizer)
            case LoadWeights():
                return self._call("load_checkpoint", model_id, operation.folder, operation.with_optimizer, False)
            case _:
                raise EngineFailure(f"a model has no operation {type(operation).__name__}")

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

    def _after_death(self, entry: Entry) -> list[tuple[Entry, TinsmithError]]:
        """What becomes of the operation that was running when the worker died."""
        model_id = entry.ticket.model_id or ""
        model = self._models.get(model_id)
        entry.running = False
        if model is None:
            return [(entry, gone())]
        if model.error is not None:
            return [(entry, model.error)]
        entry.attempts += 1
        if entry.attempts <= MAX_RERUNS:
            self._again.append(entry)
            return []
        error = WorkerDied("the worker died each time that it created this model")
        return [(entry, self._note_failure(entry, error))]

    async def _remove_due(self) -> bool:
        """Free adapters of closed models. A failed removal is tried again later: the slot must not leak."""
        now, removed = self._clock(), False
        due = [removal for removal in self._removals if removal.not_before <= now]
        if due:
            await self._turns.forget_dropped()
        for removal in due:
            try:
                await self._call("remove_adapter", removal.model_id)
            except WorkerDied:
                raise
            except TinsmithError as error:
                removal.attempts += 1
                removal.not_before = now + min(2.0**removal.attempts, _LONGEST_REMOVAL_PAUSE)
                _log.warning("adapter %s cannot be freed yet: %s", removal.model_id, error.message)
                continue
            self._removals.remove(removal)
            self._adapters.discard(removal.model_id)
            self._composer.parked.freed()
            removed = True
        return removed


def _creates(operation: Operation) -> TypeGuard[CreateModel | LoadWeights]:
    return isinstance(operation, CreateModel) or (isinstance(operation, LoadWeights) and operation.create)


def _model_lost(model_id: str) -> ModelLost:
    return ModelLost(
        f"the live state of model {model_id!r} was lost when its worker process ended",
        field="model_id",
        hint="resume from its last checkpoint with create_training_client_from_state_with_optimizer",
    )
