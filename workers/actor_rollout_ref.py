"""One worker that trains (actor), samples (rollout) and scores against the base model (ref) on one copy of the weights.

Responsible for putting the parts together. Not responsible for scheduling: the caller decides how long sampling runs
between turns of training.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from engines.base import BaseEngine
from engines.sampling.base import SamplingEngine
from schemas.base_model_info import BaseModelInfo
from schemas.operations import LoraSpec, TrainBatch, TrainResult
from workers.dispatch import Dispatch, register
from workers.rollout import RolloutWorker
from workers.training import TrainingWorker

REF_ADAPTER_ID = "ref:base"
"""Holds a colon in a place that no model id has, so it never clashes with a client's adapter."""

Params = ParamSpec("Params")
Value = TypeVar("Value")


def by_actor(
    method: Callable[Concatenate[Any, Params], Value],
) -> Callable[Concatenate[ActorRolloutRefWorker, Params], Value]:
    """The method of the combined worker that its actor's method of this name carries out, registered as that one is."""

    @functools.wraps(method)
    def forward(self: ActorRolloutRefWorker, /, *args: Params.args, **kwargs: Params.kwargs) -> Value:
        # By name, so that an actor that overrides the method is asked itself.
        value: Value = getattr(self.actor, method.__name__)(*args, **kwargs)
        return value

    return forward


class ActorRolloutRefWorker(RolloutWorker):
    """Parts are built from `actor_worker_cls` and `ref_worker_cls`, both on the same engine, plus a sampling engine.

    The ref scores the base model through a fresh adapter of its own, made at the first use: its B is zero, so it adds
    exactly nothing, and no second copy of the base weights is needed.
    """

    actor_worker_cls: ClassVar[type[TrainingWorker]] = TrainingWorker
    ref_worker_cls: ClassVar[type[TrainingWorker]] = TrainingWorker

    def __init__(self, engine: BaseEngine, rollout: SamplingEngine, info: BaseModelInfo) -> None:
        self.actor = self.actor_worker_cls(engine)
        self.ref = self.ref_worker_cls(engine)
        super().__init__(rollout, info)
        self._has_ref_adapter = False

    # -- actor ---------------------------------------------------------------------------------------------------
    create_adapter = by_actor(TrainingWorker.create_adapter)
    remove_adapter = by_actor(TrainingWorker.remove_adapter)
    save_checkpoint = by_actor(TrainingWorker.save_checkpoint)
    load_checkpoint = by_actor(TrainingWorker.load_checkpoint)
    begin_snapshot = by_actor(TrainingWorker.begin_snapshot)
    finished_snapshots = by_actor(TrainingWorker.finished_snapshots)
    restore_snapshot = by_actor(TrainingWorker.restore_snapshot)
    infer_batch = by_actor(TrainingWorker.infer_batch)
    train_batch = by_actor(TrainingWorker.train_batch)

    # -- ref -----------------------------------------------------------------------------------------------------
    @register(Dispatch.ONE_TO_ALL)
    def ref_infer_batch(self, batch: TrainBatch) -> TrainResult:
        """Logprobs of a batch under the base model, whatever adapter the batch names."""
        if not self._has_ref_adapter:
            self.ref.create_adapter(REF_ADAPTER_ID, self._smallest_adapter())
            self._has_ref_adapter = True
        return self.ref.infer_batch(replace(batch, adapter_id=REF_ADAPTER_ID, backward=False))

    def _smallest_adapter(self) -> LoraSpec:
        """Rank 1 on one family that the model has."""
        family = next(name for name in ("attn", "mlp", "unembed") if name in self.info.adapter_families)
        return LoraSpec(
            rank=1,
            seed=0,
            train_attn=family == "attn",
            train_mlp=family == "mlp",
            train_unembed=family == "unembed",
        )
