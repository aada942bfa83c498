"""Packing: datums of any length behind one another in one row of tokens, without padding between them.

A pack is plain geometry. Not responsible for which datums go together (the scheduler) or for computing them
(`training_pass.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from schemas.errors import EngineFailure
from schemas.operations import Int64

_VECTOR_ELEMENTS = 32
"""Elementwise CPU kernels compute this many elements at a time (two AVX512 registers of float32) and the last ones,
fewer, by another formula."""
_GRAIN_ELEMENTS = 32768
"""A thread is worth it for so many elements (`at::internal::GRAIN_SIZE`)."""
_MOST_PADDING = 256


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

    The rows after the last span only fill the pack up; they are a sequence of their own.
    """

    tokens: Tensor
    positions: Tensor
    spans: tuple[slice, ...]
    runs: tuple[Run, ...]

    @property
    def rows(self) -> int:
        """T."""
        return int(self.tokens.shape[1])


def pack(sequences: Sequence[Int64], device: torch.device, filling: Filling) -> Pack:
    """Put token sequences behind one another, each with positions from 0, and fill up behind them."""
    lengths = [len(tokens) for tokens in sequences]
    total = sum(lengths)
    missing = filling.rows(total) - total
    parts = [*sequences, np.zeros(missing, np.int64)] if missing else list(sequences)
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


@dataclass(frozen=True, slots=True)
class Filling:
    """To how many rows passes are filled up, so that no elementwise kernel ever has last elements of its own kind.

    Such a kernel over rows * width elements is shared in equal parts by as many threads as are worth it, and each part
    must be a multiple of the vector.

    Args:
        multiple: rows are a multiple of it.
        widths: of the activations of the model.
        threads: of this process.
    """

    multiple: int = 1
    widths: frozenset[int] = frozenset()
    threads: int = 1

    def rows(self, total: int) -> int:
        """The rows of a pass over `total` tokens. Raises `EngineFailure` if no number near it will do (`suits`)."""
        first = -(-total // self.multiple) * self.multiple
        for rows in range(first, first + _MOST_PADDING, self.multiple):
            if all(_in_vectors(rows * width, self.threads) for width in self.widths):
                return rows
        raise EngineFailure(f"{total} rows cannot be filled up for {self.threads} threads")

    def suits(self, most: int = 2048) -> bool:
        """Whether there is an answer for any number of tokens up to `most`."""
        try:
            return all(self.rows(total) for total in range(1, most + 1, self.multiple))
        except EngineFailure:
            return False


def _in_vectors(elements: int, threads: int) -> bool:
    """Whether every thread's share of a kernel is a multiple of the vector (`at::parallel_for`)."""
    sharing = min(threads, -(-elements // _GRAIN_ELEMENTS))
    return elements % _VECTOR_ELEMENTS == 0 and -(-elements // sharing) % _VECTOR_ELEMENTS == 0
