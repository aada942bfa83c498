"""Tiny models of the families that engine `torchtitan` computes, and the skip where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.registry import get_engine
from schemas.errors import Unavailable
from schemas.operations import TrainBatch
from tests.support.reference import Reference
from tests.support.tiny_model import write_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-scaled": {"head_dim": 12, "rope_parameters": ROPE, "tie_word_embeddings": False},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": False},
    "qwen3-tied": {"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}},
}
"""Name -> what its configuration has beside `SHAPE`."""


def skip_without_titan() -> None:
    """Skip the module that calls this, with the reason, where the engine cannot run."""
    try:
        get_engine("torchtitan")
    except Unavailable as error:
        pytest.skip(f"{error.message}; {error.hint}", allow_module_level=True)


def make_model(folder: Path, name: str, seed: int = 0, **more: Any) -> Path:
    """Write the model and its tokenizer to `folder`; norms, which are 1 in a new model, are random as well."""
    import transformers

    family = {"llama": "Llama", "qwen3": "Qwen3"}[name.partition("-")[0]]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=write_tokenizer(folder), **SHAPE, **MODELS[name], **more
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.25)
                else:
                    parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def reference_gradient(folder: Path, saved: Path, batch: TrainBatch) -> tuple[list[np.ndarray], dict[str, Tensor]]:
    """Logprobs of each datum and the gradient by PEFT's names, of a saved adapter, by transformers and PEFT."""
    config = json.loads((saved / "adapter_config.json").read_text())
    reference = Reference(folder, config, load_file(saved / "adapter_model.safetensors"))
    examples = [
        {"tokens": torch.from_numpy(d.tokens), **{k: torch.from_numpy(v) for k, v in d.inputs.items()}}
        for d in batch.datums
    ]
    logprobs = reference.forward_backward(examples, batch.loss_fn)
    return [each.numpy() for each in logprobs], reference.gradient()
