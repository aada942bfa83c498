"""Adapters on a worker: which there are, how one gets there, and how those that nobody needs leave again.

Not responsible for the order of operations, nor for what a failure means to a model (`workers/training_lane.py`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from schemas.errors import EngineFailure, TinsmithError, WorkerDied
from schemas.operations import CreateModel, LoadWeights, Operation, OperationResult, SaveWeights, ZeroGrad

_log = logging.getLogger("tinsmith.runtime")

WorkerCall = Callable[..., Awaitable[Any]]
"""(method, arguments, `executes`: the operations that the call executes) -> what the worker returned."""
_LONGEST_REMOVAL_PAUSE = 60.0


@dataclass(slots=True)
class _Removal:
    model_id: str
    attempts: int = 0
    not_before: float = 0.0


class Adapters:
    """The adapters of one worker. `clock` is monotonic seconds."""

    def __init__(self, call: WorkerCall, clock: Callable[[], float]) -> None:
        self._call = call
        self._clock = clock
        self.on_worker: set[str] = set()
        """Those that wait for removal included."""
        self._removals: deque[_Removal] = deque()

    def free(self, model_id: str) -> None:
        """Remove an adapter after the running call."""
        self._removals.append(_Removal(model_id))

    def lose(self) -> None:
        """The worker died: none is left."""
        self.on_worker.clear()
        self._removals.clear()

    def next_deadline(self) -> float | None:
        """When `free_due` will have something to do."""
        return min((removal.not_before for removal in self._removals), default=None)

    async def free_due(self, before: Callable[[], Awaitable[None]]) -> bool:
        """Free what is due, if anything is after `before`; whether something was freed. Raises `WorkerDied`.

        A failed removal is tried again later: the slot must not leak.
        """
        now, freed = self._clock(), False
        due = [removal for removal in self._removals if removal.not_before <= now]
        if due:
            await before()
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
            self.on_worker.discard(removal.model_id)
            freed = True
        return freed


async def create_adapter(call: WorkerCall, model_id: str, operation: CreateModel | LoadWeights) -> OperationResult:
    """Make a new adapter, fresh or from a checkpoint; returns the result of that operation."""
    if isinstance(operation, CreateModel):
        await call("create_adapter", model_id, operation.lora, operation.optimizer)
        return None
    loaded: OperationResult = await call(
        "load_checkpoint", model_id, operation.folder, operation.with_optimizer, True, operation.optimizer
    )
    return loaded


def start_call(call: WorkerCall, model_id: str, operation: Operation) -> Awaitable[Any]:
    """An operation of a live model that is a call of its own."""
    match operation:
        case ZeroGrad():
            return call("optimizer_zero_grad", model_id)
        case SaveWeights():
            return call("save_checkpoint", model_id, operation.folder, operation.with_optimizer)
        case LoadWeights():
            return call("load_checkpoint", model_id, operation.folder, operation.with_optimizer, False)
        case _:
            raise EngineFailure(f"a model has no operation {type(operation).__name__}")
