"""The training state of one adapter: float32 weights, moments, accumulated gradient, open stage, each one vector.

Everything here is all-or-nothing: whatever raises leaves weights, moments and gradient as they were. Not responsible
for computing gradients, nor for which adapters are in memory (`adapter_pool.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from engines.dimuon import dimuon_step
from engines.lora import AdapterWeights, Pairs, flatten, views
from engines.optim import ParamGroup
from engines.peft_format import SLOTS, OptimizerState
from engines.torch_engine.memory_errors import is_out_of_memory
from engines.torch_engine.step_settings import step_settings
from engines.torch_engine.stepping import AdamwVectors, Scratch, adamw_steps, norm
from schemas.errors import EngineFailure, InvalidRequest, ModelLost, NonFiniteGradient, OutOfMemory, TinsmithError
from schemas.operations import LoraSpec, OptimizerType, StepParams

log = logging.getLogger(__name__)

_GREATEST_NORM = 1e18
"""Beyond it the squares that AdamW keeps overflow float32, and the adapter would never move again."""
_FAR = 1e38
"""What stays below it, rounding included, is finite in float32."""

Poison = tuple[int, int | None]
"""(ordinal of the pass, datum or None = not known which) of the first gradient that was not finite."""


@dataclass(eq=False, slots=True)
class Gradient:
    """Gradients of several passes, added up in one float32 vector [P]; `flat` None = none yet."""

    flat: Tensor | None = None
    passes: int = 0
    poisoned: Poison | None = None

    def add(self, flat: Tensor, passes: int, poisoned: Poison | None) -> None:
        """Add the gradient of `passes` passes; takes over the vector. `poisoned` counts from the first of them."""
        if self.flat is None:
            self.flat = flat
        else:
            self.flat.add_(flat)
        if self.poisoned is None and poisoned is not None:
            self.poisoned = (self.passes + poisoned[0], poisoned[1])
        self.passes += passes

    def merge(self, other: Gradient) -> None:
        """Add another one; takes over its vector."""
        if other.flat is not None:
            self.add(other.flat, other.passes, other.poisoned)


@dataclass(eq=False, slots=True)
class AdapterState:
    """One adapter in training; nothing but its steps changes `flat` and `moments`.

    `flat` float32 [P] are the weights, `weights.pairs` views of it; `moments` has one vector [P] per slot of the
    optimizer (`peft_format.SLOTS`), zero before the first step; `steps` is how many were taken. `stage` is not None
    inside `train_mode`: gradients collected there, not yet kept. `out_of_use` says why the state must not be used any
    more (it left memory, or a step broke off halfway).
    """

    spec: LoraSpec
    flat: Tensor
    weights: AdapterWeights
    optimizer_type: OptimizerType
    moments: dict[str, Tensor]
    steps: int = 0
    gradient: Gradient = field(default_factory=Gradient)
    stage: Gradient | None = None
    out_of_use: str | None = None
    _bounds: tuple[float, float] | None = None
    """No weight and no first moment is larger than these in size; None = not looked at yet."""

    @classmethod
    def of(
        cls,
        spec: LoraSpec,
        weights: AdapterWeights,
        optimizer_type: OptimizerType = "adamw",
        memory: OptimizerState | None = None,
    ) -> AdapterState:
        """Training state of a copy of these weights (all on one device), with fresh or given moments.

        Raises `InvalidRequest` if the memory is of another optimizer.
        """
        if memory is not None and memory.type != optimizer_type:
            raise InvalidRequest(
                f"the checkpoint has the state of {memory.type}, the model is trained by {optimizer_type}",
                field="optimizer",
                hint="load it with optimizer=false",
            )
        flat, pairs = flatten(weights.pairs)
        if memory is None:
            moments = {slot: torch.zeros_like(flat) for slot in SLOTS[optimizer_type]}
        else:
            moments = {slot: _joined(kept, flat.device) for slot, kept in memory.slots.items()}
        steps = 0 if memory is None else memory.step
        return cls(spec, flat, AdapterWeights(pairs, weights.scaling), optimizer_type, moments, steps)

    @property
    def parameters(self) -> int:
        """P, the number of trainable parameters."""
        return self.flat.numel()

    @property
    def size_bytes(self) -> int:
        """As `state_bytes`."""
        return state_bytes(self.parameters, self.optimizer_type)

    def blank(self) -> tuple[Tensor, Pairs]:
        """A zero vector [P] on the adapter's device and its views per module: where an operation collects."""
        flat = torch.zeros_like(self.flat)
        return flat, views(flat, self.weights.pairs)

    def memory(self) -> OptimizerState:
        """What the optimizer remembers, as views of the moments; zeros before the first step."""
        slots = {
            slot: [tensor for pair in views(flat, self.weights.pairs).values() for tensor in pair]
            for slot, flat in self.moments.items()
        }
        return OptimizerState(self.optimizer_type, self.steps, slots)

    def clear(self) -> None:
        """Drop the accumulated gradient, the open stage's included (the stage stays open)."""
        self.gradient = Gradient()
        if self.stage is not None:
            self.stage = Gradient()

    def step(self, params: StepParams | None, grad_clip_norm: float) -> dict[str, float]:
        """One optimizer step on the accumulated gradient (zero if there is none), then clear it.

        Returns `grad_norm` (global 2-norm before clipping), `learning_rate`, `update_norm`. Raises
        `NonFiniteGradient` (the gradient is cleared), `InvalidRequest` or `OutOfMemory` (nothing is changed).
        """
        (outcome,) = step_many([(self, params, grad_clip_norm)])
        if isinstance(outcome, TinsmithError):
            raise outcome
        return outcome

    def check_usable(self) -> None:
        """Raise `ModelLost` if the state was retired."""
        if self.out_of_use is not None:
            raise ModelLost(self.out_of_use, hint="resume from a checkpoint")

    def retire(self, reason: str) -> None:
        """Free the memory, even if somebody still holds the state; whoever steps it from now on is told the reason."""
        self.out_of_use = reason
        nothing = self.flat.new_empty(0)
        self.flat, self.weights, self.moments = nothing, AdapterWeights({}, self.weights.scaling), {}
        self.clear()

    def bounds(self) -> tuple[float, float]:
        """No weight, and no first moment, is larger in size than these.

        Infinite where nothing can be promised: a second moment that is negative or nearly infinite (no step makes one,
        a checkpoint might hold one).
        """
        if self._bounds is None:
            largest = math.inf
            lowest, highest = torch.aminmax(self.moments["exp_avg_sq"])
            if float(lowest) >= 0 and float(highest) < _FAR:
                largest = _largest(self.moments["exp_avg"])
            self._bounds = (_largest(self.flat), largest)
        return self._bounds

    def moved(self, update_norm: float, gradient_norm: float) -> None:
        """Note an AdamW step that was taken: how far, and by what (clipped) gradient."""
        self.steps += 1
        if self._bounds is not None:
            # A single element moves no further than all together; a moment is a mean of gradients.
            weight, moment = self._bounds
            self._bounds = (weight + 1.001 * update_norm, max(moment, 1.001 * gradient_norm))
        self.clear()


Step = tuple[AdapterState, StepParams | None, float]
"""Adapter, overrides (None = the defaults), `grad_clip_norm` (0 = off)."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A step that may be taken: checked hyperparameters, the gradient [P] and the factor that clips it."""

    place: int
    state: AdapterState
    settings: ParamGroup
    gradient: Tensor
    norm: float
    factor: float

    @property
    def key(self) -> tuple[Any, ...]:
        """Steps of one key can share a call; Dimuon's go alone."""
        alone = self.place if self.state.optimizer_type == "dimuon" or not self.surely_finite() else -1
        return (alone, str(self.state.flat.device), *self.settings.values())

    def vectors(self) -> AdamwVectors:
        """What an AdamW step works on."""
        kept = self.state.moments
        return AdamwVectors(
            self.state.flat, self.gradient, kept["exp_avg"], kept["exp_avg_sq"], self.state.steps, self.factor
        )

    def surely_finite(self) -> bool:
        """Whether this AdamW step cannot leave float32, known beforehand, so that nothing has to be put back."""
        if self.state.optimizer_type != "adamw":
            return False
        rate, decay, eps = (float(self.settings[name]) for name in ("lr", "weight_decay", "eps"))
        weight, moment = self.state.bounds()
        # |update| = lr / (1 - beta1^t) |m| / (sqrt(v) + eps), and the numerator is computed first.
        update = rate / (1 - self.settings["betas"][0]) * max(moment, 1.001 * self.norm * self.factor) * max(1, 1 / eps)
        return bool(weight * (1 + rate * decay) + update < _FAR)


@torch.no_grad()
def step_many(steps: Sequence[Step]) -> list[dict[str, float] | TinsmithError]:
    """One optimizer step of each adapter (each at most once), as `AdapterState.step`; errors touch no other adapter.

    AdamW steps with equal hyperparameters run in one fused call over all their vectors; an adapter's bits are the same
    as if it stepped alone.
    """
    if len({id(state) for state, _, _ in steps}) != len(steps):
        raise EngineFailure("an adapter cannot take two steps at once")
    outcomes: list[dict[str, float] | TinsmithError] = [EngineFailure("the step was not taken")] * len(steps)
    prepared: list[_Prepared] = []
    for place, (state, params, clip) in enumerate(steps):
        try:
            prepared.append(_prepare(place, state, params, clip))
        except TinsmithError as error:
            outcomes[place] = error
        except (MemoryError, RuntimeError) as error:
            outcomes[place] = _no_memory(error)
    for _, group in groupby(sorted(prepared, key=lambda step: step.key), lambda step: step.key):
        items = list(group)
        for item, outcome in zip(items, _take(items), strict=True):
            outcomes[item.place] = outcome
    return outcomes


def state_bytes(parameters: int, optimizer_type: OptimizerType) -> int:
    """Bytes of an adapter in memory: weights, moments and one gradient, float32 (whether or not there is one now)."""
    return 4 * parameters * (2 + len(SLOTS[optimizer_type]))


# -- whether a step may be taken --------------------------------------------------------------------------------------
def _prepare(place: int, state: AdapterState, params: StepParams | None, clip: float) -> _Prepared:
    """Check everything that can be checked beforehand. Raises as `AdapterState.step`."""
    state.check_usable()
    settings = step_settings(state.optimizer_type, state.spec.rank, params, clip)
    gradient = _gradient_to_apply(state)
    length = norm(gradient)
    # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6 as well.
    factor = min(1.0, clip / (length + 1e-6)) if clip > 0 else 1.0
    _check_norm(state, length, factor)
    return _Prepared(place, state, settings, gradient, length, factor)


def _gradient_to_apply(state: AdapterState) -> Tensor:
    """The accumulated gradient plus the open stage; changes neither."""
    kept, staged = state.gradient.flat, None if state.stage is None else state.stage.flat
    if kept is not None and staged is not None:
        return kept + staged
    if kept is not None:
        return kept
    return torch.zeros_like(state.flat) if staged is None else staged


def _check_norm(state: AdapterState, length: float, factor: float) -> None:
    """Raise `NonFiniteGradient`, with the gradient cleared, if it is not finite or too large."""
    if math.isfinite(length) and length * factor < _GREATEST_NORM:
        return
    passes, poisoned = state.gradient.passes, state.gradient.poisoned
    if state.stage is not None:
        if poisoned is None and state.stage.poisoned is not None:
            poisoned = (passes + state.stage.poisoned[0], state.stage.poisoned[1])
        passes += state.stage.passes
    state.clear()
    source, hint = f"the sum of {passes} forward_backward calls", "check logprobs, advantages and weights of its datums"
    if poisoned is not None:
        ordinal, datum = poisoned
        source = f"forward_backward {ordinal + 1} of {passes}"
        if datum is not None:
            source, hint = f"data[{datum}] of {source}", "check logprobs, advantages and weights of that datum"
    raise NonFiniteGradient(
        f"the gradient has norm {length}, brought by {source} since the last step; "
        "the weights are unchanged and the gradient is cleared",
        hint=hint,
    )


# -- taking it --------------------------------------------------------------------------------------------------------
def _take(items: Sequence[_Prepared]) -> Sequence[dict[str, float] | TinsmithError]:
    """The steps of one key."""
    try:
        if len(items) == 1 and not items[0].surely_finite():
            return [_take_carefully(items[0])]
        vectors = [item.vectors() for item in items]
        scratch = Scratch.of(vectors)
    except TinsmithError as error:
        return [error] * len(items)
    except (MemoryError, RuntimeError) as error:
        return [_no_memory(error)] * len(items)
    return _take_surely(items, vectors, scratch)


def _take_surely(
    items: Sequence[_Prepared], vectors: Sequence[AdamwVectors], scratch: Scratch
) -> Sequence[dict[str, float] | TinsmithError]:
    """AdamW steps that cannot fail by their numbers, nor for want of memory of any size: nothing has to be put back."""
    try:
        norms = adamw_steps(vectors, scratch, **items[0].settings)
    except Exception as error:
        # Whatever it is, some vectors may be new and some old: such adapters are not used again.
        for item in items:
            item.state.retire("a step of this model broke off halfway")
        if not is_out_of_memory(error):
            raise
        log.exception("memory ran out in the midst of an optimizer step of %d adapters, which are lost", len(items))
        return [ModelLost("a step of this model broke off halfway", hint="resume from a checkpoint")] * len(items)
    return [_taken(item, update) for item, update in zip(items, norms, strict=True)]


def _take_carefully(item: _Prepared) -> dict[str, float]:
    """A step whose outcome is looked at; on any failure everything is put back."""
    state = item.state
    vectors = [state.flat, *state.moments.values()]
    former = [vector.clone() for vector in vectors]
    try:
        if state.optimizer_type == "dimuon":
            update = _dimuon(item, former[0])
        else:
            vectors_of = [item.vectors()]
            (update,) = adamw_steps(vectors_of, Scratch.of(vectors_of), **item.settings)
        if not math.isfinite(update):
            where = "optimizer_params" if state.optimizer_type == "dimuon" else "adam_params"
            raise InvalidRequest(
                "the step would make the weights infinite; they are unchanged",
                field=f"{where}.learning_rate",
                hint="use a smaller learning rate",
            )
    except BaseException:
        for vector, old in zip(vectors, former, strict=True):
            vector.copy_(old)
        raise
    return _taken(item, update)


def _dimuon(item: _Prepared, former: Tensor) -> float:
    pairs = item.state.weights.pairs
    gradient = item.gradient * item.factor if item.factor < 1.0 else item.gradient
    momentum = views(item.state.moments["momentum"], pairs)
    dimuon_step(pairs, momentum, views(gradient, pairs), **item.settings)
    return norm(item.state.flat - former)


def _taken(item: _Prepared, update: float) -> dict[str, float]:
    item.state.moved(update, item.norm * item.factor)
    return {"grad_norm": item.norm, "learning_rate": float(item.settings["lr"]), "update_norm": update}


# -- helpers ----------------------------------------------------------------------------------------------------------
def _no_memory(error: Exception) -> OutOfMemory:
    """The error of a step that found no memory before it changed anything; raises whatever is something else."""
    if not is_out_of_memory(error):
        raise error
    return OutOfMemory("the optimizer step does not fit in the memory of the device; nothing is changed")


def _largest(flat: Tensor) -> float:
    lowest, highest = torch.aminmax(flat)
    return max(-float(lowest), float(highest))


def _joined(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([tensor.reshape(-1).to(device) for tensor in tensors])
