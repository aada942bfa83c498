"""One tiny base model, saved adapters and a reference for all tests of samplers that other programs do the work for.

The tests that start vLLM need its environment: `make engine-venv NAME=vllm`, or VLLM_PYTHON=an interpreter that has it.
Without it they are skipped, and say so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.lora import AdapterWeights, Router
from engines.lora_targets import attach, init_adapter, linear_families
from engines.peft_format import write_adapter
from engines.sampling.base import SamplingEngine
from engines.sampling.vllm.environment import DEFAULT_PYTHON, VllmEnvironment, find_vllm
from engines.sampling.vllm.sampler import VllmSampler
from schemas.base_model_info import BaseModelInfo
from schemas.errors import TinsmithError, Unavailable
from schemas.operations import LoraSpec, Sample, SampleDelta, SampledSequence, SampleResult, SamplingParams
from tests.support.tiny_model import make_tiny_model

PROMPT = [5, 9, 200, 17, 40, 41]
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, stop=())
CONTEXT = 256


@dataclass
class World:
    """A base model, a reference pass over it, and adapters in PEFT folders."""

    folder: Path
    model: Any
    router: Router
    tokenizer: Any
    info: BaseModelInfo
    adapters: dict[str, AdapterWeights]
    folders: dict[str, str]

    def forced(self, tokens: list[int], adapter: str | None = None, temperature: float = 1.0) -> np.ndarray:
        """log softmax(logits / T) [len, V] of one plain pass over the whole sequence."""
        weights = None if adapter is None else self.adapters[adapter]
        with torch.no_grad(), self.router.use([(weights, slice(0, 1))]):
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float() / temperature, -1).numpy()

    def expected(
        self, prompt: list[int], tokens: list[int], adapter: str | None = None, temperature: float = 1.0
    ) -> np.ndarray:
        """The reference's logprobs of drawn tokens."""
        rows = self.forced(prompt + tokens, adapter, temperature)[len(prompt) - 1 : -1]
        return rows[np.arange(len(tokens)), tokens]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("foreign")
    # vLLM's attention on a CPU has no heads narrower than 32.
    folder = make_tiny_model(root / "model", hidden=128, heads=4, kv_heads=2, context_length=CONTEXT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    router = attach(model)
    adapters, folders = {}, {}
    specs = {
        "a": LoraSpec(8, 1, train_unembed=False),
        "b": LoraSpec(4, 2, train_mlp=False, train_unembed=False),
        "c": LoraSpec(2, 5, train_attn=False, train_unembed=False),
        "head": LoraSpec(8, 3),
        "wide": LoraSpec(24, 4, train_unembed=False),
    }
    for name, spec in specs.items():
        weights = init_adapter(model, spec)
        noise = torch.Generator().manual_seed(spec.seed)
        for _, up in weights.pairs.values():
            up.normal_(0.0, 0.05, generator=noise)
        adapters[name], folders[name] = weights, str(root / name)
        write_adapter(
            root / name, spec=spec, weights=weights, base_model="tiny", all_linears=list(linear_families(model))
        )
    info = BaseModelInfo(
        vocab_size=259,
        context_length=CONTEXT,
        dtype="float32",
        num_layers=2,
        parameters=0,
        eos_token_ids=(2,),
        adapter_families=frozenset({"attn", "mlp", "unembed"}),
    )
    return World(folder, model, router, AutoTokenizer.from_pretrained(folder), info, adapters, folders)


@pytest.fixture(scope="session")
def vllm_environment() -> VllmEnvironment:
    """The environment that has vLLM; without it the test is skipped, with the reason."""
    python = Path(os.environ.get("VLLM_PYTHON", DEFAULT_PYTHON))
    try:
        return find_vllm(python)
    except Unavailable as error:
        pytest.skip(f"vLLM was NOT tested: {error.message} ({error.hint})")


@pytest.fixture(scope="session")
def vllm(world: World, vllm_environment: VllmEnvironment) -> Iterator[VllmSampler]:
    """One vLLM process for all tests: it takes half a minute to start."""
    sampler = VllmSampler(
        world.folder,
        world.info,
        world.tokenizer,
        python=vllm_environment.python,
        max_rows=8,
        max_loaded_adapters=2,
        max_rank=16,
        cache_bytes=64 << 20,
        threads=1,
    )
    yield sampler
    sampler.close()


@dataclass
class Outcome:
    """How requests ended, and what was streamed."""

    ended: dict[str, SampleResult | TinsmithError]
    deltas: dict[str, list[SampleDelta]]

    def result(self, name: str) -> SampleResult:
        found = self.ended[name]
        assert isinstance(found, SampleResult), found
        return found

    def sequence(self, name: str, index: int = 0) -> SampledSequence:
        return self.result(name).sequences[index]


def sample(prompt: list[int], params: SamplingParams = GREEDY, **more: Any) -> Sample:
    return Sample(np.array(prompt, np.int64), params, **more)


def run(engine: SamplingEngine, steps: int = 10_000, **requests: Sample) -> Outcome:
    """Add all requests, then step until all have ended."""
    outcome = Outcome({}, {})
    for name, request in requests.items():
        engine.add(name, request)
    for _ in range(steps):
        if not engine.load.active:
            break
        step = engine.step()
        outcome.ended |= step.ended
        for name, new in step.deltas.items():
            outcome.deltas.setdefault(name, []).extend(new)
    assert outcome.ended.keys() == requests.keys()
    return outcome
