"""The training state of an adapter in a checkpoint folder: written, and read back as a whole state.

Not responsible for the format (`engines/peft_format.py`), nor for snapshots, which hold a gradient too
(`snapshots.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.lora import AdapterWeights
from engines.lora_targets import check_fits, linear_families, resolve_targets
from engines.peft_format import read_adapter, write_adapter
from engines.torch_engine.adapter import AdapterState
from schemas.operations import OptimizerType, SavedAdapter


def write_saved(
    model: Any, base_model: str, state: AdapterState, folder: Path, *, with_optimizer: bool
) -> SavedAdapter:
    """Write a state as a new, complete folder. Raises as `peft_format.write_adapter`."""
    size = write_adapter(
        folder,
        spec=state.spec,
        weights=state.weights,
        base_model=base_model,
        all_linears=linear_families(model),
        optimizer=state.memory() if with_optimizer else None,
    )
    return SavedAdapter(size, state.spec)


def read_saved(
    model: Any,
    folder: Path,
    *,
    with_optimizer: bool,
    live: AdapterState | None,
    optimizer: OptimizerType | None,
    check_optimizer: Callable[[OptimizerType], None],
) -> tuple[AdapterState, SavedAdapter]:
    """The state in a folder, on the model's devices.

    Args:
        live: the state whose place it takes: it must have that geometry, and gets that optimizer.
        optimizer: of a new adapter; None = the saved one's with its state, else AdamW.
        check_optimizer: raises if the engine lacks an optimizer.

    Raises `InvalidRequest` if the folder does not fit, and as `peft_format.read_adapter`.
    """
    saved = read_adapter(folder, with_optimizer=with_optimizer)
    geometry = saved.spec if live is None else live.spec
    check_fits(model, geometry, saved.weights)
    saved = saved.ordered(resolve_targets(model, geometry))
    pairs = {
        name: (down.to(device := model.get_submodule(name).weight.device), up.to(device))
        for name, (down, up) in saved.weights.pairs.items()
    }
    if live is not None:
        optimizer = live.optimizer_type
    elif optimizer is None:
        optimizer = "adamw" if saved.optimizer is None else saved.optimizer.type
    check_optimizer(optimizer)
    weights = AdapterWeights(pairs, saved.weights.scaling)
    state = AdapterState.of(saved.spec, weights, optimizer, saved.optimizer)
    return state, SavedAdapter(saved.size_bytes, saved.spec)
