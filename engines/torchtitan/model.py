"""torchtitan's decoder under the names and with the calls of a Hugging Face model, so that adapters are the same.

The decoder computes with its own layers. Where it has a linear, it finds a `Projection`, which asks the tree of Hugging
Face's names for the linear of that place: there `engines.lora.attach` puts its layers. Not responsible for building or
sharding the decoder (`loading.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.torchtitan.families import Family

_ATTENTION = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv"}
_MLP = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True, slots=True)
class BodyOutput:
    """`last_hidden_state` [rows, T, H], after the last norm."""

    last_hidden_state: Tensor


@dataclass(slots=True)
class TokenCache:
    """What stands where other models have keys and values: the tokens themselves [rows, n], to be computed again."""

    tokens: Tensor

    def reorder_cache(self, rows: Tensor) -> None:
        """Go on with these rows, in this order; one may come several times."""
        self.tokens = self.tokens.index_select(0, rows.to(self.tokens.device))


@dataclass(frozen=True, slots=True)
class LanguageModelOutput:
    """`logits` [rows, T, vocabulary]; `cache` where one was asked for."""

    logits: Tensor
    cache: TokenCache | None = None


class Projection(nn.Module):
    """Stands where the decoder has a linear; computes with whatever linear a place of the tree of names holds now.

    Args:
        linear: the decoder's own (registered here too, so that a layer still counts its weights).
        place: the module of the tree and the name in it.
        heads: its output has so many heads, whose numbers Hugging Face keeps in halves and the decoder in pairs;
            None = in the order in which they come.
    """

    def __init__(self, linear: nn.Linear, place: tuple[nn.Module, str], heads: int | None = None) -> None:
        super().__init__()
        self.linear = linear
        self._place = place
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """[rows, T, in] -> [rows, T, out]."""
        parent, name = self._place
        y: Tensor = getattr(parent, name)(x)
        return y if self._heads is None else paired(y, self._heads)


def paired(y: Tensor, heads: int) -> Tensor:
    """Within each head of the last dimension, from halves (0 1 2 | 3 4 5) to pairs (0 3 | 1 4 | 2 5)."""
    return y.view(*y.shape[:-1], heads, 2, -1).transpose(-1, -2).reshape(y.shape)


class Body(nn.Module):
    """Everything but the output head, under Hugging Face's names; computes by calling the decoder."""

    def __init__(self, decoder: Any, family: Family, masks: bool) -> None:
        super().__init__()
        self._decoder = (decoder,)  # in a tuple: its modules are registered under their other names, once
        self._masks = masks
        self.embed_tokens = decoder.tok_embeddings
        self.layers = nn.ModuleList(_layer(block, family) for block in decoder.layers.values())
        self.norm = decoder.norm
        self.rotary_emb = next(iter(decoder.layers.values())).attention.rope

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool = False) -> BodyOutput:
        """Hidden states of int64 [rows, T]. Positions that begin at 0 again begin another sequence, where the
        attention kernel can tell them apart (`TitanModel.takes_packs`); without positions, a row is one sequence."""
        if use_cache:
            raise ValueError("torchtitan's decoder keeps no cache")
        (decoder,) = self._decoder
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
        masks = decoder.get_attention_masks(position_ids) if self._masks else None
        return BodyOutput(decoder(input_ids, positions=position_ids, attention_masks=masks))

    def reset_iter_state(self) -> None:
        """After a pass that failed midway: the sharded decoder is ready for the next one."""
        self._decoder[0].reset_iter_state()


class TitanModel(nn.Module):
    """A causal language model whose body is torchtitan's.

    Args:
        decoder: sharded, on its device, with its weights; its linears are replaced in place.
        config: Hugging Face's configuration of the model, `generation` that of generation, if there is one.
        masks: whether its attention tells several sequences in a row apart.
    """

    base_model_prefix = "model"

    def __init__(self, decoder: Any, family: Family, config: Any, generation: Any, masks: bool) -> None:
        super().__init__()
        # Logits are made from hidden states in chunks, by the head's weight; the decoder only has to gather it.
        decoder._skip_lm_head = True
        self.config, self.generation_config = config, generation
        self.takes_packs = masks
        self.checkpointed_layers = list(decoder.layers.values())
        self.model = Body(decoder, family, masks)
        self.lm_head = decoder.lm_head

    @property
    def base_model(self) -> Body:
        """The model without its head."""
        return self.model

    @property
    def device(self) -> torch.device:
        """Of its weights."""
        device: torch.device = self.lm_head.weight.device
        return device

    def get_input_embeddings(self) -> Any:
        """The embedding of tokens."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        """The output head."""
        return self.lm_head

    def forward(
        self, input_ids: Tensor, use_cache: bool = False, cache: TokenCache | None = None, logits_to_keep: int = 0
    ) -> LanguageModelOutput:
        """Logits of int64 [rows, T], or of the last `logits_to_keep` tokens.

        With `use_cache`, the tokens go on where `cache` ends, and the answer has the cache for the next ones: all
        tokens are computed anew each time.
        """
        tokens = input_ids if cache is None else torch.cat([cache.tokens, input_ids], dim=1)
        hidden = self.model(tokens).last_hidden_state[:, -logits_to_keep if logits_to_keep else -input_ids.shape[1] :]
        return LanguageModelOutput(self.lm_head(hidden), TokenCache(tokens) if use_cache else None)


def _layer(block: Any, family: Family) -> nn.Module:
    """The names of a layer, whose linears the block finds here from now on."""
    attention, feed_forward = block.attention, block.feed_forward
    layer, self_attn, mlp = nn.Module(), nn.Module(), nn.Module()
    for name, own in _ATTENTION.items():
        heads = {"wq": attention.n_heads, "wk": attention.n_kv_heads}.get(own) if family.interleaved else None
        _move(attention.qkv_linear, own, (self_attn, name), heads)
    _move(attention, "wo", (self_attn, "o_proj"))
    for name, own in _MLP.items():
        _move(feed_forward, own, (mlp, name))
    if attention.q_norm is not None:
        self_attn.q_norm, self_attn.k_norm = attention.q_norm, attention.k_norm
    layer.self_attn, layer.mlp = self_attn, mlp
    layer.input_layernorm, layer.post_attention_layernorm = block.attention_norm, block.ffn_norm
    return layer


def _move(parent: nn.Module, own: str, place: tuple[nn.Module, str], heads: int | None = None) -> None:
    linear = getattr(parent, own)
    setattr(*place, linear)
    setattr(parent, own, Projection(linear, place, heads))
