"""The training worker: one rank's engine behind the atomic training step.

Responsible for which engine contexts surround a computation. Not responsible for the computation (`engines/`), nor for
the split primitives, which only `workers/tinker.py` adds.
"""

from __future__ import annotations

from pathlib import Path

from engines.base import BaseEngine
from schemas.errors import TinsmithError
from schemas.fail_points import fail_point
from schemas.operations import (
    LoraSpec,
    OptimizerType,
    SavedAdapter,
    SavedSnapshot,
    StepParams,
    StepResult,
    TrainBatch,
    TrainResult,
)
from workers.dispatch import Dispatch, register
from workers.snapshot_writer import SnapshotWriter


class TrainingWorker:
    """Trains and scores adapters in whole steps: no gradient outlives a call.

    Every method raises what the engine raises (`schemas.errors.TinsmithError`) and then leaves the adapter as the
    engine's contract says: weights and moments as before the call.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self.engine = engine
        self._snapshots = SnapshotWriter()

    @register(Dispatch.ONE_TO_ALL)
    def create_adapter(self, adapter_id: str, lora: LoraSpec, optimizer: OptimizerType = "adamw") -> int:
        """Make a fresh adapter; returns its number of trainable parameters."""
        parameters = self.engine.create_adapter(adapter_id, lora, optimizer)
        fail_point("adapter.created")
        return parameters

    @register(Dispatch.ONE_TO_ALL)
    def remove_adapter(self, adapter_id: str) -> None:
        """Free everything of an adapter; unknown ids are fine."""
        self.engine.remove_adapter(adapter_id)
        fail_point("adapter.removed")

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, adapter_id: str, folder: str, with_optimizer: bool) -> SavedAdapter:
        """Write the adapter as a new, complete folder."""
        fail_point("save.begun")
        saved = self.engine.save_adapter(adapter_id, Path(folder), with_optimizer=with_optimizer)
        fail_point("save.written")
        return saved

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self,
        adapter_id: str,
        folder: str,
        with_optimizer: bool,
        create: bool,
        optimizer: OptimizerType | None = None,
    ) -> SavedAdapter:
        """Load a folder into a new adapter (`create`, with this optimizer) or into the live one."""
        loaded = self.engine.load_adapter(
            adapter_id, Path(folder), with_optimizer=with_optimizer, create=create, optimizer=optimizer
        )
        fail_point("load.done")
        return loaded

    @register(Dispatch.ONE_TO_ALL)
    def begin_snapshot(self, adapter_id: str, path: str) -> None:
        """Copy the whole state of an adapter now and write it at `path` beside later calls (`finished_snapshots`)."""
        self._snapshots.write(path, self.engine.snapshot_adapter(adapter_id, Path(path)))

    @register(Dispatch.ONE_TO_ALL)
    def finished_snapshots(self) -> dict[str, SavedSnapshot | TinsmithError]:
        """What has been written since the last call, by path, or why not."""
        return self._snapshots.take_finished()

    @register(Dispatch.ONE_TO_ALL)
    def restore_snapshot(self, adapter_id: str, path: str, sha256: str) -> None:
        """A new adapter from a snapshot. Raises `ModelLost` if the file is missing or damaged."""
        self.engine.restore_adapter(adapter_id, Path(path), sha256)

    @register(Dispatch.ONE_TO_ALL)
    def infer_batch(self, batch: TrainBatch) -> TrainResult:
        """Logprobs and metrics of a batch; touches no gradient."""
        with self.engine.eval_mode():
            return self.engine.forward(batch)

    @register(Dispatch.ONE_TO_ALL)
    def train_batch(
        self, batch: TrainBatch, optim_step_params: StepParams | None = None, grad_clip_norm: float = 0.0
    ) -> tuple[TrainResult, StepResult]:
        """The atomic step: zero, forward, backward, step, in one `train_mode`; gradients are clear afterwards.

        They are also clear when an exception leaves, whatever was accumulated before the call.
        """
        adapter_id = batch.adapter_id
        with self.engine.train_mode(adapter_id, zero_grad_on_exit=True):
            self.engine.optimizer_zero_grad(adapter_id)
            trained = self.engine.forward_backward(batch)
            stepped = self.engine.optimizer_step(adapter_id, optim_step_params, grad_clip_norm=grad_clip_norm)
        return trained, stepped
