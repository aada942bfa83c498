"""The torch engine: many LoRA adapters on one frozen base model in one process on one device.

One datum at a time goes through the base, without padding: its numbers depend on nothing but itself. Not responsible
for sampling (`rollout.py`), the order of operations, or process layout.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from engines.base import BaseEngine
from engines.custom_loss import CustomLoss
from engines.lora import AdapterWeights, Router, attach, check_fits, init_adapter, linear_families, resolve_targets
from engines.loss_term import LossTerm
from engines.losses import datum_metrics, merge_metrics, resolve_loss
from engines.peft_format import read_adapter, write_adapter
from engines.torch_engine.adapter import AdapterState, Gradient
from engines.torch_engine.head import OutputHead
from engines.torch_engine.loading import (
    check_head,
    describe,
    freeze,
    load_base_model,
    resolve_device,
    resolve_dtype,
)
from engines.torch_engine.validation import check_batch
from schemas.errors import AlreadyExists, EngineFailure, InvalidRequest, NotFound, OutOfMemory, Unavailable
from schemas.losses import INTEGER_INPUTS
from schemas.operations import (
    BaseModelInfo,
    Datum,
    LoraSpec,
    OptimizerType,
    SavedAdapter,
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
        dtype: of the base weights: `auto` (bfloat16 on CUDA, float32 on the CPU), `float32`, `bfloat16`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        threads: CPU threads of torch in this process; None = torch's own choice.
        model: an already built model, used instead of the folder's weights.
        name: the public name of the base model, written into exports; None = the folder's name.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        model: nn.Module | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._folder = model_folder
        self._dtype, self._device = dtype, device
        self._threads = threads
        self._given = model
        self._name = name or model_folder.name
        self._adapters: dict[str, AdapterState] = {}
        self._open: str | None = None
        self._model: Any = None
        self._router: Router | None = None
        self._head: OutputHead | None = None
        self._info: BaseModelInfo | None = None

    @classmethod
    def check(cls) -> None:
        """torch and transformers are installed."""
        for package in ("torch", "transformers", "safetensors"):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"engine 'torch' needs the Python package {package!r}: pip install {package}")

    def load(self) -> BaseModelInfo:
        """Load, freeze and wrap the base model; raises `Unavailable` (or `InvalidRequest` for dtype and device)."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        device = resolve_device(self._device)
        with _memory_errors("loading the base model"):
            if self._given is not None:
                self._model = self._given.to(device)
            else:
                self._model = load_base_model(self._folder, resolve_dtype(self._dtype, device), device)
            freeze(self._model)
            self._router = attach(self._model)
            self._head = OutputHead.of(self._model)
            check_head(self._model, self._head)
        self._info = describe(self._model, self._head)
        return self._info

    @property
    def model(self) -> Any:
        """The Hugging Face model with the router attached; its base weights never change."""
        return _loaded(self._model)

    @property
    def router(self) -> Router:
        """Chooses adapters per pass; shared with whoever samples from this copy of the model."""
        return _loaded(self._router)

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
        """Raises `AlreadyExists`, or `InvalidRequest` if a wanted family has no linear layer."""
        if adapter_id in self._adapters:
            raise AlreadyExists("an adapter of that id exists")
        with _memory_errors("creating the adapter"):
            state = AdapterState.of(lora, init_adapter(self.model, lora), optimizer)
        self._adapters[adapter_id] = state
        return sum(tensor.numel() for tensor in state.weights.tensors)

    def remove_adapter(self, adapter_id: str) -> None:
        """Free weights, moments and gradient."""
        if self._open == adapter_id:
            raise EngineFailure("the adapter is in training; it cannot be removed now")
        self._adapters.pop(adapter_id, None)

    def adapter_weights(self, adapter_id: str) -> AdapterWeights:
        """The live weights (leaf tensors of the optimizer: read only). Raises `NotFound`."""
        return self._state(adapter_id).weights

    def save_adapter(self, adapter_id: str, folder: Path, *, with_optimizer: bool) -> SavedAdapter:
        """As `peft_format.write_adapter`."""
        state = self._state(adapter_id)
        with _memory_errors("saving the adapter"):
            size = write_adapter(
                folder,
                spec=state.spec,
                weights=state.weights,
                base_model=self._name,
                all_linears=linear_families(self.model),
                optimizer=state.memory() if with_optimizer else None,
            )
        return SavedAdapter(size, state.spec)

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
        if self._open == adapter_id:
            raise EngineFailure("the adapter is in training; it cannot be loaded now")
        if create and adapter_id in self._adapters:
            raise AlreadyExists("an adapter of that id exists")
        live = None if create else self._state(adapter_id)
        with _memory_errors("loading the adapter"):
            saved = read_adapter(folder, with_optimizer=with_optimizer)
            geometry = saved.spec if live is None else live.spec
            check_fits(self.model, geometry, saved.weights)
            saved = saved.ordered(resolve_targets(self.model, geometry))
            pairs = {
                name: (down.to(device := self.model.get_submodule(name).weight.device), up.to(device))
                for name, (down, up) in saved.weights.pairs.items()
            }
            if live is not None:
                optimizer = live.optimizer_type
            elif optimizer is None:
                optimizer = "adamw" if saved.optimizer is None else saved.optimizer.type
            weights = AdapterWeights(pairs, saved.weights.scaling)
            state = AdapterState.of(saved.spec, weights, optimizer, saved.optimizer)
        self._adapters[adapter_id] = state
        return SavedAdapter(saved.size_bytes, saved.spec)

    # -- training ------------------------------------------------------------------------------------------------
    def _open_stage(self, adapter_id: str) -> None:
        state = self._state(adapter_id)
        if self._open is not None:
            raise EngineFailure("another adapter is in training; contexts do not nest")
        state.stage = Gradient()
        self._open = adapter_id

    def _close_stage(self, adapter_id: str, *, keep: bool) -> None:
        state = self._state(adapter_id)
        stage, state.stage, self._open = state.stage, None, None
        if keep and stage is not None:
            state.gradient.merge(stage)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """No autograd graph is built inside."""
        with torch.no_grad():
            yield

    def forward(self, batch: TrainBatch) -> TrainResult:
        """Raises `NotFound`, `InvalidRequest`, `OutOfMemory`."""
        with self.eval_mode():
            return self._run(batch, None)

    def forward_backward(self, batch: TrainBatch) -> TrainResult:
        """Raises `NotFound`, `InvalidRequest`, `OutOfMemory`, and `EngineFailure` outside `train_mode`."""
        state = self._state(batch.adapter_id)
        if state.stage is None:
            raise EngineFailure("forward_backward outside of train_mode of this adapter")
        collected = Gradient()
        result = self._run(batch, collected)
        # One pass as a whole: how many datums it had is told apart only to name the one that was not finite.
        poisoned = None if collected.poisoned is None else (0, collected.poisoned[0])
        state.stage.add(collected.tensors or [], 1, poisoned)
        return result

    def optimizer_step(
        self, adapter_id: str, params: StepParams | None = None, *, grad_clip_norm: float = 0.0
    ) -> StepResult:
        """Raises `NotFound`, `InvalidRequest` (nothing changed), `NonFiniteGradient` (gradient cleared)."""
        state = self._state(adapter_id)
        with _memory_errors("the optimizer step"):
            return StepResult(state.step(params, grad_clip_norm))

    def optimizer_zero_grad(self, adapter_id: str) -> None:
        """The open stage, if any, is cleared too. Raises `NotFound`."""
        self._state(adapter_id).clear()

    # -- one batch -----------------------------------------------------------------------------------------------
    def _run(self, batch: TrainBatch, collected: Gradient | None) -> TrainResult:
        """All datums, one after the other; gradients into `collected`, one entry of its count per datum."""
        state = self._state(batch.adapter_id)
        config = check_batch(batch, self.info)
        function = _loss_function(batch)
        logprobs: list[np.ndarray[Any, np.dtype[np.float32]]] = []
        metrics: list[Mapping[str, float]] = []
        with _memory_errors(f"a batch of {len(batch.datums)} datums"):
            for index, datum in enumerate(batch.datums):
                inputs = self._tensors(datum, keep_dtypes=batch.loss_graph is not None)
                with self.router.use([(state.weights, slice(0, 1))]):
                    lp, term = self._datum(datum, inputs, function, config)
                    if not bool(torch.isfinite(lp).all()):
                        raise _diverged(index)
                    if collected is not None:
                        grads = _gradient(term.loss, state.weights.tensors)
                        collected.add(grads, 1, None if _finite(grads) else (0, 0))
                logprobs.append(lp.detach().cpu().numpy())
                metrics.append(datum_metrics(term, lp, inputs if batch.loss_graph is None else {}))
        return TrainResult(tuple(logprobs), merge_metrics(metrics))

    def _datum(
        self, datum: Datum, inputs: Mapping[str, Tensor], function: Callable[..., LossTerm], config: Mapping[str, float]
    ) -> tuple[Tensor, LossTerm]:
        ids = torch.tensor(datum.tokens, dtype=torch.int64, device=inputs["target_tokens"].device).unsqueeze(0)
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        lp = _loaded(self._head).target_logprobs(hidden, inputs["target_tokens"])
        return lp, function(lp, inputs, config)

    def _tensors(self, datum: Datum, *, keep_dtypes: bool) -> dict[str, Tensor]:
        """The inputs on the device; ids are int64, the rest float32 unless it keeps its dtype (a custom loss's)."""
        device = self.model.get_input_embeddings().weight.device
        kinds = {
            name: torch.int64 if name in INTEGER_INPUTS or (keep_dtypes and values.dtype == np.int64) else torch.float32
            for name, values in datum.inputs.items()
        }
        return {name: torch.tensor(datum.inputs[name], dtype=kind, device=device) for name, kind in kinds.items()}

    def _state(self, adapter_id: str) -> AdapterState:
        state = self._adapters.get(adapter_id)
        if state is None:
            raise NotFound("there is no such adapter")
        return state


def _loss_function(batch: TrainBatch) -> Callable[..., LossTerm]:
    if batch.loss_graph is not None:
        return CustomLoss.from_text(batch.loss_graph)
    return resolve_loss(batch.loss_fn, batch.loss_config)[0]


def _gradient(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """d loss / d tensors, zeros where a tensor was not used (an expert that no token chose)."""
    grads = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(t, requires_grad=False) if g is None else g for t, g in zip(tensors, grads, strict=True)]


def _diverged(index: int) -> InvalidRequest:
    return InvalidRequest(
        f"the logprobs of data[{index}] are not finite: the weights of this adapter have grown too large",
        hint="load an earlier checkpoint and use a smaller learning rate",
        code="diverged",
    )


def _finite(tensors: list[Tensor]) -> bool:
    return bool(torch.stack(list(torch._foreach_norm(tensors))).isfinite().all())


def _loaded(value: T | None) -> T:
    if value is None:
        raise EngineFailure("the base model is not loaded")
    return value


@contextmanager
def _memory_errors(what: str) -> Iterator[None]:
    """Turn the ways in which memory runs out into `OutOfMemory`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _out_of_memory(error):
            raise
        raise OutOfMemory(
            f"{what} does not fit in the memory of the device", hint="send fewer or shorter datums at a time"
        ) from None


def _out_of_memory(error: RuntimeError) -> bool:
    """CUDA has a class of its own; the CPU allocator raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
