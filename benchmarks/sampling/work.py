"""What is asked of the sides, and what they tell. Plain data and arithmetic; torch only where an adapter is made."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from benchmarks.training.work import Outcome

if TYPE_CHECKING:
    from engines.lora import AdapterWeights


@dataclass(frozen=True, slots=True)
class Ask:
    """`samples` continuations of exactly `new` tokens; `adapter` is a number below the side's `clients`, None = base.
    Temperature 0 is greedy."""

    prompt: tuple[int, ...]
    new: int
    samples: int = 1
    adapter: int | None = None
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class SampleWork:
    """All asks are there at once. `most_rows` are the rows that may be drawn together, on every side."""

    asks: tuple[Ask, ...]
    most_rows: int = 64
    profile: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that are asked for."""
        return sum(ask.new * ask.samples for ask in self.asks)


class Clock:
    """When each row of each ask got its tokens, in seconds since the work began."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, int], list[float]] = {}

    def outcome(self, drawn: Mapping[int, Sequence[Sequence[int]]]) -> Outcome:
        """Quantiles over rows (first token) and over steps of rows (between tokens), milliseconds; `drawn` by ask."""
        first = sorted(1e3 * times[0] for times in self.times.values())
        between = sorted(1e3 * (b - a) for times in self.times.values() for a, b in pairwise(times))
        parts = {"first token p50": _quantile(first, 0.5), "first token p95": _quantile(first, 0.95)}
        if between:
            parts |= {"between tokens p50": _quantile(between, 0.5), "between tokens p95": _quantile(between, 0.95)}
        tokens = tuple(tuple(int(t) for t in row) for ask in sorted(drawn) for row in drawn[ask])
        return Outcome(parts=parts, drawn=tokens)


def _quantile(values: Sequence[float], share: float) -> float:
    if len(values) < 2:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]


def adapter(model: Any, rank: int, number: int) -> AdapterWeights:
    """Adapter `number` of every side: on all attention and MLP projections, with a B that changes what is drawn."""
    import torch

    from engines.lora_targets import init_adapter
    from schemas.operations import LoraSpec

    weights = init_adapter(model, LoraSpec(rank=rank, seed=number, train_unembed=False))
    noise = torch.Generator().manual_seed(number)
    for _, up in weights.pairs.values():
        up.copy_(torch.randn(up.shape, generator=noise) * 0.02)
    return weights
