"""Tiny models of the families that engine megatron knows, as folders, and workers that can be asked for checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from engines.megatron.engine import MegatronEngine
from tests.engines.gang import Watched
from workers.build import Progress, build_worker
from workers.dispatch import Dispatch, register
from workers.spec import WorkerSpec

FAMILIES = ("llama", "qwen2", "qwen3")


def make_family(folder: Path, family: str, *, tied: bool = False, **settings: Any) -> Path:
    """Random float32 weights in two layers; biases and norms are not those of a fresh model, so that they count."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.tiny_model import write_tokenizer

    folder.mkdir(parents=True)
    sizes = {
        "vocab_size": write_tokenizer(folder),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
    }
    if family == "qwen3":
        sizes["head_dim"] = 12  # not hidden size by heads
    config = AutoConfig.for_model(family, **(sizes | settings))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.25)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def checksum(engine: MegatronEngine) -> str:
    """Of every base weight that this rank has."""
    found = hashlib.sha256()
    for name, parameter in sorted(engine.model.named_parameters()):
        found.update(name.encode())
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


class Hashed(Watched):
    """As `Watched`, with checksums."""

    @register(Dispatch.ONE_TO_ALL)
    def checksums(self) -> list[str]:
        """Of the base weights, rank by rank."""
        engine = self.actor.engine
        assert isinstance(engine, MegatronEngine)
        return engine._ranks.gather(checksum(engine))


def build(spec: WorkerSpec, progress: Progress) -> Hashed:
    """As `workers.build.build_worker`."""
    worker = build_worker(spec, progress)
    return Hashed(worker.actor.engine, worker.rollout, worker.info)
