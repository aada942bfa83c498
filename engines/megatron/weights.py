"""From the safetensors files of a Hugging Face folder into megatron-core's parameters, this rank's parts only.

Not responsible for building the model (`model.py`) or for which part is whose (`families.Shape`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engines.fsdp.loading import Files
from engines.megatron.families import Family, Shape, Slice
from schemas.errors import Unavailable

_PREFIX = "model."
_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
_HEAD_NORMS = {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}
_HARMLESS = "rotary_emb.inv_freq"
"""Angles that some old checkpoints keep; they follow from the configuration."""


@dataclass(slots=True)
class Reader:
    """Reads tensors by name and remembers which; `read_bytes` is what came from the files."""

    files: Files
    read_bytes: int = 0
    _asked: set[str] = field(default_factory=set)

    @torch.no_grad()
    def fill(self, parameter: Tensor, name: str, *where: slice) -> None:
        """A part of a stored tensor (no slice: all of it) into a parameter of that part's shape.

        Raises `Unavailable` if it is not in the files in this form.
        """
        stored = self.name(name)
        part: Tensor = self.files.slices(stored)[where or slice(None)]
        if part.shape != parameter.shape:
            raise Unavailable(
                f"engine 'megatron' expects {name} as {tuple(parameter.shape)}; the files have {tuple(part.shape)}"
            )
        parameter.copy_(part)
        self.read_bytes += part.numel() * part.element_size()

    def dtype(self, name: str) -> torch.dtype:
        """In which a tensor is stored."""
        return self.files.dtype(self.name(name))

    def name(self, name: str) -> str:
        """As the files have it: with or without the prefix of the body. Raises `Unavailable`."""
        for each in (name, name.removeprefix(_PREFIX)):
            if each in self.files.places:
                self._asked.add(each)
                return each
        raise Unavailable(f"engine 'megatron' needs {name}, which is not in the files of this base model")

    def refuse_leftovers(self, *known: str) -> None:
        """Raise `Unavailable` if the files have a weight that nobody asked for: the model has more than is computed."""
        others = sorted(n for n in self.files.places.keys() - self._asked - set(known) if not n.endswith(_HARMLESS))
        if others:
            raise Unavailable(
                f"engine 'megatron' does not know {others[0]}, which is in the files of this base model",
                hint="use engine 'torch'",
            )


def fill_decoder(decoder: Any, reader: Reader, family: Family, shape: Shape) -> None:
    """Every parameter of a `TransformerBlock` of local layers, the last norm included."""
    (qkv, proj), (first, second) = shape.attention(), shape.mlp()
    for number, layer in enumerate(decoder.layers):
        at = f"{_PREFIX}layers.{number}"
        for own, name in _NORMS.items():
            reader.fill(getattr(layer, own).weight, f"{at}.{name}.weight")
        attention, mlp = layer.self_attention, layer.mlp
        if family.qk_norm:
            for own, name in _HEAD_NORMS.items():
                reader.fill(getattr(attention, own).weight, f"{at}.self_attn.{name}.weight")
        _fill_fused(attention.linear_qkv, reader, f"{at}.self_attn", qkv, bias=family.qkv_bias)
        _fill_fused(attention.linear_proj, reader, f"{at}.self_attn", proj)
        _fill_fused(mlp.linear_fc1, reader, f"{at}.mlp", first)
        _fill_fused(mlp.linear_fc2, reader, f"{at}.mlp", second)
    reader.fill(decoder.final_layernorm.weight, f"{_PREFIX}norm.weight")


def _fill_fused(fused: Any, reader: Reader, at: str, places: Sequence[Slice], *, bias: bool = False) -> None:
    """The weights of several linears into one, and their biases."""
    for place in places:
        into: list[tuple[Tensor, str, tuple[slice, ...]]] = [(fused.weight, "weight", (place.rows, place.columns))]
        if bias:
            into.append((fused.bias, "bias", (place.rows,)))
        for parameter, kind, where in into:
            # [groups, width, ...]: the rows of a linear are those of its part of each group, in order.
            part = parameter.data.view(place.groups, place.width, *parameter.shape[1:])[:, place.start : place.stop]
            own = torch.empty((part.shape[0] * part.shape[1], *part.shape[2:]), dtype=part.dtype)
            reader.fill(own, f"{at}.{place.leaf}.{kind}", *where)
            part.copy_(own.view(part.shape))
