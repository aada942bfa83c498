"""Packing: datums of any length behind one another in one row of tokens, without padding between them.

A pack is plain geometry. Not responsible for which datums go together (the scheduler) or for computing them
(`training_pass.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from schemas.operations import Int64

_VECTOR_ELEMENTS = 32
"""Elementwise CPU kernels compute this many elements at a time (two AVX512 registers of float32) and the last ones,
fewer, by another formula."""
_MOST_PADDING = 512


@dataclass(frozen=True, slots=True)
class Run:
    """`count` neighbouring sequences of `length` tokens each, from row `start` on."""

    start: int
    count: int
    length: int

    @property
    def stop(self) -> int:
        """The row after the last."""
        return self.start + self.count * self.length


@dataclass(frozen=True, slots=True)
class Pack:
    """`tokens` and `positions` int64 [1, T]; `spans[i]` are the rows of datum i; `runs` cover all T rows.

    The rows after the last span only fill the pack up to a multiple; they are a sequence of their own.
    """

    tokens: Tensor
    positions: Tensor
    spans: tuple[slice, ...]
    runs: tuple[Run, ...]

    @property
    def rows(self) -> int:
        """T."""
        return int(self.tokens.shape[1])


def pack(sequences: Sequence[Int64], device: torch.device, multiple: int = 1) -> Pack:
    """Put token sequences behind one another, each with positions from 0, filled up to a multiple of rows."""
    lengths = [len(tokens) for tokens in sequences]
    total = sum(lengths)
    filling = -total % multiple
    parts = [*sequences, np.zeros(filling, np.int64)] if filling else list(sequences)
    spans: list[slice] = []
    runs: list[Run] = []
    start = 0
    for part in parts:
        length = len(part)
        spans.append(slice(start, start + length))
        if runs and runs[-1].length == length:
            runs[-1] = Run(runs[-1].start, runs[-1].count + 1, length)
        else:
            runs.append(Run(start, 1, length))
        start += length
    positions = np.concatenate([np.arange(len(part)) for part in parts])
    return Pack(
        torch.from_numpy(np.concatenate(parts)).to(device).unsqueeze(0),
        torch.from_numpy(positions).to(device).unsqueeze(0),
        tuple(spans[: len(sequences)]),
        tuple(runs),
    )


def row_multiple(widths: Iterable[int], threads: int, least: int = _VECTOR_ELEMENTS) -> int | None:
    """The rows to which packs are filled up so that no elementwise kernel ever has last elements of its own kind.

    A kernel over rows * width elements is shared by 1 to `threads` threads in equal parts, and each part must be a
    multiple of the vector. None if that takes more rows than it is worth. `least` divides the result.
    """
    shares = _VECTOR_ELEMENTS * math.lcm(*range(1, threads + 1))
    multiple = math.lcm(least, *(shares // math.gcd(shares, width) for width in widths))
    return multiple if multiple <= _MOST_PADDING else None
