"""The torch engine: many LoRA adapters on one frozen base model in one process on one device.

Datums of many runs go through the base together (`open_operations.py`, `training_pass.py`), each with its own adapter
and its own place for its gradient. Not responsible for sampling (`rollout.py`), order, or process layout.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from engines.base import BaseEngine
from engines.capabilities import Capabilities
from engines.lockstep import Lockstep
from engines.lora import AdapterWeights, Router
from engines.lora_targets import expected_shapes, init_adapter
from engines.ranks import Place
from engines.torch_engine.adapter import AdapterState, Gradient, state_bytes, step_many
from engines.torch_engine.adapter_pool import AdapterPool
from engines.torch_engine.assembly import Assembly, assemble
from engines.torch_engine.capabilities import CAPABILITIES
from engines.torch_engine.hardware import keep_sums, set_threads
from engines.torch_engine.loading import load_base_model, resolve_device
from engines.torch_engine.memory import (
    Checkpointing,
    activation_room,
    adapter_budget,
    estimate_memory,
    refuse_long_datum,
)
from engines.torch_engine.memory_errors import memory_errors
from engines.torch_engine.meter import Meter
from engines.torch_engine.open_operations import OpenOperations
from engines.torch_engine.operations import OpenOperation
from engines.torch_engine.precision import convert, resolve_dtype
from engines.torch_engine.saved_state import read_saved, write_saved
from engines.torch_engine.snapshots import captured, read_snapshot, write_snapshot
from engines.torch_engine.training_pass import TrainingPass
from engines.torch_engine.validation import check_batch
from schemas.base_model_info import BaseModelInfo, MemoryEstimate
from schemas.errors import AlreadyExists, EngineFailure, TinsmithError, Unavailable
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

T = TypeVar("T")


class TorchEngine(BaseEngine):
    """Training on plain torch; used by one thread at a time.

    Args:
        model_folder: local Hugging Face folder (config, safetensors, tokenizer).
        dtype: of the base weights: `auto` (bfloat16 where the hardware has units for it), `float32`, `bfloat16`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        threads: CPU threads of torch in this process; None = torch's own choice.
        model: an already built model, used instead of the folder's weights.
        name: the public name of the base model, written into exports; None = the folder's name.
        batch_invariant: numbers may not depend on company (kept in float32 on the CPU).
        micro_batch_tokens: tokens of a pass; None = what suits the device.
        gradient_checkpointing: compute activations twice instead of keeping them; auto = where they would not fit.
        adapter_memory: bytes for live adapters, above which idle ones go to `idle_folder`; None = no limit.
        place: this process among the ranks of the model.
    """

    capabilities: ClassVar[Capabilities] = CAPABILITIES

    def __init__(
        self,
        model_folder: Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        model: nn.Module | None = None,
        name: str | None = None,
        batch_invariant: bool = True,
        micro_batch_tokens: int | None = None,
        gradient_checkpointing: Checkpointing = "auto",
        adapter_memory: int | None = None,
        idle_folder: Path | None = None,
        place: Place | None = None,
    ) -> None:
        super().__init__()
        self._folder = model_folder
        self._dtype, self._device = dtype, device
        self._threads = threads
        self._given = model
        self._name = name or model_folder.name
        self._batch_invariant = batch_invariant
        self._micro_batch_tokens = micro_batch_tokens
        self._checkpointing = gradient_checkpointing
        self._adapter_memory = adapter_memory
        self._idle_folder = idle_folder
        self._place = place or Place()
        self._room: int | None = None
        self._pool = AdapterPool(adapter_memory, None)
        self._open: str | None = None
        self._model: Any = None
        self._assembly: Assembly | None = None
        self._turns: OpenOperations | None = None
        self._info: BaseModelInfo | None = None

    @classmethod
    def check(cls) -> None:
        """torch and transformers are installed."""
        for package in ("torch", "transformers", "safetensors"):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"engine 'torch' needs the Python package {package!r}: pip install {package}")

    def load(self) -> BaseModelInfo:
        """Load, freeze and wrap the base model; raises `Unavailable` (or `InvalidRequest` for dtype and device)."""
        self.capabilities.check_ranks(self._place.ranks)
        self.capabilities.check_device(self._device)
        keep_sums()
        set_threads(self._threads)
        device = resolve_device(self._device)
        dtype = resolve_dtype(self._dtype, device)
        with memory_errors("loading the base model"):
            self._model = self._read_model(dtype, device)
            self._assembly = self._assemble()
            memory = self._measure_memory(self._assembly.router)
        tokens = self._micro_batch_tokens or self._assembly.info.micro_batch_tokens
        self._info = replace(self._assembly.info, micro_batch_tokens=tokens, memory=memory)
        budget = adapter_budget(memory, self._adapter_memory)
        self._room = activation_room(memory, budget)
        self._pool = AdapterPool(budget, self._idle_folder)
        self._turns = self._make_turns(self._assembly.run)
        return self._info

    def _read_model(self, dtype: torch.dtype, device: torch.device) -> Any:
        """The base model in this precision, on the device."""
        if self._given is not None:
            return convert(self._given, dtype).to(device)
        return load_base_model(self._folder, dtype, device)

    def _assemble(self) -> Assembly:
        return assemble(self._model, batch_invariant=self._batch_invariant)

    def _measure_memory(self, router: Router) -> MemoryEstimate:
        return estimate_memory(self._model, router)

    def _make_turns(self, run: TrainingPass) -> OpenOperations:
        info = self.info
        return OpenOperations(run, info.micro_batch_tokens, self._checkpointing, info.memory, self._room)

    @property
    def lockstep(self) -> Lockstep | None:
        """With whom samplers on this copy of the model have to keep step; None = with nobody."""
        return None

    @property
    def model(self) -> Any:
        """The Hugging Face model with the router attached; its base weights never change."""
        return _loaded(self._model)

    @property
    def router(self) -> Router:
        """Chooses adapters per pass; shared with whoever samples from this copy of the model."""
        return _loaded(self._assembly).router

    @property
    def info(self) -> BaseModelInfo:
        """What `load` returned."""
        return _loaded(self._info)

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer's files are."""
        return self._folder

    # -- adapters ------------------------------------------------------------------------------------------------
    def create_adapter(self, adapter_id: str, lora: LoraSpec, optimizer: OptimizerType = "adamw") -> int:
        """Raises `AlreadyExists`, `InvalidRequest` if a wanted family has no linear layer, `OutOfMemory`."""
        if adapter_id in self._pool:
            raise AlreadyExists("an adapter of that id exists")
        self.capabilities.check_optimizer(optimizer)
        parameters = sum(math.prod(a) + math.prod(b) for a, b in expected_shapes(self.model, lora).values())
        self._pool.make_room(state_bytes(parameters, optimizer))
        with memory_errors("creating the adapter"):
            state = AdapterState.of(lora, init_adapter(self.model, lora), optimizer)
        self._pool.add(adapter_id, state)
        return parameters

    def remove_adapter(self, adapter_id: str) -> None:
        """Free weights, moments and gradient; its open operations are dropped."""
        if self._open == adapter_id:
            raise EngineFailure("the adapter is in training; it cannot be removed now")
        for operation_id in self._operations_of(adapter_id):
            self.drop_operation(operation_id)
        self._pool.remove(adapter_id)

    def adapter_weights(self, adapter_id: str) -> AdapterWeights:
        """The live weights (read only). Raises `NotFound`."""
        return self._pool.get(adapter_id).weights

    def save_adapter(self, adapter_id: str, folder: Path, *, with_optimizer: bool) -> SavedAdapter:
        """As `peft_format.write_adapter`."""
        state = self._pool.get(adapter_id)
        with memory_errors("saving the adapter"):
            return write_saved(self.model, self._name, state, folder, with_optimizer=with_optimizer)

    def load_adapter(
        self,
        adapter_id: str,
        folder: Path,
        *,
        with_optimizer: bool,
        create: bool,
        optimizer: OptimizerType | None = None,
    ) -> SavedAdapter:
        """Verify, build the whole state, then put it in place. Raises `InvalidRequest` if the folder does not fit."""
        if self._open == adapter_id or self._operations_of(adapter_id):
            raise EngineFailure("the adapter is in training; it cannot be loaded now")
        if create and adapter_id in self._pool:
            raise AlreadyExists("an adapter of that id exists")
        live = None if create else self._pool.get(adapter_id)
        with memory_errors("loading the adapter"):
            state, saved = read_saved(
                self.model,
                folder,
                with_optimizer=with_optimizer,
                live=live,
                optimizer=optimizer,
                check_optimizer=self.capabilities.check_optimizer,
            )
        (self._pool.add if live is None else self._pool.replace)(adapter_id, state)
        return saved

    def snapshot_adapter(self, adapter_id: str, path: Path) -> Callable[[], SavedSnapshot]:
        """See `BaseEngine.snapshot_adapter`."""
        if self._operations_of(adapter_id):
            raise EngineFailure("the adapter is in training; no snapshot can be taken now")
        state = self._pool.get(adapter_id)
        with memory_errors("taking a snapshot of the adapter"):
            copy = captured(state)
        return lambda: write_snapshot(path, copy)

    def restore_adapter(self, adapter_id: str, path: Path, sha256: str) -> None:
        """See `BaseEngine.restore_adapter`."""
        if adapter_id in self._pool:
            raise AlreadyExists("an adapter of that id exists")
        with memory_errors("restoring the adapter"):
            state = read_snapshot(path, sha256, self.model.device)
        self._pool.add(adapter_id, state)

    # -- one adapter at a time -----------------------------------------------------------------------------------
    def _open_stage(self, adapter_id: str) -> None:
        state = self._pool.get(adapter_id)
        if self._open is not None:
            raise EngineFailure("another adapter is in training; contexts do not nest")
        state.stage = Gradient()
        self._open = adapter_id
        self._pool.pin(adapter_id)

    def _close_stage(self, adapter_id: str, *, keep: bool) -> None:
        state = self._pool.get(adapter_id)
        stage, state.stage, self._open = state.stage, None, None
        self._pool.unpin(adapter_id)
        if keep and stage is not None:
            state.gradient.merge(stage)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """No autograd graph is built inside."""
        with torch.no_grad():
            yield

    def forward(self, batch: TrainBatch) -> TrainResult:
        """Raises `NotFound`, `InvalidRequest`, `OutOfMemory`."""
        return self._compute_whole(replace(batch, backward=False))[0]

    def forward_backward(self, batch: TrainBatch) -> TrainResult:
        """Raises `NotFound`, `InvalidRequest`, `OutOfMemory`, and `EngineFailure` outside `train_mode`."""
        if self._pool.get(batch.adapter_id).stage is None:
            raise EngineFailure("forward_backward outside of train_mode of this adapter")
        result, operation = self._compute_whole(replace(batch, backward=True))
        _loaded(self._turns).commit(operation)
        return result

    def _compute_whole(self, batch: TrainBatch) -> tuple[TrainResult, OpenOperation]:
        operation = self._begin(batch)
        self._pool.pin(batch.adapter_id)
        try:
            with torch.enable_grad(), self._meter.running():
                return _loaded(self._turns).whole(operation), operation
        finally:
            self._pool.unpin(batch.adapter_id)

    def optimizer_step(
        self, adapter_id: str, params: StepParams | None = None, *, grad_clip_norm: float = 0.0
    ) -> StepResult:
        """Raises `NotFound`, `InvalidRequest` (nothing changed), `NonFiniteGradient` (gradient cleared)."""
        state = self._pool.get(adapter_id)
        with memory_errors("the optimizer step"):
            return StepResult(state.step(params, grad_clip_norm))

    def optimizer_zero_grad(self, adapter_id: str) -> None:
        """The open stage, if any, is cleared too. Raises `NotFound`."""
        self._pool.get(adapter_id).clear()

    # -- many adapters in one turn ---------------------------------------------------------------------------------
    def open_operation(self, operation_id: str, batch: TrainBatch) -> None:
        """Raises `NotFound`, `InvalidRequest`, `OutOfMemory`."""
        _loaded(self._turns).open(operation_id, self._begin(batch))
        self._pool.pin(batch.adapter_id)

    def drop_operation(self, operation_id: str) -> None:
        """See `BaseEngine.drop_operation`."""
        operation = _loaded(self._turns).drop(operation_id)
        if operation is not None:
            self._pool.unpin(operation.batch.adapter_id)

    def compute(self, ranges: Sequence[DatumRange]) -> Mapping[str, TrainResult | TinsmithError]:
        """See `BaseEngine.compute`: datums share passes of up to `info.micro_batch_tokens` tokens."""
        with torch.enable_grad(), self._meter.running():
            ended = _loaded(self._turns).compute(ranges)
        for operation_id in ended:
            self.drop_operation(operation_id)
        return ended

    def optimizer_steps(self, steps: Sequence[AdapterStep]) -> Sequence[StepResult | TinsmithError]:
        """See `BaseEngine.optimizer_steps`; those with equal hyperparameters run in one kernel."""
        began = time.perf_counter()
        outcomes: dict[str, dict[str, float] | TinsmithError] = {}
        by_adapter = {step.adapter_id: step.step for step in steps}
        for states in self._pool.in_turns(list(by_adapter)):
            ready = {name: state for name, state in states.items() if not isinstance(state, TinsmithError)}
            outcomes |= {name: state for name, state in states.items() if isinstance(state, TinsmithError)}
            taken = step_many(
                [(state, by_adapter[n].params, by_adapter[n].grad_clip_norm) for n, state in ready.items()]
            )
            outcomes |= dict(zip(ready, taken, strict=True))
        self._meter.add("optimizer", time.perf_counter() - began)
        return [_step_result(outcomes[step.adapter_id]) for step in steps]

    def take_stats(self) -> PassStats:
        """See `BaseEngine.take_stats`."""
        return self._meter.take()

    # -- parts -----------------------------------------------------------------------------------------------------
    def _begin(self, batch: TrainBatch) -> OpenOperation:
        """A checked operation. Raises `NotFound`, `InvalidRequest`, `OutOfMemory`."""
        state = self._pool.get(batch.adapter_id)
        config = check_batch(batch, self.info)
        if batch.backward:
            for index, datum in enumerate(batch.datums):
                refuse_long_datum(self.info.memory, index, len(datum.tokens), self._room, self._checkpointing)
        return OpenOperation.of(batch, state, config)

    def _operations_of(self, adapter_id: str) -> list[str]:
        return [] if self._turns is None else self._turns.of_adapter(adapter_id)

    @property
    def _meter(self) -> Meter:
        return _loaded(self._assembly).run.meter


def _step_result(outcome: dict[str, float] | TinsmithError) -> StepResult | TinsmithError:
    return outcome if isinstance(outcome, TinsmithError) else StepResult(outcome)


def _loaded(value: T | None) -> T:
    if value is None:
        raise EngineFailure("the base model is not loaded")
    return value
