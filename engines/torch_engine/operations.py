"""An open operation: one run's batch on its way through passes, with the gradient it collects apart from everybody.

Responsible for what becomes of each datum's numbers. Not responsible for computing them (`training_pass.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.custom_loss import CustomLoss
from engines.lora import Pairs
from engines.loss_term import LossTerm
from engines.losses import datum_metrics, merge_metrics, resolve_loss
from engines.torch_engine.adapter import AdapterState
from schemas.errors import InvalidRequest
from schemas.losses import INTEGER_INPUTS
from schemas.operations import Float32, TrainBatch, TrainResult

_ELEMENTWISE = frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo", "dro"})
"""Losses in which a position's gradient depends on nothing but that position."""


@dataclass(eq=False, slots=True)
class DatumLoss:
    """The loss of one datum, as the head asks for it (`head.Upstream`)."""

    function: Callable[..., LossTerm]
    inputs: Mapping[str, Tensor]
    config: Mapping[str, float]
    elementwise: bool
    trained_rows: int = 0
    """Positions whose gradient was not zero, so far."""
    finite: bool = True
    """Whether every gradient so far was finite."""

    def __call__(self, lp: Tensor, rows: slice) -> Tensor:
        """d loss / d lp of these rows, float32 of lp's shape."""
        leaf = lp.detach().requires_grad_(True)
        with torch.enable_grad():
            loss = self.function(leaf, {name: values[rows] for name, values in self.inputs.items()}, self.config).loss
            if not loss.requires_grad:
                return torch.zeros_like(leaf, requires_grad=False)
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        if gradient is None:
            return torch.zeros_like(leaf, requires_grad=False)
        self.finite = self.finite and bool(torch.isfinite(gradient).all())
        self.trained_rows += int(torch.count_nonzero(gradient.reshape(len(gradient), -1).any(1)))
        return gradient

    def term(self, lp: Tensor) -> LossTerm:
        """The loss of the whole datum, without a gradient."""
        with torch.no_grad():
            return self.function(lp, self.inputs, self.config)


@dataclass(eq=False, slots=True)
class OpenOperation:
    """A batch whose datums are computed in order; `flat` [P] and its views hold the gradient of those so far."""

    batch: TrainBatch
    state: AdapterState
    config: Mapping[str, float]
    function: Callable[..., LossTerm]
    flat: Tensor | None = None
    gradient: Pairs | None = None
    poisoned: int | None = None
    """The first datum whose gradient was not finite."""
    share: tuple[int, ...] = ()
    """Which rank (or group of ranks that share one copy of the model) computes each datum, where there are several."""
    logprobs: list[Float32] = field(default_factory=list)
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, batch: TrainBatch, state: AdapterState, config: Mapping[str, float]) -> OpenOperation:
        """An operation with nothing computed yet. `config` is the loss's complete configuration."""
        if batch.loss_graph is not None:
            return cls(batch, state, config, CustomLoss.from_text(batch.loss_graph, timed=not batch.again))
        return cls(batch, state, config, resolve_loss(batch.loss_fn, batch.loss_config)[0])

    @property
    def complete(self) -> bool:
        """Whether every datum was computed."""
        return len(self.logprobs) == len(self.batch.datums)

    def collect(self) -> Pairs:
        """Where the gradients of its datums are added; made at the first use."""
        if self.gradient is None:
            self.flat, self.gradient = self.state.blank()
        return self.gradient

    def loss(self, index: int, device: torch.device) -> DatumLoss:
        """The loss of datum `index` with its inputs on the device: ids int64, the rest float32 (a custom loss's
        inputs keep their own dtype)."""
        keep = self.batch.loss_graph is not None
        inputs = {
            name: torch.tensor(values, dtype=_dtype(name, values.dtype, keep), device=device)
            for name, values in self.batch.datums[index].inputs.items()
        }
        elementwise = not keep and self.batch.loss_fn in _ELEMENTWISE
        return DatumLoss(self.function, inputs, self.config, elementwise)

    def take(self, index: int, lp: Tensor, loss: DatumLoss) -> None:
        """Keep the numbers of datum `index`, the next in order. Raises `InvalidRequest` if lp is not finite."""
        if not bool(torch.isfinite(lp).all()):
            raise InvalidRequest(
                f"the logprobs of data[{index}] are not finite: the weights of this adapter have grown too large",
                hint="load an earlier checkpoint and use a smaller learning rate",
                code="diverged",
            )
        if not loss.finite and self.poisoned is None:
            self.poisoned = index
        self.logprobs.append(lp.cpu().numpy())
        inputs = loss.inputs if self.batch.loss_graph is None else {}
        self.metrics.append(datum_metrics(loss.term(lp), lp, inputs))

    def result(self) -> TrainResult:
        """The outcome of a complete operation."""
        return TrainResult(tuple(self.logprobs), merge_metrics(self.metrics))

    def poison(self) -> tuple[int, int | None] | None:
        """What `Gradient.add` wants to know: whether the collected gradient is not finite, and since which datum."""
        if self.poisoned is not None:
            return 0, self.poisoned
        if self.flat is None:
            return None
        low, high = torch.aminmax(self.flat)
        return None if bool(torch.isfinite(low) & torch.isfinite(high)) else (0, None)


def _dtype(name: str, given: np.dtype[Any], keep: bool) -> torch.dtype:
    return torch.int64 if name in INTEGER_INPUTS or (keep and given == np.int64) else torch.float32
