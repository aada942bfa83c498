"""Adapters of any size without a base model, and their whole state for comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.lora import AdapterWeights
from engines.torch_engine.adapter import AdapterState
from schemas.operations import LoraSpec, OptimizerType


def make_state(
    seed: int = 0, *, width: int = 24, modules: int = 3, rank: int = 4, optimizer: OptimizerType = "adamw"
) -> AdapterState:
    """A fresh adapter of `modules` pairs A [rank, width] and B [width + 5, rank], normally distributed."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        f"layers.{index}.proj": (
            torch.randn(rank, width, generator=generator),
            torch.randn(width + 5, rank, generator=generator),
        )
        for index in range(modules)
    }
    return AdapterState.of(LoraSpec(rank, seed), AdapterWeights(pairs, 32 / rank), optimizer)


def collect(state: AdapterState, seed: int, scale: float = 1.0) -> None:
    """Accumulate a random gradient."""
    generator = torch.Generator().manual_seed(1000 + seed)
    state.gradient.add(scale * torch.randn(state.parameters, generator=generator), 1, None)


def content(state: AdapterState) -> dict[str, Tensor]:
    """Copies of everything that a step may change, or that leaving memory may lose."""
    found = {"weights": state.flat, **state.moments, "steps": torch.tensor(state.steps)}
    found |= {f"{name}.{side}": pair[side] for name, pair in state.weights.pairs.items() for side in (0, 1)}
    if state.gradient.flat is not None:
        found["gradient"] = state.gradient.flat
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal names and equal bits."""
    return one.keys() == other.keys() and all(
        tensor.shape == other[name].shape and torch.equal(_bits(tensor), _bits(other[name]))
        for name, tensor in one.items()
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32) if tensor.dtype == torch.float32 else tensor
