"""Tiny models for engines that take what Hugging Face writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny_model import write_tokenizer


def make_model(folder: Path, config: Callable[..., Any], model: Callable[[Any], Any], **options: Any) -> Path:
    """A random two-layer model of that kind of configuration, with a head of its own; norms are random as well."""
    folder.mkdir()
    chosen = config(
        vocab_size=write_tokenizer(folder),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=2,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        made = model(chosen)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_(0.0, 0.25) if parameter.ndim == 2 else parameter.uniform_(0.5, 1.5)
    made.save_pretrained(folder)
    return folder
