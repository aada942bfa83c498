"""One turn on an engine: forget, open, compute, step. Whatever fails is told per operation, never as an exception.

Not responsible for what goes into a turn (`workers/turns.py`).
"""

from __future__ import annotations

import logging

from engines.base import BaseEngine
from schemas.errors import EngineFailure, TinsmithError
from schemas.fail_points import fail_point
from schemas.operations import MicroBatch, MicroBatchResult, StepResult, TrainResult
from workers.faults import to_tinsmith_error

_log = logging.getLogger("tinsmith.worker")

Outcomes = dict[str, TrainResult | StepResult | TinsmithError]


def run_micro_batch(engine: BaseEngine, micro: MicroBatch) -> MicroBatchResult:
    """Run a turn; returns what ended in it, each operation and step with its result or its own error.

    An operation that cannot be opened ends at once, and its ranges are passed over. The steps run whatever became of
    the batches before them, as they would one after the other.
    """
    outcomes: Outcomes = {}
    for operation_id in micro.dropped:
        _drop(engine, operation_id)
    for operation_id, batch in micro.opened.items():
        try:
            engine.open_operation(operation_id, batch)
        except Exception as error:
            outcomes[operation_id] = to_tinsmith_error(error, "checking the batch")
            _drop(engine, operation_id)
    if micro.opened:
        fail_point("forward_backward.opened")
    _compute(engine, micro, outcomes)
    if micro.ranges:
        fail_point("forward_backward.computed")
    _step(engine, micro, outcomes)
    if micro.steps:
        fail_point("optim_step.taken")
    return MicroBatchResult(outcomes, engine.take_stats())


def _compute(engine: BaseEngine, micro: MicroBatch, outcomes: Outcomes) -> None:
    """A failure that is not of one operation (a fault of the engine) ends all that were computed together."""
    ranges = [part for part in micro.ranges if part.operation_id not in outcomes]
    if not ranges:
        return
    try:
        outcomes.update(engine.compute(ranges))
    except Exception as error:
        failure = to_tinsmith_error(error, "forward_backward")
        for part in ranges:
            outcomes[part.operation_id] = failure
            _drop(engine, part.operation_id)


def _step(engine: BaseEngine, micro: MicroBatch, outcomes: Outcomes) -> None:
    if not micro.steps:
        return
    try:
        ended = list(engine.optimizer_steps(micro.steps))
        if len(ended) != len(micro.steps):
            raise EngineFailure(f"the engine answered {len(ended)} of {len(micro.steps)} optimizer steps")
    except Exception as error:
        ended = [to_tinsmith_error(error, "optimizer_step")] * len(micro.steps)
    outcomes.update({step.operation_id: outcome for step, outcome in zip(micro.steps, ended, strict=True)})


def _drop(engine: BaseEngine, operation_id: str) -> None:
    """Forget an operation; if even that fails, only memory is at stake."""
    try:
        engine.drop_operation(operation_id)
    except Exception as error:
        _log.error("operation %s cannot be dropped", operation_id, exc_info=error)
