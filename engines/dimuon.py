"""The Dimuon optimizer: matrix-sign steps for the pairs of a low-rank adapter.

Tinker publishes the names and defaults of Dimuon's hyperparameters and what they act on, but not the algorithm; what is
public and what is chosen here stands in `docs/optimizers.md`. Not responsible for clipping (`torch_engine/adapter.py`)
or for files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from engines.lora import Pairs

REFERENCE_RANK = 32
"""The rank at which the learning rate is taken as it is."""

_SMALLEST = 1e-6
"""Singular values below this part of the largest are rounding noise of a float32 momentum, no directions."""


DEFAULTS: Mapping[str, float] = {"lr": 1e-3, "beta1": 0.9, "damping": 1e-4, "rank_lr_correction_exponent": 0.175}
"""Tinker's own; every step may override them."""


@torch.no_grad()
def dimuon_step(
    weights: Pairs,
    momentum: Pairs,
    gradient: Pairs,
    *,
    lr: float,
    beta1: float,
    damping: float,
    rank_lr_correction_exponent: float,
) -> None:
    """One step in place: momentum, balanced by rows and columns, replaced by its matrix sign; A and B move alike.

    Per matrix with gradient G: `M = beta1 M + (1 - beta1) G`, then `W -= lr (r / 32)^e direction(M, damping)`.

    Args:
        weights, momentum, gradient: (A [r, in], B [out, r]) of every adapted module, float32; all of one rank. Weights
            and momentum change.
        lr: step size, >= 0, at rank 32.
        beta1: decay of the momentum, 0 <= beta1 < 1.
        damping: > 0; smooths the balancing of rows and columns, relative to their mean energy.
        rank_lr_correction_exponent: e; 0 = the same step size at every rank.
    """
    ranks = {rank for down, up in weights.values() for rank in (down.shape[0], up.shape[1])}
    if len(ranks) != 1:
        raise ValueError("the pairs of an adapter have one rank")
    size = lr * rank_correction(ranks.pop(), rank_lr_correction_exponent)
    moved: list[tuple[Tensor, Tensor]] = []
    for name, pair in weights.items():
        for weight, kept, grad in zip(pair, momentum[name], gradient[name], strict=True):
            kept.lerp_(grad, 1 - beta1)
            moved.append((weight, kept))
    for same in _by_shape(moved):
        steps = direction(torch.stack([kept for _, kept in same]), damping)
        for (weight, _), step in zip(same, steps, strict=True):
            weight.sub_(step.to(weight.dtype), alpha=size)


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


def _by_shape(moved: Sequence[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """Weights with their momenta that can be stacked: of one shape."""

    def key(item: tuple[Tensor, Tensor]) -> tuple[int, ...]:
        return tuple(item[0].shape)

    return [list(group) for _, group in groupby(sorted(moved, key=key), key)]
