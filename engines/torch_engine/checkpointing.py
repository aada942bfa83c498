"""Gradient checkpointing of decoder layers: activations are computed twice instead of being kept, for the same bits.

Chosen pass by pass. Not responsible for choosing (`memory.py`) or for packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that can be checkpointed, in model order: those that a model of another library names itself as
    `checkpointed_layers`, else Hugging Face's own kind, outermost ones only."""
    named: list[nn.Module] | None = getattr(model, "checkpointed_layers", None)
    if named is not None:
        return named
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and id(module) not in inside:
            found.append(module)
            inside.update(id(part) for part in module.modules())
    return found


@contextmanager
def use_checkpointing(model: nn.Module, on: bool) -> Iterator[None]:
    """Checkpoint every decoder layer in the passes inside the context; with `on` false nothing happens.

    The backward pass runs the layers' forward a second time, so it must happen inside this context and inside the same
    `Router.use` as the forward pass. The model stays in evaluation mode: transformers' own switch demands training
    mode, in which some layers apply dropout by themselves. No key-value cache may be passed to the layers.
    """
    layers = decoder_layers(model) if on else []
    for layer in layers:
        layer.forward = _checkpointed(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own shows again


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    # No dropout, hence no random state to keep for the second run.
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
