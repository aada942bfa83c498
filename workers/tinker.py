"""The split primitives: forward_backward, optimizer_step and optimizer_zero_grad as separate calls, or many in a turn.

They exist here and nowhere above: `TrainingWorker` trains in whole steps only. Between the calls the gradient stays in
the adapter's accumulator, because every context is entered with `zero_grad_on_exit=False`.
"""

from __future__ import annotations

from typing import ClassVar

from schemas.fail_points import fail_point
from schemas.operations import (
    MicroBatch,
    MicroBatchResult,
    StepParams,
    StepResult,
    TrainBatch,
    TrainResult,
)
from workers import micro_batch
from workers.actor_rollout_ref import ActorRolloutRefWorker, by_actor
from workers.dispatch import Dispatch, register
from workers.training import TrainingWorker


class TinkerTrainingWorker(TrainingWorker):
    """A training worker whose step can be taken apart."""

    @register(Dispatch.ONE_TO_ALL)
    def optimizer_zero_grad(self, adapter_id: str) -> None:
        """Clear the accumulated gradient of the adapter."""
        self.engine.optimizer_zero_grad(adapter_id)
        fail_point("zero_grad.done")

    @register(Dispatch.ONE_TO_ALL)
    def forward_backward(self, batch: TrainBatch) -> TrainResult:
        """Add the gradient of the summed loss to the accumulator; if anything raises, this call adds nothing."""
        with self.engine.train_mode(batch.adapter_id, zero_grad_on_exit=False):
            return self.engine.forward_backward(batch)

    @register(Dispatch.ONE_TO_ALL)
    def optimizer_step(
        self, adapter_id: str, optim_step_params: StepParams | None = None, grad_clip_norm: float = 0.0
    ) -> StepResult:
        """Apply and clear the accumulated gradient.

        `optim_step_params` overrides every parameter group for this step; without it the optimizer's own values rule.
        """
        with self.engine.train_mode(adapter_id, zero_grad_on_exit=False):
            return self.engine.optimizer_step(adapter_id, optim_step_params, grad_clip_norm=grad_clip_norm)

    @register(Dispatch.ONE_TO_ALL)
    def run_micro_batch(self, micro: MicroBatch) -> MicroBatchResult:
        """The same primitives for many adapters in one call; failures are outcomes of single operations."""
        return micro_batch.run_micro_batch(self.engine, micro)


class TinkerActorRolloutRefWorker(ActorRolloutRefWorker):
    """The one-machine layout: trains by split primitives, samples and scores on a single copy of the base weights."""

    actor_worker_cls: ClassVar[type[TrainingWorker]] = TinkerTrainingWorker
    actor: TinkerTrainingWorker

    optimizer_zero_grad = by_actor(TinkerTrainingWorker.optimizer_zero_grad)
    forward_backward = by_actor(TinkerTrainingWorker.forward_backward)
    optimizer_step = by_actor(TinkerTrainingWorker.optimizer_step)
    run_micro_batch = by_actor(TinkerTrainingWorker.run_micro_batch)
