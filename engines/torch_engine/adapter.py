"""The training state of one adapter: float32 master weights, optimizer, accumulated gradient, open stage.

Everything here is all-or-nothing: whatever raises leaves weights, moments and gradient as they were. Not responsible
for computing gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engines.dimuon import Dimuon, rank_correction
from engines.lora import AdapterWeights
from engines.optim import ParamGroup, apply_overrides, iter_param_groups, step_field
from engines.peft_format import SLOTS, OptimizerState
from schemas.errors import InvalidRequest, NonFiniteGradient
from schemas.operations import DimuonStepParams, LoraSpec, OptimizerType, OptimStepParams, StepParams

_GREATEST_NORM = 1e18
"""Beyond it the squares that AdamW keeps overflow float32, and the adapter would never move again."""

_FLOAT32 = torch.finfo(torch.float32)


@dataclass(eq=False, slots=True)
class Gradient:
    """Gradients of several passes, added up; `tensors` None = none yet. `poisoned` = (ordinal, datum) of the first
    pass whose gradient was not finite."""

    tensors: list[Tensor] | None = None
    passes: int = 0
    poisoned: tuple[int, int] | None = None

    def add(self, tensors: list[Tensor], passes: int, poisoned: tuple[int, int] | None) -> None:
        """Add the gradient of `passes` passes; takes over the tensors. `poisoned` counts from the first of them."""
        if self.tensors is None:
            self.tensors = tensors
        else:
            torch._foreach_add_(self.tensors, tensors)
        if self.poisoned is None and poisoned is not None:
            self.poisoned = (self.passes + poisoned[0], poisoned[1])
        self.passes += passes

    def merge(self, other: Gradient) -> None:
        """Add another one; takes over its tensors."""
        if other.tensors is not None:
            self.add(other.tensors, other.passes, other.poisoned)


@dataclass(eq=False, slots=True)
class AdapterState:
    """One adapter in training. `stage` is not None inside `train_mode`: gradients collected there, not yet kept."""

    spec: LoraSpec
    weights: AdapterWeights
    optimizer: torch.optim.Optimizer
    optimizer_type: OptimizerType
    gradient: Gradient = field(default_factory=Gradient)
    stage: Gradient | None = None

    @classmethod
    def of(
        cls,
        spec: LoraSpec,
        weights: AdapterWeights,
        optimizer_type: OptimizerType = "adamw",
        memory: OptimizerState | None = None,
    ) -> AdapterState:
        """Training state of these weights (used as they are, on their devices), with fresh or given moments.

        Raises `InvalidRequest` if the memory is of another optimizer.
        """
        if memory is not None and memory.type != optimizer_type:
            raise InvalidRequest(
                f"the checkpoint has the state of {memory.type}, the model is trained by {optimizer_type}",
                field="optimizer",
                hint="load it with optimizer=false",
            )
        pairs = {name: (_leaf(down), _leaf(up)) for name, (down, up) in weights.pairs.items()}
        owned = AdapterWeights(pairs, weights.scaling)
        optimizer = _optimizer(optimizer_type, owned)
        if memory is not None:
            for place, tensor in enumerate(owned.tensors):
                slots = {slot: kept[place].to(tensor.device).clone() for slot, kept in memory.slots.items()}
                optimizer.state[tensor] = {"step": torch.tensor(float(memory.step), dtype=torch.float32), **slots}
        return cls(spec, owned, optimizer, optimizer_type)

    def memory(self) -> OptimizerState:
        """What the optimizer remembers; zeros before the first step."""
        slots = SLOTS[self.optimizer_type]
        states = [self.optimizer.state.get(tensor) for tensor in self.weights.tensors]
        if not all(states):
            zeros = [torch.zeros_like(tensor, requires_grad=False) for tensor in self.weights.tensors]
            return OptimizerState(self.optimizer_type, 0, dict.fromkeys(slots, zeros))
        kept = [state for state in states if state]
        return OptimizerState(
            self.optimizer_type, int(kept[0]["step"]), {slot: [state[slot] for state in kept] for slot in slots}
        )

    def clear(self) -> None:
        """Drop the accumulated gradient, the open stage's included (the stage stays open)."""
        self.gradient = Gradient()
        if self.stage is not None:
            self.stage = Gradient()

    def step(self, params: StepParams | None, grad_clip_norm: float) -> dict[str, float]:
        """One optimizer step on the accumulated gradient (zero if there is none), then clear it.

        Returns `grad_norm` (global 2-norm before clipping), `learning_rate`, `update_norm`. Raises
        `NonFiniteGradient` (the gradient is cleared) or `InvalidRequest` (nothing is changed).
        """
        dimuon = self.optimizer_type == "dimuon"
        params = params or (DimuonStepParams() if dimuon else OptimStepParams())
        where = step_field(params)
        if isinstance(params, DimuonStepParams) != dimuon:
            raise InvalidRequest(f"{where} does not fit: the model is trained by {self.optimizer_type}", field=where)
        if not (math.isfinite(grad_clip_norm) and grad_clip_norm >= 0):
            raise InvalidRequest(
                f"grad_clip_norm is {grad_clip_norm}; it must be a finite number >= 0 (0 = off)",
                field=f"{where}.grad_clip_norm",
            )
        restore_settings = apply_overrides(self.optimizer, params)
        try:
            rate = self._check_rate(next(iter_param_groups(self.optimizer)))
            grads, norm = self._gradient_to_apply()
            # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6 as well.
            factor = min(1.0, grad_clip_norm / (norm + 1e-6)) if grad_clip_norm > 0 else 1.0
            self._check_norm(norm, factor)
            if factor < 1.0:
                grads = list(torch._foreach_mul(grads, factor))
            update_norm = self._apply(grads, where)
        finally:
            restore_settings()
        self.clear()
        return {"grad_norm": norm, "learning_rate": rate, "update_norm": update_norm}

    def _check_rate(self, group: ParamGroup) -> float:
        """The learning rate; raises `InvalidRequest` if a factor of the update would not be finite in float32."""
        if self.optimizer_type == "adamw":
            return _check_representable(group)
        rate = float(group["lr"])
        if rate * rank_correction(self.spec.rank, group["rank_lr_correction_exponent"]) > _FLOAT32.max:
            raise InvalidRequest(
                "learning_rate is too large: the step would not be finite in float32",
                field="optimizer_params.learning_rate",
            )
        return rate

    def _gradient_to_apply(self) -> tuple[list[Tensor], float]:
        """The accumulated gradient plus the open stage, and its norm; changes neither."""
        kept, staged = self.gradient.tensors, None if self.stage is None else self.stage.tensors
        if kept is not None and staged is not None:
            grads = list(torch._foreach_add(kept, staged))
        else:
            grads = kept or staged or [torch.zeros_like(t, requires_grad=False) for t in self.weights.tensors]
        return grads, global_norm(grads)

    def _check_norm(self, norm: float, factor: float) -> None:
        if math.isfinite(norm) and norm * factor < _GREATEST_NORM:
            return
        total = Gradient(passes=self.gradient.passes, poisoned=self.gradient.poisoned)
        if self.stage is not None and self.stage.tensors is not None:
            total.merge(Gradient([], self.stage.passes, self.stage.poisoned))
        self.clear()
        source = f"the sum of {total.passes} forward_backward calls"
        if total.poisoned is not None:
            source = f"data[{total.poisoned[1]}] of forward_backward {total.poisoned[0] + 1} of {total.passes}"
        raise NonFiniteGradient(
            f"the gradient has norm {norm}, brought by {source} since the last step; "
            "the weights are unchanged and the gradient is cleared",
            hint="check logprobs, advantages and weights of that datum",
        )

    @torch.no_grad()
    def _apply(self, grads: Sequence[Tensor], where: str) -> float:
        """Run the optimizer; on any failure (memory, an update that is not finite) put everything back."""
        tensors = self.weights.tensors
        former = [tensor.detach().clone() for tensor in tensors]
        former_state = {
            tensor: {key: value.clone() for key, value in state.items()}
            for tensor, state in self.optimizer.state.items()
        }
        try:
            for tensor, grad in zip(tensors, grads, strict=True):
                tensor.grad = grad
            self.optimizer.step()
            update_norm = global_norm(list(torch._foreach_sub(tensors, former)))
            if not math.isfinite(update_norm):
                raise InvalidRequest(
                    "the step would make the weights infinite; they are unchanged",
                    field=f"{where}.learning_rate",
                    hint="use a smaller learning rate",
                )
        except BaseException:
            torch._foreach_copy_(tensors, former)
            self.optimizer.state.clear()
            self.optimizer.state.update(former_state)
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return update_norm


def global_norm(tensors: Sequence[Tensor]) -> float:
    """The 2-norm over all elements, squares accumulated in float64."""
    norms = [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for tensor in tensors]
    return float(torch.stack(norms).square().sum().sqrt())


def _check_representable(group: ParamGroup) -> float:
    """The learning rate; raises `InvalidRequest` if a factor of the update is infinite, or eps zero, in float32."""
    rate, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
    # The step size is lr / (1 - beta1^t), greatest at t = 1.
    for name, factor in (("learning_rate", rate / (1 - group["betas"][0])), ("weight_decay", rate * decay)):
        if factor > _FLOAT32.max:
            raise InvalidRequest(
                f"{name} is too large: the step would not be finite in float32", field=f"adam_params.{name}"
            )
    if eps < _FLOAT32.smallest_normal:
        raise InvalidRequest(
            f"eps is {eps}; it must be at least {_FLOAT32.smallest_normal:.3g}, for moments are float32",
            field="adam_params.eps",
        )
    return rate


def _optimizer(kind: OptimizerType, weights: AdapterWeights) -> torch.optim.Optimizer:
    """A fresh optimizer with the SDK's own defaults; every step may override them."""
    if kind == "dimuon":
        return Dimuon(list(weights.pairs.values()))
    return torch.optim.AdamW(weights.tensors, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, foreach=True)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(True)
