"""The training state of one adapter: float32 master weights, AdamW, accumulated gradient, open stage.

Everything here is all-or-nothing: whatever raises leaves weights, moments and gradient as they were. Not responsible
for computing gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engines.lora import AdapterWeights
from engines.optim import ParamGroup, apply_overrides, iter_param_groups
from engines.peft_format import AdamState
from schemas.errors import InvalidRequest, NonFiniteGradient
from schemas.operations import LoraSpec, OptimStepParams

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
    optimizer: torch.optim.AdamW
    gradient: Gradient = field(default_factory=Gradient)
    stage: Gradient | None = None

    @classmethod
    def of(cls, spec: LoraSpec, weights: AdapterWeights, moments: AdamState | None = None) -> AdapterState:
        """Training state of these weights (used as they are, on their devices), with fresh or given moments."""
        pairs = {name: (_leaf(down), _leaf(up)) for name, (down, up) in weights.pairs.items()}
        owned = AdapterWeights(pairs, weights.scaling)
        # The SDK's own defaults; every step may override them.
        optimizer = torch.optim.AdamW(
            owned.tensors, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, foreach=True
        )
        if moments is not None:
            for tensor, mean, square in zip(owned.tensors, moments.exp_avg, moments.exp_avg_sq, strict=True):
                optimizer.state[tensor] = {
                    "step": torch.tensor(float(moments.step), dtype=torch.float32),
                    "exp_avg": mean.to(tensor.device).clone(),
                    "exp_avg_sq": square.to(tensor.device).clone(),
                }
        return cls(spec, owned, optimizer)

    def moments(self) -> AdamState:
        """AdamW's memory; zeros before the first step."""
        states = [self.optimizer.state.get(tensor) for tensor in self.weights.tensors]
        if not all(states):
            zeros = [torch.zeros_like(tensor, requires_grad=False) for tensor in self.weights.tensors]
            return AdamState(0, zeros, zeros)
        kept = [state for state in states if state]
        return AdamState(int(kept[0]["step"]), [s["exp_avg"] for s in kept], [s["exp_avg_sq"] for s in kept])

    def clear(self) -> None:
        """Drop the accumulated gradient, the open stage's included (the stage stays open)."""
        self.gradient = Gradient()
        if self.stage is not None:
            self.stage = Gradient()

    def step(self, params: OptimStepParams, grad_clip_norm: float) -> dict[str, float]:
        """One AdamW step on the accumulated gradient (zero if there is none), then clear it.

        Returns `grad_norm` (global 2-norm before clipping), `learning_rate`, `update_norm`. Raises
        `NonFiniteGradient` (the gradient is cleared) or `InvalidRequest` (nothing is changed).
        """
        if not (math.isfinite(grad_clip_norm) and grad_clip_norm >= 0):
            raise InvalidRequest(
                f"grad_clip_norm is {grad_clip_norm}; it must be a finite number >= 0 (0 = off)",
                field="adam_params.grad_clip_norm",
            )
        restore_settings = apply_overrides(self.optimizer, params)
        try:
            rate = _check_representable(next(iter_param_groups(self.optimizer)))
            grads, norm = self._gradient_to_apply()
            # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6 as well.
            factor = min(1.0, grad_clip_norm / (norm + 1e-6)) if grad_clip_norm > 0 else 1.0
            self._check_norm(norm, factor)
            if factor < 1.0:
                grads = list(torch._foreach_mul(grads, factor))
            update_norm = self._apply(grads)
        finally:
            restore_settings()
        self.clear()
        return {"grad_norm": norm, "learning_rate": rate, "update_norm": update_norm}

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
    def _apply(self, grads: Sequence[Tensor]) -> float:
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
                    field="adam_params.learning_rate",
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


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(True)
