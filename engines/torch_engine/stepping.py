"""Arithmetic of optimizer steps on flat vectors: norms, and AdamW for many adapters in one fused call.

Vectors are walked in blocks that stay in the cache, cut at the same places whoever else takes a step: an adapter's bits
depend neither on its neighbours nor on the number of threads. Not responsible for whether a step may be taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.optim.adamw import adamw

_CPU_BLOCK = 1 << 18
"""Elements that one call handles: five float32 vectors of them stay in the cache between the calls of a block."""
_GPU_BLOCK = 1 << 25
_ROW = 512
"""Squares of so many elements are added in float32 (16 or 8 lanes side by side), everything above in float64."""
_SAFE_SQUARES = (1e-20, 1e30)
"""Between these, sums of float32 squares have neither overflowed nor lost anything that counts."""


@dataclass(frozen=True, slots=True)
class AdamwVectors:
    """What a step of one adapter reads and changes: flat float32 vectors [P] on one device.

    `steps` were taken before; `factor` is put on the gradient, which itself stays as it is.
    """

    weights: Tensor
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: int
    factor: float


@dataclass(frozen=True, slots=True)
class Scratch:
    """Working memory of one call: two blocks, whatever the size of the vectors. Taken before anything changes."""

    former: Tensor
    scaled: Tensor

    @classmethod
    def of(cls, vectors: Sequence[AdamwVectors]) -> Scratch:
        """Enough for these."""
        device = vectors[0].weights.device
        block = min(_block(device), sum(item.weights.numel() for item in vectors))
        return cls(torch.empty(block, device=device), torch.empty(block, device=device))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements [start, stop) of the vectors at `index`."""

    index: int
    start: int
    stop: int


def norm(flat: Tensor) -> float:
    """The 2-norm of a float32 vector, squares added up in float64."""
    size = _block(flat.device)
    return _root([_squares(flat[start : start + size]) for start in range(0, len(flat), size)])


@torch.no_grad()
def adamw_steps(
    vectors: Sequence[AdamwVectors],
    scratch: Scratch,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> list[float]:
    """One AdamW step of each in place, as `torch.optim.AdamW(fused=True)`; returns the 2-norm of each update."""
    device = vectors[0].weights.device
    moved: list[list[Tensor]] = [[] for _ in vectors]
    for pieces in _fill(vectors, len(scratch.former)):
        weights = [vectors[piece.index].weights[piece.start : piece.stop] for piece in pieces]
        former = _parts(scratch.former, [len(part) for part in weights])
        torch._foreach_copy_(former, weights)
        adamw(
            weights,
            _gradients(vectors, pieces, scratch.scaled),
            [vectors[piece.index].exp_avg[piece.start : piece.stop] for piece in pieces],
            [vectors[piece.index].exp_avg_sq[piece.start : piece.stop] for piece in pieces],
            [],
            [torch.full((), float(vectors[piece.index].steps), device=device) for piece in pieces],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            weight_decay=weight_decay,
        )
        for piece, part, old in zip(pieces, weights, former, strict=True):
            moved[piece.index].append(_squares(torch.sub(part, old, out=old)))
    return [_root(squares) for squares in moved]


def _gradients(vectors: Sequence[AdamwVectors], pieces: Sequence[_Piece], scratch: Tensor) -> list[Tensor]:
    """The gradient of each piece times its factor; multiplied in the scratch memory where the factor is not one."""
    gradients: list[Tensor] = []
    for piece, out in zip(pieces, _parts(scratch, [piece.stop - piece.start for piece in pieces]), strict=True):
        item = vectors[piece.index]
        gradient = item.gradient[piece.start : piece.stop]
        gradients.append(gradient if item.factor == 1.0 else torch.mul(gradient, item.factor, out=out))
    return gradients


def _parts(flat: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Consecutive parts of a vector that is at least as long."""
    ends = list(accumulate(lengths))
    return [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _fill(vectors: Sequence[AdamwVectors], block: int) -> Iterator[list[_Piece]]:
    """Calls of at most `block` elements; every vector is cut at multiples of its device's block."""
    size = _block(vectors[0].weights.device)
    pieces: list[_Piece] = []
    filled = 0
    for index, item in enumerate(vectors):
        total = item.weights.numel()
        for start in range(0, total, size):
            piece = _Piece(index, start, min(start + size, total))
            length = piece.stop - piece.start
            if filled + length > block:
                yield pieces
                pieces, filled = [], 0
            pieces.append(piece)
            filled += length
    yield pieces


def _block(device: torch.device) -> int:
    return _CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK


def _squares(flat: Tensor) -> Tensor:
    """The sum of squares of a block, float64 scalar on its device."""
    if flat.device.type == "cpu":
        whole = len(flat) // _ROW * _ROW
        # Fewer sums than a thread's least share: added up in one order on any number of threads.
        rows: Tensor = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
        total: Tensor = rows.double().square().sum()
        if whole < len(flat):
            total += torch.linalg.vector_norm(flat[whole:].double()).square()
        if _SAFE_SQUARES[0] < float(total) < _SAFE_SQUARES[1]:
            return total
    length: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float64)
    return length.square()


def _root(squares: Sequence[Tensor]) -> float:
    total = torch.stack(list(squares)).tolist()
    return math.sqrt(sum(total))
