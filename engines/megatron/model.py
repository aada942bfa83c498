"""A megatron-core `GPTModel` behind the surface of a Hugging Face causal model, which is what the shared code calls.

megatron-core computes the embedding, the layers and the last norm, one sequence after the other; its linears are found
under their Hugging Face paths (`model.layers.0.self_attn.q_proj`). The output head is a plain linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import GENERATION_CONFIG_NAME

from engines.fsdp.loading import Files
from engines.loading_errors import reading_base_model
from engines.megatron.adapted import AdaptedLinear, Place
from engines.megatron.families import Shape, Slice, family_of, transformer_settings
from engines.megatron.weights import Reader, fill_decoder
from schemas.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states [rows, T, H] after the last norm."""

    last_hidden_state: Tensor


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits [rows, n, vocab] of the newest tokens; `cache` is to be given with the next ones."""

    logits: Tensor
    cache: Seen | None


@dataclass(slots=True)
class Seen:
    """Instead of keys and values: the tokens so far [rows, n]. What follows is computed from all of them again."""

    tokens: Tensor

    def reorder_cache(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.tokens = self.tokens[rows.to(self.tokens.device)]


class Body(nn.Module):
    """Everything below the head. `layers` has the parts of the fused linears, `gpt` computes."""

    def __init__(self, gpt: Any, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.gpt = gpt

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Hidden:
        """Of token ids [rows, T], each row a sequence from its start."""
        length = input_ids.shape[1]
        hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool, device=input_ids.device).triu_(1)
        positions = torch.arange(length, device=input_ids.device).expand_as(input_ids)
        return Hidden(self.gpt(input_ids, positions, hidden_from))


class MegatronForCausalLM(nn.Module):
    """See the module. `config` and `generation_config` are Hugging Face's."""

    base_model_prefix = "model"
    takes_packs = False
    """Attention of the local layers is causal over a whole row; it knows no borders between sequences."""

    def __init__(self, body: Body, head: nn.Linear, config: Any, generation_config: Any) -> None:
        super().__init__()
        self.model = body
        self.lm_head = head
        self.config, self.generation_config = config, generation_config

    @property
    def base_model(self) -> Body:
        """The body."""
        return self.model

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.get_input_embeddings().weight.device

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of token embeddings [vocab, H]."""
        table: nn.Embedding = self.model.gpt.embedding.word_embeddings
        return table

    def get_output_embeddings(self) -> nn.Module:
        """The head (wrapped, once adapters are attached)."""
        return self.lm_head

    @property
    def checkpointed_layers(self) -> list[nn.Module]:
        """See `checkpointing.decoder_layers`."""
        return list(self.model.gpt.decoder.layers)

    def forward(
        self, input_ids: Tensor, use_cache: bool = False, cache: Seen | None = None, logits_to_keep: int = 0
    ) -> Logits:
        """Logits after the tokens [rows, T] that follow those of the cache; of the last few only, if asked."""
        tokens = input_ids if cache is None else torch.cat([cache.tokens, input_ids], 1)
        hidden = self.model(tokens).last_hidden_state[:, -(logits_to_keep or input_ids.shape[1]) :]
        return Logits(self.lm_head(hidden), Seen(tokens) if use_cache else None)


class NoHead(nn.Module):
    """In place of `GPTModel.output_layer`, which needs all logits at once: hidden states go out as they are."""

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:
        """As `ColumnParallelLinear`."""
        return hidden, None


def load_model(folder: Path, dtype: torch.dtype, device: torch.device, group: Any) -> tuple[MegatronForCausalLM, int]:
    """The model of the folder, frozen, and the bytes that were read of its files.

    Args:
        dtype: of the weights of linears, and of an embedding that is the head as well; norms are float32, other
            embeddings as they are stored.
        group: megatron-core's tensor parallel group.

    Raises `Unavailable`, naming what is not known here; details of other failures go to the log only.
    """
    with reading_base_model():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        family, shape = family_of(config), Shape.of(config, group.size(), group.rank())
        reader = Reader(Files.of(folder, "megatron"))
        gpt = _gpt(config, shape, dtype, device)
        fill_decoder(gpt.decoder, reader, family, shape)
        table, head = _ends(config, reader, dtype)
        gpt.embedding.word_embeddings, gpt.output_layer = table, NoHead()
        reader.refuse_leftovers(*(["lm_head.weight"] if config.tie_word_embeddings else []))
        layers = _hugging_face_tree(gpt, shape, group if group.size() > 1 else None)
        generation = GenerationConfig.from_model_config(config)
        if (folder / GENERATION_CONFIG_NAME).exists():
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        model = MegatronForCausalLM(Body(gpt, layers), head, config, generation)
    return model.eval().requires_grad_(False).to(device), reader.read_bytes


def _gpt(config: Any, shape: Shape, dtype: torch.dtype, device: torch.device) -> Any:
    """A `GPTModel` whose parameters have no values yet; its embedding is a placeholder."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    settings = TransformerConfig(**transformer_settings(config, shape, dtype, device.type == "cpu"))
    gpt = GPTModel(
        settings,
        get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=settings.qk_layernorm),
        vocab_size=shape.parts,
        max_sequence_length=int(config.max_position_embeddings),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    rotary = LlamaRotaryEmbedding(config)
    if rotary.attention_scaling != 1.0:
        raise Unavailable("engine 'megatron' knows no scaling of attention by its rotary angles")
    gpt.rotary_pos_emb.inv_freq = rotary.inv_freq.detach().clone().to(device)
    return gpt


def _ends(config: Any, reader: Reader, dtype: torch.dtype) -> tuple[nn.Embedding, nn.Linear]:
    """The embedding and the head, whole on every rank, in the precision of `precision.convert`."""
    name, tied = "model.embed_tokens.weight", bool(config.tie_word_embeddings)
    own = dtype if tied or dtype == torch.float32 else reader.dtype(name)
    table = nn.Embedding(config.vocab_size, config.hidden_size, dtype=own)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device="meta")
    reader.fill(table.weight, name)
    if tied:
        head.weight = table.weight
    else:
        head.to_empty(device="cpu")
        reader.fill(head.weight, "lm_head.weight")
    return table, head


def _hugging_face_tree(gpt: Any, shape: Shape, group: Any) -> nn.ModuleList:
    """Puts `AdaptedLinear` in place of the fused linears; returns the modules in which their parts are, by layer."""
    layers = nn.ModuleList()
    for layer in gpt.decoder.layers:
        parents = {"self_attn": layer.self_attention, "mlp": layer.mlp}
        fused = {
            "self_attn": zip(("linear_qkv", "linear_proj"), shape.attention(), strict=True),
            "mlp": zip(("linear_fc1", "linear_fc2"), shape.mlp(), strict=True),
        }
        tree = nn.Module()
        for block, linears in fused.items():
            at = nn.Module()
            for leaf, places in linears:
                _replace(parents[block], leaf, at, places, group)
            tree.add_module(block, at)
        layers.append(tree)
    return layers


def _replace(parent: nn.Module, leaf: str, at: nn.Module, places: Sequence[Slice], group: Any) -> None:
    fused = getattr(parent, leaf)
    for place in places:
        at.add_module(place.leaf, Place(fused, place))
    setattr(parent, leaf, AdaptedLinear(fused, at, places, group, row=leaf in ("linear_proj", "linear_fc2")))
