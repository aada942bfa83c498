"""Where the properties are tried: tiny random models of many architectures, trained adapters, and their references.

The reference is another program (transformers' eager attention and PEFT, in float64, one datum at a time). Not
responsible for what is asked of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from engines.lora import Pairs, views
from engines.torch_engine.engine import TorchEngine
from schemas.operations import LoraSpec, OptimStepParams
from tests.engines.contract import train
from tests.engines.properties.data import VOCAB, Plan
from tests.support.reference import Adapter, Reference

CONTEXT = 64
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),  # norms of queries and keys
    "gemma3": ("Gemma3", {**GEMMA, "query_pre_attn_scalar": 16}),  # windows shorter than the datums, two rotary bases
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 5.0}),
    "qwen3_moe": (  # an expert sees a handful of the rows of a pass
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "phi": (
        "Phi",
        {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "resid_pdrop": 0.0},
    ),  # biases, of the head too
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.25, "hidden_dropout": 0.0}),  # fused q, k and v
}
"""Name: the architecture of transformers and what differs from `COMMON`."""

SPECS: dict[str, LoraSpec] = {
    "all": LoraSpec(rank=4, seed=1),
    "attn": LoraSpec(rank=3, seed=2, train_mlp=False, train_unembed=False),
    "mlp": LoraSpec(rank=8, seed=3, train_attn=False, train_unembed=False),
    "head": LoraSpec(rank=1, seed=4, train_attn=False, train_mlp=False),
    "attn_head": LoraSpec(rank=2, seed=5, train_mlp=False),
}


def write_model(folder: Path, name: str) -> Path:
    """A random two-layer model of the architecture, with weights large enough for every part to matter."""
    kind, changes = ARCHITECTURES[name]
    config_class = getattr(transformers, f"{'Gemma3Text' if kind == 'Gemma3' else kind}Config")
    config = config_class(**{**COMMON, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else 0.2))
    model.save_pretrained(folder)
    return folder


@dataclass
class Lab:
    """One engine on one tiny model, with a stock of trained adapters that any test may begin from.

    `exact` is the engine's `batch_invariant`: without it, sums may depend on company, and every architecture is packed.
    """

    name: str
    folder: Path = field(repr=False)
    threads: int = 1
    exact: bool = True
    engine: TorchEngine = field(init=False, repr=False)
    specs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not (self.folder / "base").exists():
            write_model(self.folder / "base", self.name)
        self.engine = self.another_engine()
        families = self.engine.info.adapter_families
        self.specs = tuple(
            name
            for name, spec in SPECS.items()
            if (families >= {"mlp"} or not spec.train_mlp) and (name != "attn_head" or "mlp" not in families)
        )
        for spec in self.specs:
            if not (self.folder / spec).exists():
                self._prepare(spec)

    def another_engine(self, **options: Any) -> TorchEngine:
        """A fresh engine on the same model."""
        options = {"dtype": "float32", "device": "cpu", "batch_invariant": self.exact, **options}
        engine = TorchEngine(self.folder / "base", threads=self.threads, **options)
        engine.load()
        return engine

    def _prepare(self, spec: str) -> None:
        self.engine.create_adapter("new", SPECS[spec])
        for seed in (1, 2):
            batch = Plan("cross_entropy", (9, 13), seed=seed).batch("new")
            train(self.engine, batch, OptimStepParams(lr=3e-2, eps=1e-8))
        self.engine.save_adapter("new", self.folder / spec, with_optimizer=True)
        self.engine.remove_adapter("new")

    def begin(self, adapter_id: str, spec: str, engine: TorchEngine | None = None) -> None:
        """A new adapter that continues from the stock's."""
        engine = engine or self.engine
        engine.load_adapter(adapter_id, self.folder / spec, with_optimizer=True, create=True)

    @contextmanager
    def adapters(self, specs: Mapping[str, str]) -> Iterator[TorchEngine]:
        """The engine with these adapters (id to spec); they are gone afterwards."""
        torch.set_num_threads(self.threads)
        try:
            for adapter_id, spec in specs.items():
                self.begin(adapter_id, spec)
            yield self.engine
        finally:
            for adapter_id in specs:
                self.engine.remove_adapter(adapter_id)
            torch.set_num_threads(1)

    def reference(self, spec: str, attention: str = "eager") -> Reference:
        """The same adapter in PEFT, in float64; callers leave its weights and gradient as they found them."""
        return _reference(self.folder, spec, attention)


@cache
def _reference(folder: Path, spec: str, attention: str) -> Reference:
    config = json.loads((folder / spec / "adapter_config.json").read_text())
    adapter = load_file(folder / spec / "adapter_model.safetensors")
    options = {"attn_implementation": attention, "experts_implementation": "eager"}
    return Reference(folder / "base", config, adapter, dtype=torch.float64, **options)


def gradient(engine: TorchEngine, adapter_id: str) -> Adapter:
    """The accumulated gradient by PEFT's names; zeros if there is none."""
    state = engine._pool.get(adapter_id)
    flat = torch.zeros_like(state.flat) if state.gradient.flat is None else state.gradient.flat.clone()
    return named(views(flat, state.weights.pairs))


def weights(engine: TorchEngine, adapter_id: str) -> Adapter:
    """The present weights by PEFT's names."""
    return {name: tensor.detach().clone() for name, tensor in named(engine.adapter_weights(adapter_id).pairs).items()}


def named(pairs: Pairs) -> Adapter:
    """The tensors by PEFT's names."""
    return {
        f"base_model.model.{module}.lora_{side}.weight": tensor
        for module, pair in pairs.items()
        for side, tensor in zip("AB", pair, strict=True)
    }


def bits(tensors: Adapter) -> dict[str, bytes]:
    """What must be equal when two adapters or gradients are the same bit for bit."""
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}
