"""One turn on an engine: forget, open, compute, step. Whatever fails is told per operation, never as an exception.

Not responsible for what goes into a turn (`workers/turns.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from engines.base import BaseEngine
from schemas.errors import EngineFailure, TinsmithError, is_adapters_busy
from schemas.fail_points import fail_point
from schemas.operations import (
    AdapterStep,
    DatumRange,
    MicroBatch,
    MicroBatchResult,
    StepResult,
    TrainBatch,
    TrainResult,
)
from workers.faults import to_tinsmith_error

_log = logging.getLogger("tinsmith.worker")

Outcomes = dict[str, TrainResult | StepResult | TinsmithError]


def run_micro_batch(engine: BaseEngine, micro: MicroBatch) -> MicroBatchResult:
    """Run a turn; returns what ended in it, each operation and step with its result or its own error.

    An operation that cannot be opened ends at once, and its ranges are passed over. The steps run whatever became of
    the batches before them, as they would one after the other.

    Adapters that do not fit into memory beside the others of the turn get their part of it when others have ended. Who
    finds no room even then ends with an `OutOfMemory` of code `schemas.errors.ADAPTERS_BUSY`, and so does everything
    behind it of the same adapter, the step included: nothing of it has run, all of it may be sent again.
    """
    outcomes: Outcomes = {}
    for operation_id in micro.dropped:
        _drop(engine, operation_id)
    waiting: Mapping[str, TrainBatch] = micro.opened
    ranges: Sequence[DatumRange] = micro.ranges
    while True:
        ended = len(outcomes)
        busy = _open(engine, waiting, outcomes)
        if waiting:
            fail_point("forward_backward.opened")
        _compute(engine, [part for part in ranges if part.operation_id not in busy], outcomes)
        ranges = [part for part in ranges if part.operation_id in busy]
        stuck = len(busy) == len(waiting) and len(outcomes) == ended
        waiting = {operation_id: waiting[operation_id] for operation_id in busy}
        if not waiting or stuck:
            break
    outcomes.update(busy)
    refused = {waiting[operation_id].adapter_id: error for operation_id, error in busy.items()}
    outcomes.update({step.operation_id: refused[step.adapter_id] for step in micro.steps if step.adapter_id in refused})
    if micro.ranges:
        fail_point("forward_backward.computed")
    _step(engine, [step for step in micro.steps if step.adapter_id not in refused], outcomes)
    if micro.steps:
        fail_point("optim_step.taken")
    return MicroBatchResult(outcomes, engine.take_stats())


def _open(engine: BaseEngine, batches: Mapping[str, TrainBatch], outcomes: Outcomes) -> dict[str, TinsmithError]:
    """Open operations; returns those whose adapter has no room now, and what is behind them of the same adapter."""
    busy: dict[str, TinsmithError] = {}
    without_room: dict[str, TinsmithError] = {}
    for operation_id, batch in batches.items():
        if batch.adapter_id in without_room:
            busy[operation_id] = without_room[batch.adapter_id]
            continue
        try:
            engine.open_operation(operation_id, batch)
        except Exception as raised:
            error = to_tinsmith_error(raised, "checking the batch")
            _drop(engine, operation_id)
            if is_adapters_busy(error):
                busy[operation_id] = without_room[batch.adapter_id] = error
            else:
                outcomes[operation_id] = error
    return busy


def _compute(engine: BaseEngine, ranges: Sequence[DatumRange], outcomes: Outcomes) -> None:
    """A failure that is not of one operation (a fault of the engine) ends all that were computed together."""
    ranges = [part for part in ranges if part.operation_id not in outcomes]
    if not ranges:
        return
    try:
        outcomes.update(engine.compute(ranges))
    except Exception as error:
        failure = to_tinsmith_error(error, "forward_backward")
        for part in ranges:
            outcomes[part.operation_id] = failure
            _drop(engine, part.operation_id)


def _step(engine: BaseEngine, steps: Sequence[AdapterStep], outcomes: Outcomes) -> None:
    if not steps:
        return
    try:
        ended = list(engine.optimizer_steps(steps))
        if len(ended) != len(steps):
            raise EngineFailure(f"the engine answered {len(ended)} of {len(steps)} optimizer steps")
    except Exception as error:
        ended = [to_tinsmith_error(error, "optimizer_step")] * len(steps)
    outcomes.update({step.operation_id: outcome for step, outcome in zip(steps, ended, strict=True)})


def _drop(engine: BaseEngine, operation_id: str) -> None:
    """Forget an operation; if even that fails, only memory is at stake."""
    try:
        engine.drop_operation(operation_id)
    except Exception as error:
        _log.error("operation %s cannot be dropped", operation_id, exc_info=error)
