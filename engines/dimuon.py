"""The Dimuon optimizer: matrix-sign steps for the pairs of a low-rank adapter.

Tinker publishes the names and defaults of Dimuon's hyperparameters and what they act on, but not the algorithm; what is
public and what is chosen here stands in `docs/optimizers.md`. Not responsible for clipping (`torch_engine/adapter.py`)
or for files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

REFERENCE_RANK = 32
"""The rank at which the learning rate is taken as it is."""

_SMALLEST = 1e-6
"""Singular values below this part of the largest are rounding noise of a float32 momentum, no directions."""


class Dimuon(torch.optim.Optimizer):
    """Momentum, balanced by rows and columns, replaced by its matrix sign; the same step size for A and B.

    Per matrix with gradient G: `M = beta1 M + (1 - beta1) G`, then `W -= lr (r / 32)^e direction(M, damping)`.

    Args:
        pairs: (A [r, in], B [out, r]) of every adapted module, float32 leaves; all of one rank.
        lr: step size, >= 0, at rank 32.
        beta1: decay of the momentum, 0 <= beta1 < 1.
        damping: > 0; smooths the balancing of rows and columns, relative to their mean energy.
        rank_lr_correction_exponent: e; 0 = the same step size at every rank.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        *,
        lr: float = 1e-3,
        beta1: float = 0.9,
        damping: float = 1e-4,
        rank_lr_correction_exponent: float = 0.175,
    ) -> None:
        tensors = [tensor for pair in pairs for tensor in pair]
        self.rank = pairs[0][0].shape[0]
        if any(down.shape[0] != self.rank or up.shape[1] != self.rank for down, up in pairs):
            raise ValueError("the pairs of an adapter have one rank")
        defaults = {
            "lr": lr,
            "beta1": beta1,
            "damping": damping,
            "rank_lr_correction_exponent": rank_lr_correction_exponent,
        }
        super().__init__(tensors, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step on `.grad` of every tensor that has one. A closure is not supported: gradients come ready-made."""
        if closure is not None:
            raise ValueError("Dimuon takes no closure")
        for group in self.param_groups:
            moved = [tensor for tensor in group["params"] if tensor.grad is not None]
            for tensor in moved:
                state = self.state[tensor]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["momentum"] = torch.zeros_like(tensor)
                state["step"] += 1
                state["momentum"].lerp_(tensor.grad, 1 - group["beta1"])
            size = group["lr"] * rank_correction(self.rank, group["rank_lr_correction_exponent"])
            for same in _by_shape(moved):
                steps = direction(torch.stack([self.state[tensor]["momentum"] for tensor in same]), group["damping"])
                for tensor, step in zip(same, steps, strict=True):
                    tensor.sub_(step.to(tensor.dtype), alpha=size)


def rank_correction(rank: int, exponent: float) -> float:
    """(rank / 32)^exponent, the factor on the learning rate.

    The adapter's delta is 32 / rank * B A, so a step whose singular values are all one moves the weights less the
    higher the rank; a positive exponent gives part of that back.
    """
    return float((rank / REFERENCE_RANK) ** exponent)


def direction(momentum: Tensor, damping: float) -> Tensor:
    """The matrix sign of a balanced momentum, [..., m, n] float64: its k singular values are 1, so its Frobenius norm
    is sqrt(k), k being the rank of the momentum (for an adapter of rank r in use: r). Zero for a zero momentum.

    Row i and column j are first divided by the fourth roots of their mean squares, taken relative to the mean square
    of the whole and raised by `damping`. The direction therefore knows neither the scale of the momentum nor the signs
    and order of rows and columns; with a large damping it is the plain matrix sign, which turns with the momentum.
    """
    x = momentum.double()
    # Squares of a small momentum would underflow; the sign does not depend on the scale.
    largest = x.abs().amax((-2, -1), keepdim=True)
    x = torch.where(largest > 0, x / largest, 0.0)
    energy = x.square()
    mean = energy.mean((-2, -1), keepdim=True)
    mean = torch.where(mean > 0, mean, 1.0)
    rows = (energy.mean(-1, keepdim=True) / mean + damping).pow(-0.25)
    columns = (energy.mean(-2, keepdim=True) / mean + damping).pow(-0.25)
    return matrix_sign(rows * x * columns)


def matrix_sign(x: Tensor) -> Tensor:
    """U V^T of the singular value decomposition of [..., m, n] float64, without the directions that are only noise.

    By the eigenvectors of the small Gram matrix, (x x^T)^(-1/2) x: exact, where the usual few Newton-Schulz iterations
    leave singular values of 0.7 to 1.2.
    """
    if x.shape[-2] > x.shape[-1]:
        return matrix_sign(x.mT).transpose(-2, -1)
    values, vectors = torch.linalg.eigh(x @ x.mT)
    used = values > _SMALLEST**2 * values[..., -1:]
    inverse = torch.where(used, values, 1.0).rsqrt() * used
    sign: Tensor = (vectors * inverse.unsqueeze(-2)) @ (vectors.mT @ x)
    return sign


def _by_shape(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors that can be stacked: of one shape on one device."""

    def key(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
        return str(tensor.device), tuple(tensor.shape)

    return [list(group) for _, group in groupby(sorted(tensors, key=key), key)]
