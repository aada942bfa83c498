"""Random work: datums of every loss, plans of operations, and the ways in which operations are cut into turns.

Structure (which losses, lengths, cuts) is drawn by hypothesis and shrinks; the numbers inside come from a seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from schemas.losses import LOSSES
from schemas.operations import Datum, Float32, TrainBatch

VOCAB = 97
GAPS = (-1.6, -0.5, -0.1, 0.1, 0.5, 0.9)
"""lp - q of a position: away from every bound that ratios are clipped at, so that rounding decides nothing."""
CONFIGS: dict[str, tuple[dict[str, float], ...]] = {
    "ppo": ({}, {"clip_low_threshold": 0.93, "clip_high_threshold": 1.55}),
    "cispo": ({}, {"clip_low_threshold": 0.4, "clip_high_threshold": 1.3}),
    "gspo": ({}, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}),
    "dro": ({}, {"beta": 0.7}),
    "stable_reinforce": ({}, {"kl_coeff": 0.3}),
}
CUSTOM = json.dumps(
    {
        "inputs": [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}],
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {"op": "placeholder", "name": "weights", "target": "weights"},
            {
                "op": "call_function",
                "name": "product",
                "target": "operator.mul",
                "args": [{"ref": "logprobs"}, {"ref": "weights"}],
            },
            {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "product"}]},
            {
                "op": "output",
                "name": "output",
                "target": "output",
                "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}],
            },
        ],
    }
)
"""A loss that the engine cannot know: the sum of w * lp."""

SMALL = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=16,
    suppress_health_check=list(HealthCheck),
)
"""The same examples on every run; few, for each of them runs models."""
FEW = settings(SMALL, max_examples=6)
"""For what runs on every architecture: about fifty in all."""


@dataclass(frozen=True)
class Plan:
    """One operation to be made. `columns` 0 = targets [N], else [N, columns] (cross entropy only)."""

    loss: str
    lengths: tuple[int, ...]
    seed: int = 0
    columns: int = 0
    config: int = 0
    backward: bool = True

    def batch(self, adapter_id: str, score: Callable[[Datum], Float32] | None = None) -> TrainBatch:
        """The operation. `score` gives the logprobs near which those of the sampler lie (None: random ones)."""
        rng = np.random.default_rng(self.seed)
        datums = tuple(self._datum(n, rng, score) for n in self.lengths)
        if self.loss == "custom":
            return TrainBatch(adapter_id, datums, "custom", {}, self.backward, CUSTOM)
        configs = CONFIGS.get(self.loss, ({},))
        return TrainBatch(adapter_id, datums, self.loss, configs[self.config % len(configs)], self.backward)

    def _datum(self, n: int, rng: np.random.Generator, score: Callable[[Datum], Float32] | None) -> Datum:
        tokens = rng.integers(0, VOCAB, n)
        shape = (n, self.columns) if self.columns else (n,)
        inputs: dict[str, NDArray[Any]] = {"target_tokens": rng.integers(0, VOCAB, shape)}
        if self.loss == "cross_entropy" and rng.random() < 0.2:
            return Datum(tokens, inputs)
        if self.loss in ("cross_entropy", "custom"):
            # Negative, fractional and zero ones.
            inputs["weights"] = (rng.normal(size=shape) * (rng.random(shape) < 0.8)).astype(np.float32)
            return Datum(tokens, inputs)
        live = np.arange(n) >= n // 4
        near = -rng.uniform(2.0, 6.0, n) if score is None else score(Datum(tokens, inputs))
        inputs["logprobs"] = np.where(live, near - rng.choice(GAPS, n), 0).astype(np.float32)
        inputs["advantages"] = np.where(live, rng.normal(size=n), 0).astype(np.float32)
        if self.loss == "gspo":
            inputs["sequence_ratio_mask"] = live.astype(np.float32)
        if "clip_low_threshold" in LOSSES[self.loss].optional and rng.random() < 0.3:
            inputs["clip_low_threshold"] = rng.choice([0.0, 0.7, 0.95], n).astype(np.float32)
            inputs["clip_high_threshold"] = rng.choice([1.0, 1.2, 4.0], n).astype(np.float32)
        return Datum(tokens, inputs)


def lengths(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Of the datums of one operation: single tokens, equal ones, ragged ones, and the whole context now and then."""
    one = st.one_of(st.sampled_from([1, 2, 7, 7, 16, 17]), st.integers(1, 33))
    ragged = st.lists(one, min_size=1, max_size=most)
    equal = st.tuples(one, st.integers(1, most)).map(lambda pair: [pair[0]] * pair[1])
    return st.one_of(ragged, equal, st.just([64, 1])).map(tuple)


@st.composite
def plans(draw: st.DrawFn, *, most: int = 4, custom: bool = True) -> Plan:
    """Any operation."""
    loss = draw(st.sampled_from(["cross_entropy", *sorted(LOSSES), *(["custom"] if custom else [])]))
    return Plan(
        loss,
        draw(lengths(most)),
        seed=draw(st.integers(0, 1 << 16)),
        columns=draw(st.sampled_from([0, 0, 1, 3])) if loss == "cross_entropy" else 0,
        config=draw(st.integers(0, 1)),
        backward=draw(st.integers(0, 4)) > 0,
    )
