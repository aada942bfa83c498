"""One worker that trains (actor), samples (rollout) and scores against the base model (ref) on one copy of the weights.

Responsible for putting the parts together and for the running generations. Not responsible for scheduling: the caller
decides how many tokens are decoded between training steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from engines.base import BaseEngine
from engines.rollout import Generation, RolloutEngine
from schemas.errors import NotFound, TinsmithError
from schemas.operations import (
    BaseModelInfo,
    LoraSpec,
    OptimizerType,
    Sample,
    SampleResult,
    SavedAdapter,
    StepParams,
    StepResult,
    TrainBatch,
    TrainResult,
)
from workers.dispatch import Dispatch, register
from workers.training import TrainingWorker

REF_ADAPTER_ID = "ref:base"
"""Holds a colon in a place that no model id has, so it never clashes with a client's adapter."""


class ActorRolloutRefWorker:
    """Parts are built from `actor_worker_cls` and `ref_worker_cls`, both on the same engine, plus a rollout engine.

    The ref scores the base model through a fresh adapter of its own, made at the first use: its B is zero, so it adds
    exactly nothing, and no second copy of the base weights is needed.
    """

    actor_worker_cls: ClassVar[type[TrainingWorker]] = TrainingWorker
    ref_worker_cls: ClassVar[type[TrainingWorker]] = TrainingWorker

    def __init__(self, engine: BaseEngine, rollout: RolloutEngine, info: BaseModelInfo) -> None:
        self.actor = self.actor_worker_cls(engine)
        self.ref = self.ref_worker_cls(engine)
        self.rollout = rollout
        self.info = info
        self._generations: dict[str, Generation] = {}
        self._has_ref_adapter = False

    # -- actor ---------------------------------------------------------------------------------------------------
    @register(Dispatch.ONE_TO_ALL)
    def create_adapter(self, adapter_id: str, lora: LoraSpec, optimizer: OptimizerType = "adamw") -> int:
        """See `TrainingWorker.create_adapter`."""
        return self.actor.create_adapter(adapter_id, lora, optimizer)

    @register(Dispatch.ONE_TO_ALL)
    def remove_adapter(self, adapter_id: str) -> None:
        """See `TrainingWorker.remove_adapter`."""
        self.actor.remove_adapter(adapter_id)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, adapter_id: str, folder: str, with_optimizer: bool) -> SavedAdapter:
        """See `TrainingWorker.save_checkpoint`."""
        return self.actor.save_checkpoint(adapter_id, folder, with_optimizer)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self,
        adapter_id: str,
        folder: str,
        with_optimizer: bool,
        create: bool,
        optimizer: OptimizerType | None = None,
    ) -> SavedAdapter:
        """See `TrainingWorker.load_checkpoint`."""
        return self.actor.load_checkpoint(adapter_id, folder, with_optimizer, create, optimizer)

    @register(Dispatch.ONE_TO_ALL)
    def infer_batch(self, batch: TrainBatch) -> TrainResult:
        """See `TrainingWorker.infer_batch`."""
        return self.actor.infer_batch(batch)

    @register(Dispatch.ONE_TO_ALL)
    def train_batch(
        self, batch: TrainBatch, optim_step_params: StepParams | None = None, grad_clip_norm: float = 0.0
    ) -> tuple[TrainResult, StepResult]:
        """See `TrainingWorker.train_batch`."""
        return self.actor.train_batch(batch, optim_step_params, grad_clip_norm)

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

    # -- rollout -------------------------------------------------------------------------------------------------
    @register(Dispatch.ONE_TO_ALL)
    def start_generation(self, batch_id: str, requests: Mapping[str, Sample]) -> None:
        """Begin a batch of samples, keyed by request id."""
        self._generations[batch_id] = self.rollout.start(requests)

    @register(Dispatch.ONE_TO_ALL)
    def step_generation(self, batch_id: str, tokens: int) -> Mapping[str, SampleResult | TinsmithError]:
        """Decode up to `tokens` more tokens per row; returns the requests that ended. A finished batch is dropped."""
        generation = self._generations.get(batch_id)
        if generation is None:
            raise NotFound(f"there is no generation {batch_id!r} on this worker")
        ended = generation.step(tokens)
        if not generation.active:
            del self._generations[batch_id]
        return ended

    @register(Dispatch.ONE_TO_ALL)
    def cancel_sample(self, batch_id: str, request_id: str) -> None:
        """Drop one request of a batch; unknown ids are fine."""
        generation = self._generations.get(batch_id)
        if generation is not None:
            generation.cancel(request_id)

    @register(Dispatch.ONE_TO_ALL)
    def end_generation(self, batch_id: str) -> None:
        """Drop a whole batch; unknown ids are fine."""
        self._generations.pop(batch_id, None)
