"""Attention over packs: causal within each sequence, never across, by one kernel call per run of equal lengths.

Hugging Face models look their attention up by name at every call, so a pack switches it for its own pass only; anything
else (sampling, checks) runs on the model's own implementation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from engines.torch_engine.packing import Pack
from schemas.errors import EngineFailure

_NAME = "tinsmith_packed"
_OVER = "tinsmith_attends_over"
_UNSUPPORTED = ("s_aux", "position_bias", "head_mask")


@contextmanager
def packed(model: Any, pack: Pack) -> Iterator[None]:
    """Passes inside (and their backward passes) attend within the sequences of this pack."""
    with attending(model, _NAME, pack):
        yield


@contextmanager
def attending(model: Any, name: str, over: object) -> Iterator[None]:
    """Passes inside look their attention up by this name, and it finds `over` by `attended`.

    Both lie on the model's configuration: engines in threads of one process do not meet there, and the backward passes
    of a GPU, which run in threads of autograd, find them (in a context variable they would not).
    """
    config = model.config.get_text_config()
    former, outer = model.config._attn_implementation, getattr(config, _OVER, None)
    model.config._attn_implementation = name
    setattr(config, _OVER, over)
    try:
        yield
    finally:
        setattr(config, _OVER, outer)
        model.config._attn_implementation = former


def attended(module: nn.Module) -> object:
    """What the pass that runs in this attention is over; None outside of `attending`."""
    return getattr(module.config, _OVER, None)


def can_pack(model: Any) -> bool:
    """Whether everything that mixes positions in this model is attention that goes through the interface.

    Recurrent layers, convolutions over time and chunked attention do not; a model that is not known to be packable
    is computed one sequence at a time. A model of another library says itself whether it takes packs.
    """
    if not uses_interface(model):
        return bool(model.takes_packs)
    config = model.config.get_text_config()
    if not type(model)._can_set_attn_implementation() or getattr(config, "attention_chunk_size", None):
        return False
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        return False
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        return False
    return not any(isinstance(module, nn.RNNBase | nn.Conv1d) for module in model.base_model.modules())


def uses_interface(model: Any) -> bool:
    """Whether the model is one of transformers', whose attention is looked up by name."""
    return hasattr(type(model), "_can_set_attn_implementation")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv_heads, T, d] -> ([1, T, heads, d], None), as the interface wants."""
    pack = attended(module)
    if not isinstance(pack, Pack) or query.shape[2] != pack.rows or attention_mask is not None:
        raise EngineFailure("packed attention outside of a packed pass")
    check_known(unused)
    outputs = []
    for run in pack.runs:
        q, k, v = (sequences(tensor, run.start, run.count, run.length) for tensor in (query, key, value))
        if softcap is not None:
            seen = visible(run.length, sliding_window, q.device)
            out = capped_attention(q, k, v, seen, scaling, softcap)
        else:
            window = None
            if sliding_window is not None and run.length > sliding_window:
                window = visible(run.length, sliding_window, q.device)
            shared = q.shape[1] != k.shape[1]
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=window, is_causal=window is None and run.length > 1, scale=scaling, enable_gqa=shared
            )
        outputs.append(out.transpose(1, 2).reshape(run.count * run.length, *query.shape[1::2]))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


def check_known(arguments: Mapping[str, Any]) -> None:
    """Raise `EngineFailure` if a model asks for more than a causal attention here can do (sinks, position biases)."""
    for name in _UNSUPPORTED:
        if arguments.get(name) is not None:
            raise EngineFailure(f"attention over many sequences does not know {name}")


def sequences(tensor: Tensor, start: int, count: int, length: int) -> Tensor:
    """From row `start` of [1, heads, T, d], `count` sequences: [count, heads, length, d], without a copy."""
    part = tensor[0, :, start : start + count * length]
    return part.reshape(part.shape[0], count, length, part.shape[-1]).transpose(0, 1)


def visible(length: int, window: int | None, device: torch.device, first: int = 0) -> Tensor:
    """Boolean [length - first, length]: position i, from `first` on, sees j <= i, the last `window` of them."""
    places = torch.arange(length, device=device)
    distance = places[first:, None] - places[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scaling: float | None, softcap: float) -> Tensor:
    """Attention whose scores pass through softcap * tanh(score / softcap), which no fused kernel knows.

    q [rows, heads, n, d], k and v [rows, kv_heads, L, d], `seen` boolean [n, L].
    """
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


AttentionInterface.register(_NAME, attend)
