"""Which models torchtitan 0.3 computes here, and its configuration of one, from the folder's own.

torchtitan has models of its own, each of one family, and reads no `config.json`. What its model of a family cannot do
is refused by name, before anything is built. Imports torchtitan only where a configuration is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import Unavailable

ROPE_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Of rotary embeddings of type `llama3`."""


@dataclass(frozen=True, slots=True)
class Family:
    """One of torchtitan's models.

    `rope_types` are the kinds of rotary embedding that it knows as Hugging Face computes them; `interleaved` says that
    it rotates neighbouring numbers of a head, where Hugging Face rotates the first half with the second.
    """

    name: str
    rope_types: tuple[str, ...]
    interleaved: bool


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama3", ("default", "llama3"), interleaved=True),
    "qwen3": Family("qwen3", ("default",), interleaved=False),
}
"""By the `model_type` of a folder's configuration."""


def family_of(config: Any) -> Family:
    """The family of a Hugging Face configuration. Raises `Unavailable` naming what torchtitan's model cannot do."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise Unavailable(
            f"engine 'torchtitan' has models for model_type {' and '.join(sorted(FAMILIES))}; this base model's is "
            f"{config.model_type!r}",
            hint="use engine 'torch' or 'fsdp' for it",
        )
    accepted: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False, None),
        "use_sliding_window": (False, None),
        "rope_type": family.rope_types,
        "partial_rotary_factor": (1.0, None),
    }
    found = {name: getattr(config, name, None) for name in accepted} | {
        name: value for name, value in _rope(config).items() if name in accepted
    }
    for name, values in accepted.items():
        if found[name] not in values:
            told = " or ".join(repr(value) for value in values if value is not None)
            raise Unavailable(
                f"engine 'torchtitan': {name} of the base model is {found[name]!r}; its {family.name} has {told}",
                hint="use engine 'torch' or 'fsdp' for it",
            )
    return family


def decoder_config(family: Family, config: Any, inner_attention: Any) -> Any:
    """torchtitan's configuration of the model; `inner_attention` is that of its attention kernel.

    No weight gets an initial value: all of them are read from files.
    """
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.param_init import skip_param_init

    model, block = _classes(family)
    none: dict[str, Callable[..., None]] = {"weight": skip_param_init, "bias": skip_param_init}
    width, heads = config.hidden_size, config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or width // heads

    def norm(size: int) -> Any:
        return RMSNorm.Config(normalized_shape=size, eps=config.rms_norm_eps, param_init=none)

    def layer() -> Any:
        return block.Config(
            attention_norm=norm(width),
            ffn_norm=norm(width),
            attention=make_gqa_config(
                dim=width,
                n_heads=heads,
                n_kv_heads=config.num_key_value_heads,
                head_dim=head_width,
                wqkv_param_init=none,
                wo_param_init=none,
                inner_attention=inner_attention,
                rope=rope,
                qk_norm=norm(head_width) if family.name == "qwen3" else None,
                fuse_qkv=False,
            ),
            feed_forward=make_ffn_config(
                dim=width, hidden_dim=config.intermediate_size, w1_param_init=none, w2w3_param_init=none
            ),
        )

    rotary = _rope(config)
    rope = (ComplexRoPE if family.interleaved else CosSinRoPE).Config(
        dim=head_width,
        max_seq_len=config.max_position_embeddings,
        theta=float(rotary["rope_theta"]),
        **_scaling(rotary),
    )
    return model.Config(
        dim=width,
        vocab_size=config.vocab_size,
        enable_weight_tying=bool(config.tie_word_embeddings),
        tok_embeddings=Embedding.Config(num_embeddings=config.vocab_size, embedding_dim=width, param_init=none),
        norm=norm(width),
        lm_head=Linear.Config(in_features=width, out_features=config.vocab_size, param_init=none),
        layers=[layer() for _ in range(config.num_hidden_layers)],
    )


def _classes(family: Family) -> tuple[Any, Any]:
    """The model's class and that of its layers."""
    if family.name == "llama3":
        from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

        return Llama3Model, Llama3TransformerBlock
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    return Qwen3Model, Qwen3TransformerBlock


def _rope(config: Any) -> dict[str, Any]:
    rope = dict(config.rope_parameters)
    return {"rope_type": "default"} | rope


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """torchtitan's names for the fields of a rotary embedding."""
    if rope["rope_type"] == "default":
        return {"scaling": "none"}
    fields = {name: rope[name] for name in ROPE_FIELDS}
    return {"scaling": "llama", "scaling_factor": fields.pop("factor"), **fields}
