"""Model families that scale, cap, fuse or window where a plain Llama does not: training and sampling against PEFT.

Whoever computes the output head or the attention by hand loses exactly these details, silently.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer

from engines.lora_targets import attach
from engines.sampling.torch_sampler import TorchSampler
from engines.torch_engine.engine import TorchEngine
from schemas.operations import OptimStepParams, SamplingParams
from tests.engines.batches import make_batch
from tests.engines.contract import SPEC, accumulate
from tests.engines.test_reference import ADAM, Reference, export, ours
from tests.engines.test_sampling_properties import nothing_fails
from tests.engines.test_torch_sampler import finish, run, sample, sequences, succeeded
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
SAMPLED: dict[str, tuple[bool, dict[str, Any]]] = {
    "Llama": (True, {}),
    **{family: (True, options) for family, options in FAMILIES.items()},
    "Gemma": (True, {"head_dim": 16}),
    "Cohere2": (True, {"sliding_window": 8}),
    "Olmo3": (True, {"sliding_window": 8}),
    "SmolLM3": (True, {}),  # every fourth layer without positions
    "GPTNeoX": (True, {}),
    "OPT": (True, {"ffn_dim": 80, "word_embed_proj_dim": 48}),  # learned positions
    "Qwen3Moe": (
        True,
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "Mixtral": (True, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "GptOss": (
        False,  # attention sinks
        {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "DeepseekV3": (
        False,  # keys and values of different widths
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "Bloom": (False, {}),  # positions in the scores
    "Mamba": (False, {"state_size": 8}),
    "Mamba2": (False, {"state_size": 8, "num_heads": 4, "head_dim": 24, "n_groups": 1}),
    "FalconH1": (False, {"mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8}),
    "Jamba": (
        False,
        {
            "num_experts": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "Bamba": (False, {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8, "attn_layer_indices": [1]}),
    "Lfm2": (False, {"layer_types": ["conv", "full_attention"]}),
}
"""Whether requests share passes, and the configuration."""
PROMPTS = {"long": list(range(40, 61)), "short": [7, 99, 200]}


def make_family(folder: Path, family: str) -> Path:
    """A random two-layer model of the family, with weights large enough for every part to matter."""
    random_model(family, write_tokenizer(folder), FAMILIES[family]).save_pretrained(folder)
    return folder


def random_model(family: str, vocabulary: int, options: dict[str, Any]) -> Any:
    """In memory. What rules the speed of recurrences stays as the family starts it."""
    kind = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{kind}Config")(**{**COMMON, **options}, vocab_size=vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not name.endswith(("A_log", "dt_bias")):
                    parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim >= 2 else 0.1))
    return model.eval()


@pytest.mark.parametrize("family", SAMPLED)
def test_a_mix_that_joins_over_time_equals_generate(family: str) -> None:
    """Ragged prompts, read in pieces beside rows that draw; greedy tokens as `generate` has them, logprobs as one plain
    pass over everything has them."""
    shares, options = SAMPLED[family]
    model = random_model(family, 259, options)
    twin = copy.deepcopy(model)
    sampler = TorchSampler(model, attach(model), None, prefill_tokens=16)
    assert sampler._pass.shares == shares
    prompts = [[5, 9, 200], [17] * 23, list(range(60, 71)), [250], [(7 * i) % 250 + 3 for i in range(140)]]
    greedy = SamplingParams(max_tokens=14, temperature=0.0, stop=())
    drawn = SamplingParams(max_tokens=9, temperature=0.8, seed=4, stop=())
    ended: dict[str, Any] = {}
    with nothing_fails():
        for i, prompt in enumerate(prompts):
            sampler.add(f"greedy {i}", sample(prompt, greedy))
            sampler.add(f"drawn {i}", sample(prompt, drawn, num_samples=2, prompt_logprobs=True))
            ended |= sampler.step().ended
        ended |= finish(sampler)
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        generated = twin.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False, eos_token_id=None
        )
        assert sequences(ended[f"greedy {i}"]) == [generated[0, len(prompt) :].tolist()]
        result = succeeded(ended[f"drawn {i}"])
        for sequence in result.sequences:
            tokens = torch.tensor([*prompt, *sequence.tokens.tolist()])
            with torch.no_grad():
                logits = twin(tokens[None], use_cache=False).logits[0, :-1]
            own = tokens[1:, None]
            plain = torch.log_softmax(logits, -1).gather(1, own)[: len(prompt) - 1, 0]
            tempered = torch.log_softmax(logits / 0.8, -1).gather(1, own)[len(prompt) - 1 :, 0]
            assert result.prompt_logprobs is not None
            scores = np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])
            np.testing.assert_allclose(scores, torch.cat([plain, tempered]).numpy(), atol=5e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_and_sampling(family: str, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    folder = make_family(tmp_path / "base", family)
    engine = TorchEngine(folder, device="cpu", threads=1, dtype="float32")
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
