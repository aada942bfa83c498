"""Random batches for every loss, the same for the same seed."""

from __future__ import annotations

from typing import Any

import numpy as np

from schemas.losses import LOSSES
from schemas.operations import Datum, TrainBatch

VOCAB = 259


def make_datum(loss: str, length: int, rng: np.random.Generator, **extra: Any) -> Datum:
    """A datum with all required inputs; some positions are masked as clients mask prompts (A = q = 0)."""
    stream = rng.integers(3, VOCAB, length + 1)
    inputs: dict[str, Any] = {"target_tokens": stream[1:].astype(np.int64)}
    if loss == "cross_entropy":
        inputs["weights"] = rng.normal(size=length).astype(np.float32)
    else:
        live = np.arange(length) >= length // 4
        inputs["logprobs"] = np.where(live, -rng.uniform(2.0, 9.0, length), 0).astype(np.float32)
        inputs["advantages"] = np.where(live, rng.normal(size=length), 0).astype(np.float32)
    if "sequence_ratio_mask" in LOSSES[loss].required:
        inputs["sequence_ratio_mask"] = live.astype(np.float32)
    return Datum(stream[:-1].astype(np.int64), {**inputs, **extra})


def make_batch(
    adapter_id: str, loss: str = "cross_entropy", *, lengths: tuple[int, ...] = (9, 5, 14), seed: int = 0, **config: Any
) -> TrainBatch:
    """A batch of datums of these lengths."""
    rng = np.random.default_rng(seed)
    return TrainBatch(adapter_id, tuple(make_datum(loss, n, rng) for n in lengths), loss, config)
