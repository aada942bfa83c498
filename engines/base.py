"""The interface of a training engine: many named adapters on one frozen base model.

Engines implement it on torch, FSDP2 and other libraries; `tests/engines/contract.py` runs the same contract on each.
An engine computes; it knows no HTTP, no database, no process layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from engines.capabilities import Capabilities
from schemas.base_model_info import BaseModelInfo
from schemas.errors import NotFound, TinsmithError
from schemas.operations import (
    AdapterStep,
    DatumRange,
    LoraSpec,
    OptimizerType,
    PassStats,
    SavedAdapter,
    SavedSnapshot,
    StepParams,
    StepResult,
    TrainBatch,
    TrainResult,
)


class BaseEngine(ABC):
    """Many adapters, one base model, one device (or one rank of several).

    All methods raise `schemas.errors.TinsmithError` subclasses; whatever raises leaves the adapter as it was before
    the call (weights, moments and accumulated gradient).
    """

    capabilities: ClassVar[Capabilities]
    """What it can do: that of `capabilities.py` in its folder."""

    def __init__(self) -> None:
        self._operations: dict[str, TrainBatch] = {}

    @classmethod
    @abstractmethod
    def check(cls) -> None:
        """Raise `Unavailable` naming what is missing and how to install it, before any process starts."""

    @abstractmethod
    def load(self) -> BaseModelInfo:
        """Load the frozen base model; call once. Slow (seconds to minutes)."""

    # -- adapters ------------------------------------------------------------------------------------------------
    @abstractmethod
    def create_adapter(self, adapter_id: str, lora: LoraSpec, optimizer: OptimizerType = "adamw") -> int:
        """Make a fresh adapter from its geometry and seed; returns its number of trainable parameters."""

    @abstractmethod
    def remove_adapter(self, adapter_id: str) -> None:
        """Free everything of the adapter; unknown ids are ignored (removal is idempotent)."""

    @abstractmethod
    def save_adapter(self, adapter_id: str, folder: Path, *, with_optimizer: bool) -> SavedAdapter:
        """Write a complete PEFT-format folder at `folder` (write, fsync, rename: it is there whole or not at all)."""

    @abstractmethod
    def load_adapter(
        self,
        adapter_id: str,
        folder: Path,
        *,
        with_optimizer: bool,
        create: bool,
        optimizer: OptimizerType | None = None,
    ) -> SavedAdapter:
        """Load a folder written by `save_adapter`, as a new adapter or into the live one (which must fit it).

        Without the optimizer, a new adapter has fresh moments; a live one also gets fresh moments. The accumulated
        gradient is cleared in both cases, for it belongs to the weights that were replaced. `optimizer` chooses that
        of a new adapter (None: the saved one's with its state, else AdamW); saved state fits only the type it is of.
        """

    @abstractmethod
    def snapshot_adapter(self, adapter_id: str, path: Path) -> Callable[[], SavedSnapshot]:
        """Copy the whole state now (weights, moments, steps, accumulated gradient); the returned function writes it.

        That function may run in any thread, beside other calls. The file is then there whole or not at all, and
        durable; it raises `EngineFailure` if it cannot be written. Raises `NotFound`, `OutOfMemory`, and
        `EngineFailure` while an operation of the adapter is open.
        """

    @abstractmethod
    def restore_adapter(self, adapter_id: str, path: Path, sha256: str) -> None:
        """A new adapter from a file of `snapshot_adapter`, bit for bit as it was.

        Raises `ModelLost` if the file is missing or does not have this checksum, `NotNow` if it cannot be read for the
        moment, `AlreadyExists`, `OutOfMemory`.
        """

    # -- the split primitives -----------------------------------------------------------------------------------
    @contextmanager
    def train_mode(self, adapter_id: str, *, zero_grad_on_exit: bool = True) -> Iterator[None]:
        """Select the adapter for training; `forward_backward` adds into a stage that belongs to this context.

        Leaving normally adds the stage to the adapter's accumulator, then clears the accumulator if
        `zero_grad_on_exit`. When an exception leaves, the stage is dropped: what earlier contexts accumulated
        survives, unless `zero_grad_on_exit` asks for all of it to go.
        """
        self._open_stage(adapter_id)
        try:
            yield
        except BaseException:
            self._close_stage(adapter_id, keep=False)
            if zero_grad_on_exit:
                self.optimizer_zero_grad(adapter_id)
            raise
        self._close_stage(adapter_id, keep=True)
        if zero_grad_on_exit:
            self.optimizer_zero_grad(adapter_id)

    @abstractmethod
    def _open_stage(self, adapter_id: str) -> None:
        """Begin collecting gradients apart from the accumulator. Raises `NotFound` for an unknown adapter."""

    @abstractmethod
    def _close_stage(self, adapter_id: str, *, keep: bool) -> None:
        """End collecting: add the stage to the accumulator, or drop it."""

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Forward passes only: nothing inside may touch gradients."""
        yield

    @abstractmethod
    def forward(self, batch: TrainBatch) -> TrainResult:
        """Logprobs and metrics of a batch, no gradient."""

    @abstractmethod
    def forward_backward(self, batch: TrainBatch) -> TrainResult:
        """Add the gradient of the summed loss to the open stage. Only inside `train_mode` of that adapter."""

    @abstractmethod
    def optimizer_step(
        self, adapter_id: str, params: StepParams | None = None, *, grad_clip_norm: float = 0.0
    ) -> StepResult:
        """Apply the accumulated gradient (an open stage included) with the adapter's optimizer and clear it.

        `params` must be of the optimizer's type (None: the optimizer's own values). Raises `NonFiniteGradient`:
        weights and moments stay, the gradient is cleared.
        """

    @abstractmethod
    def optimizer_zero_grad(self, adapter_id: str) -> None:
        """Clear the accumulated gradient."""

    # -- many adapters in one turn --------------------------------------------------------------------------------
    # An engine that computes one adapter at a time inherits these: an operation then runs whole, with its last range.
    def open_operation(self, operation_id: str, batch: TrainBatch) -> None:
        """Check a whole batch and take it in; nothing is computed. Raises `NotFound`, `InvalidRequest`, or
        `OutOfMemory`: of code `schemas.errors.ADAPTERS_BUSY` if there is room for the adapter when others have ended.
        """
        self._operations[operation_id] = batch

    def drop_operation(self, operation_id: str) -> None:
        """Forget an open operation and what it has collected; unknown ids are fine."""
        self._operations.pop(operation_id, None)

    def compute(self, ranges: Sequence[DatumRange]) -> Mapping[str, TrainResult | TinsmithError]:
        """Compute datums of open operations; returns those that ended, with the result or their own error.

        An operation ends with its last datum or its first failure. Only then, and only without failure, does its
        gradient enter the adapter's accumulator, in the order of `ranges`. One operation's failure touches no other.
        """
        ended: dict[str, TrainResult | TinsmithError] = {}
        for part in ranges:
            batch = self._operations.get(part.operation_id)
            if batch is None:
                ended.setdefault(part.operation_id, NotFound("there is no such open operation"))
                continue
            if part.stop < len(batch.datums):
                continue
            del self._operations[part.operation_id]
            try:
                ended[part.operation_id] = self._whole(batch)
            except TinsmithError as error:
                ended[part.operation_id] = error
        return ended

    def _whole(self, batch: TrainBatch) -> TrainResult:
        if not batch.backward:
            with self.eval_mode():
                return self.forward(batch)
        with self.train_mode(batch.adapter_id, zero_grad_on_exit=False):
            return self.forward_backward(batch)

    def optimizer_steps(self, steps: Sequence[AdapterStep]) -> Sequence[StepResult | TinsmithError]:
        """The steps of different adapters, each as `optimizer_step`; one result or error per step, in order."""
        results: list[StepResult | TinsmithError] = []
        for step in steps:
            try:
                results.append(
                    self.optimizer_step(step.adapter_id, step.step.params, grad_clip_norm=step.step.grad_clip_norm)
                )
            except TinsmithError as error:
                results.append(error)
        return results

    def take_stats(self) -> PassStats:
        """What was computed since the last call, and what it cost; zeros from engines that do not measure."""
        return PassStats()
