"""The model families that engine megatron computes: their settings for megatron-core, and where their weights go.

A Hugging Face checkpoint keeps q, k and v (gate and up) apart; megatron-core has them in one fused weight. `Slice` says
where in it. Whatever a family's configuration may ask for that is not computed here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from schemas.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Family:
    """How a family differs from Llama."""

    qkv_bias: bool = False
    """q, k and v have biases."""
    qk_norm: bool = False
    """q and k are normalised, head by head."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
}
"""By `model_type` of the Hugging Face configuration."""

_ROTARY = ("default", "linear", "llama3")
"""Kinds of rotary angles that are one fixed set of frequencies."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Where the outputs of one Hugging Face linear lie among those of a fused one, and what of it this rank keeps.

    The outputs [..., groups * width] of the fused one are taken as [..., groups, width]; of each group, `start:stop`
    are those of this linear, in its own order. `rows` of its weight [out, in] and `columns` are kept by this rank.
    """

    leaf: str
    groups: int
    width: int
    start: int
    stop: int
    rows: slice
    columns: slice
    out_features: int
    in_features: int

    def of(self, outputs: Tensor) -> Tensor:
        """The view [n, groups, stop - start] of fused outputs [n, groups * width]."""
        return outputs.view(-1, self.groups, self.width)[:, :, self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, and this rank's place among those that share its tensors."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int
    parts: int = 1
    part: int = 0

    @classmethod
    def of(cls, config: Any, parts: int = 1, part: int = 0) -> Shape:
        """Raises `Unavailable` if the heads or the inner width cannot be cut into so many parts."""
        hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
        inner = int(config.intermediate_size)
        for what, number in (("key and value heads", kv_heads), ("inner features", inner)):
            if number % parts:
                raise Unavailable(
                    f"tensor_parallel is {parts}; the {number} {what} of this model cannot be cut into so many parts",
                    hint=f"take a divisor of {number}",
                )
        return cls(hidden, heads, kv_heads, head_dim, inner, layers, parts, part)

    def attention(self) -> tuple[list[Slice], list[Slice]]:
        """Those behind `linear_qkv` (by groups: the queries of a key-value head, its key, its value), `linear_proj`."""
        groups, each = self.kv_heads // self.parts, self.heads // self.kv_heads * self.head_dim
        width = each + 2 * self.head_dim
        borders = {"q_proj": (0, each), "k_proj": (each, each + self.head_dim), "v_proj": (each + self.head_dim, width)}
        qkv = [
            Slice(
                leaf, groups, width, start, stop, self._own(self.kv_heads * (stop - start)), slice(None),
                self.kv_heads * (stop - start), self.hidden,
            )
            for leaf, (start, stop) in borders.items()
        ]  # fmt: skip
        return qkv, [self._whole("o_proj", self.heads * self.head_dim)]

    def mlp(self) -> tuple[list[Slice], list[Slice]]:
        """Those behind `linear_fc1` (all of gate, then all of up) and `linear_fc2`."""
        own = self.inner // self.parts
        first = [
            Slice(
                leaf, 1, 2 * own, place * own, (place + 1) * own, self._own(self.inner), slice(None),
                self.inner, self.hidden,
            )
            for place, leaf in enumerate(("gate_proj", "up_proj"))
        ]  # fmt: skip
        return first, [self._whole("down_proj", self.inner)]

    def _own(self, length: int) -> slice:
        return slice(self.part * length // self.parts, (self.part + 1) * length // self.parts)

    def _whole(self, leaf: str, inputs: int) -> Slice:
        """A linear whose inputs, not outputs, are shared by the ranks."""
        return Slice(leaf, 1, self.hidden, 0, self.hidden, slice(None), self._own(inputs), self.hidden, inputs)


def family_of(config: Any) -> Family:
    """The family of a configuration. Raises `Unavailable`, naming what is accepted, for another one or for a setting
    that is not computed here."""
    kind = config.model_type
    if kind not in FAMILIES:
        _refuse(f"model_type is {kind!r}", ", ".join(FAMILIES))
    rotary = getattr(config, "rope_parameters", None) or {}
    rope_type = rotary.get("rope_type", "default")
    if rope_type not in _ROTARY:
        _refuse(f"rope_type is {rope_type!r}", ", ".join(_ROTARY))
    if config.hidden_act != "silu":
        _refuse(f"hidden_act is {config.hidden_act!r}", "silu")
    if getattr(config, "attention_bias", False):
        _refuse("attention_bias is true", "false")
    if getattr(config, "mlp_bias", False):
        _refuse("mlp_bias is true", "false")
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"}):
        _refuse(f"layer_types has {', '.join(others)}", "full_attention")
    return FAMILIES[kind]


def _refuse(found: str, accepted: str) -> None:
    raise Unavailable(
        f"engine 'megatron' cannot compute this base model: {found}; accepted: {accepted}", hint="use engine 'torch'"
    )


def transformer_settings(config: Any, shape: Shape, dtype: torch.dtype, on_cpu: bool) -> dict[str, Any]:
    """Arguments of `megatron.core.transformer.TransformerConfig`.

    Weights are in `dtype`, the residual stream, norms and attention in float32. Without fusions: their kernels need a
    GPU and libraries of their own.
    """
    family = family_of(config)
    activation: Callable[[Tensor], Tensor] = functional.silu
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.inner,
        "tensor_model_parallel_size": shape.parts,
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config.rms_norm_eps),
        "gated_linear_unit": True,
        "activation_func": activation,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "fp32_residual_connection": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": on_cpu,
        "perform_initialization": False,
    }
