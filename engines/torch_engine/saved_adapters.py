"""Saved adapters for sampling: read from their folder, checked against the model, put on its device.

Not responsible for keeping them (`adapter_cache`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.lora import AdapterWeights, expected_shapes
from engines.peft_format import read_adapter
from schemas.errors import InvalidRequest


def load_for_sampling(folder: Path, model: Any) -> AdapterWeights:
    """The adapter of a checkpoint folder, float32, on the model's device.

    Raises what `read_adapter` raises, and `InvalidRequest` if it was made for a model of another shape.
    """
    saved = read_adapter(folder)
    shapes = {name: (tuple(a.shape), tuple(b.shape)) for name, (a, b) in saved.weights.pairs.items()}
    if shapes != expected_shapes(model, saved.spec):
        raise InvalidRequest("the adapter checkpoint does not fit this base model: other modules or other shapes")
    device = next(model.parameters()).device
    pairs = {name: (a.to(device), b.to(device)) for name, (a, b) in saved.weights.pairs.items()}
    return AdapterWeights(pairs, saved.weights.scaling)
