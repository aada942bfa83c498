"""Model families that scale, cap, fuse or window where a plain Llama does not: training and sampling against PEFT.

Whoever computes the output head or the attention by hand loses exactly these details, silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from engines.sampling.torch_sampler import TorchSampler
from engines.torch_engine.engine import TorchEngine
from schemas.operations import OptimStepParams, SamplingParams
from tests.engines.batches import make_batch
from tests.engines.contract import SPEC, accumulate
from tests.engines.test_reference import ADAM, Reference, export, ours
from tests.engines.test_torch_sampler import run, sample, sequences, succeeded
from tests.support.reference import furthest, relative, tell
from tests.support.tiny_model import write_tokenizer

COMMON = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {"tie_word_embeddings": False},  # biases in the attention
    "Qwen3": {"head_dim": 16},  # norms of queries and keys
    "Mistral": {"head_dim": 12, "sliding_window": 8},
    "Gemma2": {"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0},
    "Gemma3": {"head_dim": 16, "sliding_window": 8},  # scaled embeddings, (1 + w) norms
    "Granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    "Cohere": {"logit_scale": 0.25},  # parallel attention and MLP
    "Phi3": {},  # fused projections
}
PROMPTS = {"long": list(range(40, 61)), "short": [7, 99, 200]}


def make_family(folder: Path, family: str) -> Path:
    """A random two-layer model of the family, with weights large enough for every part to matter."""
    vocabulary = write_tokenizer(folder)
    kind = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **FAMILIES[family]}, vocab_size=vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 2 else 0.1))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_sampling(family: str, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    folder = make_family(tmp_path / "base", family)
    engine = TorchEngine(folder, device="cpu", threads=1)
    engine.load()
    engine.create_adapter("a", SPEC)
    reference = Reference(folder, export(engine, "a", tmp_path / "start"))
    for seed in range(5):
        batch = make_batch("a", seed=seed, lengths=(9, 30, 1))
        result = accumulate(engine, batch)
        scores = [reference.logprobs(datum) for datum in batch.datums]
        found = [torch.as_tensor(lp) for lp in result.logprobs]
        tell(f"{family}: logprobs", furthest(found, [lp.detach() for lp in scores]), 2e-5)
        reference.loss(batch).backward()
        gradient = {name: p.grad for name, p in reference.named.items() if p.grad is not None}
        tell(f"{family}: gradient, relative", relative(ours(engine, "a", "gradient"), gradient), 1e-4)
        engine.optimizer_step("a", OptimStepParams(**ADAM))
        reference.step(0.0)
    weights = ours(engine, "a", "weights")
    expected = [parameter.detach() for parameter in reference.named.values()]
    tell(f"{family}: adapter after 5 steps", furthest([weights[name] for name in reference.named], expected), 1e-5)

    adapter = export(engine, "a", tmp_path / "adapter")
    reference = Reference(folder, adapter)
    rollout = TorchSampler(engine.model, engine.router, AutoTokenizer.from_pretrained(folder))
    greedy, drawn = (
        SamplingParams(max_tokens=12, temperature=0.0, stop=()),
        SamplingParams(max_tokens=12, temperature=0.7, seed=3, stop=()),
    )
    ended = run(rollout, {k: sample(p, greedy, adapter_folder=str(adapter)) for k, p in PROMPTS.items()})
    for name, prompt in PROMPTS.items():
        ids = torch.tensor([prompt])
        generated = reference.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
        assert sequences(ended[name]) == [generated[0, len(prompt) :].tolist()]
    ended = run(rollout, {k: sample(p, drawn, adapter_folder=str(adapter)) for k, p in PROMPTS.items()})
    for name, prompt in PROMPTS.items():
        sequence = succeeded(ended[name]).sequences[0]
        with torch.no_grad():
            logits = reference.model(torch.tensor([[*prompt, *sequence.tokens.tolist()]])).logits[0]
        forced = torch.log_softmax(logits / 0.7, -1)[len(prompt) - 1 : -1]
        picked = forced.gather(1, torch.tensor(sequence.tokens.tolist())[:, None])[:, 0]
        tell(
            f"{family}: sampled logprobs at temperature 0.7",
            furthest([torch.as_tensor(sequence.logprobs)], [picked]),
            4e-5,
        )
