"""Saved adapters for sampling: read from their folder, checked against the model, put on its device.

Not responsible for keeping them (`adapter_cache`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.lora import AdapterWeights
from engines.lora_targets import check_fits
from engines.peft_format import read_adapter


def load_for_sampling(folder: Path, model: Any) -> AdapterWeights:
    """The adapter of a checkpoint folder, float32, on the model's device.

    Raises what `read_adapter` raises, and `InvalidRequest` if it was made for a model of another shape.
    """
    saved = read_adapter(folder)
    check_fits(model, saved.spec, saved.weights)
    device = next(model.parameters()).device
    pairs = {name: (a.to(device), b.to(device)) for name, (a, b) in saved.weights.pairs.items()}
    return AdapterWeights(pairs, saved.weights.scaling)
