"""The torch rollout engine against Hugging Face's own `generate` and teacher-forced passes, on a tiny random Llama."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

from engines.lora import AdapterWeights, Router, Segments
from engines.lora_targets import attach, init_adapter, linear_families
from engines.peft_format import read_adapter, write_adapter
from engines.sampling import torch_sampler
from engines.sampling.torch_sampler import TorchSampler
from engines.torch_engine.engine import TorchEngine
from schemas.errors import EngineFailure, InvalidRequest, OutOfMemory, TinsmithError
from schemas.operations import Datum, LoraSpec, Sample, SampledSequence, SampleResult, SamplingParams, TrainBatch
from tests.support.tiny_model import make_tiny_model

PROMPTS = [[5, 9, 200], [17] * 23, list(range(60, 71)), [250], list(range(3, 43))]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, stop=())


@dataclass
class World:
    """One base model with a router, an untouched twin of it, and two saved adapters."""

    model: Any
    router: Router
    twin: Any
    tokenizer: Any
    adapters: dict[str, AdapterWeights]
    folders: dict[str, str]

    def engine(self, **options: Any) -> TorchSampler:
        return TorchSampler(self.model, self.router, self.tokenizer, **options)

    def forced(self, tokens: list[int], adapter: str | None = None, temperature: float = 1.0) -> torch.Tensor:
        """log softmax(logits / T) [len, V] of one plain pass over the whole sequence, no cache."""
        weights = None if adapter is None else self.adapters[adapter]
        with torch.no_grad(), self.router.use([(weights, slice(0, 1))]):
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float() / temperature, -1)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("rollout")
    folder = make_tiny_model(root / "model", context_length=128)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    twin = copy.deepcopy(model)
    router = attach(model)
    adapters, folders = {}, {}
    for name, spec in {"a": LoraSpec(8, 1), "b": LoraSpec(4, 2, train_mlp=False), "c": LoraSpec(2, 3)}.items():
        weights = init_adapter(model, spec)
        noise = torch.Generator().manual_seed(spec.seed)
        for _, up in weights.pairs.values():
            up.normal_(0.0, 0.05, generator=noise)
        adapters[name], folders[name] = weights, str(root / name)
        write_adapter(
            root / name, spec=spec, weights=weights, base_model="tiny", all_linears=list(linear_families(model))
        )
    return World(model, router, twin, AutoTokenizer.from_pretrained(folder), adapters, folders)


def run(engine: TorchSampler, requests: Mapping[str, Sample]) -> dict[str, SampleResult | TinsmithError]:
    ended: dict[str, SampleResult | TinsmithError] = {}
    for name, request in requests.items():
        try:
            engine.add(name, request)
        except TinsmithError as error:
            ended[name] = error
    ended |= finish(engine)
    assert list(ended.keys() ^ requests.keys()) == []
    return ended


def finish(engine: TorchSampler) -> dict[str, SampleResult | TinsmithError]:
    """Step until nothing is left."""
    ended: dict[str, SampleResult | TinsmithError] = {}
    while engine.load.active:
        ended |= engine.step().ended
    return ended


def start(engine: TorchSampler, requests: Mapping[str, Sample]) -> TorchSampler:
    for name, request in requests.items():
        engine.add(name, request)
    return engine


def active(engine: TorchSampler) -> set[str]:
    return {*engine._running, *(name for name, _ in engine._waiting)}


def succeeded(result: SampleResult | TinsmithError) -> SampleResult:
    assert isinstance(result, SampleResult), result
    return result


def sequences(result: SampleResult | TinsmithError) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in succeeded(result).sequences]


def sample(prompt: list[int], params: SamplingParams = GREEDY, **more: Any) -> Sample:
    return Sample(np.array(prompt, np.int64), params, **more)


def hf_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


# -- the numbers -----------------------------------------------------------------------------------------------------
def test_greedy_equals_generate_for_ragged_prompts_in_one_batch(world: World) -> None:
    limits = [12, 3, 7, 1, 12]  # rows leave the batch at different times
    requests = {
        str(i): sample(p, replace(GREEDY, max_tokens=n)) for i, (p, n) in enumerate(zip(PROMPTS, limits, strict=True))
    }
    ended = run(world.engine(), requests)
    for i, (prompt, count) in enumerate(zip(PROMPTS, limits, strict=True)):
        ours = sequences(ended[str(i)])[0]
        expected = _greedy_by_hand(world, prompt, count)
        assert ours == expected
        if 2 not in expected:  # generate() is told to go on, which it does by never choosing end of sequence
            assert ours == hf_greedy(world.twin, prompt, count)
        assert succeeded(ended[str(i)]).sequences[0].stop_reason == "length"


def _greedy_by_hand(world: World, prompt: list[int], count: int, adapter: str | None = None) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(world.forced(tokens, adapter)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_equal_a_teacher_forced_pass(world: World, temperature: float) -> None:
    params = SamplingParams(max_tokens=15, temperature=temperature, seed=4, stop=())
    adapters: list[str | None] = ["a", None, "b", "a", "c"]
    requests = {
        str(i): sample(
            p, params, adapter_folder=name and world.folders[name], topk_sample_logprobs=i, num_samples=1 + i % 2
        )
        for i, (p, name) in enumerate(zip(PROMPTS, adapters, strict=True))
    }
    ended = run(world.engine(), requests)
    for i, (prompt, name) in enumerate(zip(PROMPTS, adapters, strict=True)):
        result = succeeded(ended[str(i)])
        for sequence in result.sequences:
            tokens = sequence.tokens.tolist()
            all_logprobs = world.forced(prompt + tokens, name, temperature or 1.0)[len(prompt) - 1 : -1]
            expected = all_logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
            np.testing.assert_allclose(sequence.logprobs, expected, atol=2e-5)
            assert sequence.logprobs.dtype == np.float32
            assert sequence.tokens.dtype == np.int32
            if i == 0:
                assert sequence.topk is None
            else:
                assert sequence.topk is not None
                np.testing.assert_allclose(sequence.topk.logprobs, all_logprobs.topk(i).values.numpy(), atol=2e-5)


def test_plain_logprobs_are_those_of_the_bare_logits(world: World) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.5, seed=1, stop=())
    tempered, plain = (
        succeeded(run(world.engine(sample_logprobs=kind), {"x": sample(PROMPTS[0], params)})["x"]).sequences[0]
        for kind in ("tempered", "plain")
    )
    assert tempered.tokens.tolist() == plain.tokens.tolist()
    tokens = plain.tokens.tolist()
    expected = world.forced(PROMPTS[0] + tokens)[len(PROMPTS[0]) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])
    np.testing.assert_allclose(plain.logprobs, expected[:, 0].numpy(), atol=2e-5)
    assert abs(plain.logprobs - tempered.logprobs).max() > 0.01


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_request_can_have_its_plain_logprobs_beside_the_reported_ones(world: World, temperature: float) -> None:
    params = SamplingParams(max_tokens=6, temperature=temperature, seed=1, stop=())
    batch = {
        "asked": sample(PROMPTS[0], params, plain_logprobs=True, num_samples=2, adapter_folder=world.folders["a"]),
        "not": sample(PROMPTS[1], params),
        "longer": sample(PROMPTS[2], replace(params, max_tokens=9), plain_logprobs=True),
    }
    results = run(world.engine(), batch)
    assert succeeded(results["not"]).sequences[0].plain_logprobs is None
    for name, adapter, prompt in (("asked", "a", PROMPTS[0]), ("longer", None, PROMPTS[2])):
        for sequence in succeeded(results[name]).sequences:
            tokens, plain = sequence.tokens.tolist(), sequence.plain_logprobs
            assert plain is not None
            assert (plain.dtype, plain.shape) == (np.float32, sequence.logprobs.shape)
            scored = world.forced(prompt + tokens, adapter)[len(prompt) - 1 : -1]
            expected = scored.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            np.testing.assert_allclose(plain, expected.numpy(), atol=2e-5)
            assert (abs(plain - sequence.logprobs).max() > 0.01) == (temperature == 0.5)


@pytest.mark.parametrize("prefill_tokens", [1, 256])
@pytest.mark.parametrize("length", [43, 64, 116])
def test_prompt_scores_equal_a_plain_pass(world: World, prefill_tokens: int, length: int) -> None:
    prompt = [(7 * i) % 250 + 3 for i in range(length)]
    targets = np.full((len(prompt) - 1, 2), -1)
    targets[::3, 0], targets[5, 1] = 77, 0
    asked = sample(
        prompt,
        SamplingParams(max_tokens=1, temperature=0.3, seed=0),
        adapter_folder=world.folders["a"],
        prompt_logprobs=True,
        topk_prompt_logprobs=4,
        target_prompt_logprobs=targets,
    )
    requests = {
        "all": asked,
        "tail": replace(asked, prompt_logprobs_last_n=6, target_prompt_logprobs=None),
        "none": sample(prompt, adapter_folder=world.folders["a"]),
        "base": sample(prompt, prompt_logprobs=True),
    }
    ended = run(world.engine(prefill_tokens=prefill_tokens), requests)
    full = world.forced(prompt, "a")[:-1]
    expected = full.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()
    result = succeeded(ended["all"])
    assert result.prompt_logprobs is not None
    assert np.isnan(result.prompt_logprobs[0])
    np.testing.assert_allclose(result.prompt_logprobs[1:], expected, atol=2e-5)
    assert result.topk_prompt_logprobs is not None
    np.testing.assert_allclose(result.topk_prompt_logprobs.logprobs[1:], full.topk(4).values.numpy(), atol=2e-5)
    assert result.target_prompt_logprobs is not None
    np.testing.assert_allclose(result.target_prompt_logprobs[::3, 0], full[::3, 77].numpy(), atol=2e-5)
    assert (result.target_prompt_logprobs[targets < 0] == 0).all()
    tail = succeeded(ended["tail"]).prompt_logprobs
    assert tail is not None
    assert np.isnan(tail[:-6]).all()
    np.testing.assert_allclose(tail[-6:], expected[-6:], atol=2e-5)
    assert succeeded(ended["none"]).prompt_logprobs is None
    assert sequences(ended["none"])[0] == _greedy_by_hand(world, prompt, 12, "a")
    base = succeeded(ended["base"]).prompt_logprobs
    assert base is not None
    plain = world.forced(prompt)[:-1].gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    np.testing.assert_allclose(base[1:], plain.numpy(), atol=2e-5)


def test_adapters_in_one_batch_equal_each_alone(world: World) -> None:
    names: list[str | None] = ["b", None, "a", "c", "b"]
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=11, stop=())
    requests = {
        str(i): sample(p, params, adapter_folder=n and world.folders[n], num_samples=2)
        for i, (p, n) in enumerate(zip(PROMPTS, names, strict=True))
    }
    together = run(world.engine(), requests)
    for name, request in requests.items():
        alone = succeeded(run(world.engine(), {name: request})[name])
        for one, other in zip(succeeded(together[name]).sequences, alone.sequences, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
    base = run(world.engine(), {"0": replace(requests["0"], adapter_folder=None)})["0"]
    assert sequences(base) != sequences(together["0"])  # the adapters do matter


@pytest.mark.parametrize("kind", ["sliding", "hybrid"])
def test_models_with_other_caches_are_decoded_request_by_request(world: World, kind: str) -> None:
    torch.manual_seed(0)
    if kind == "sliding":
        common = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = MistralForCausalLM(MistralConfig(vocab_size=259, num_key_value_heads=2, sliding_window=6, **common))
    else:
        model = _hybrid_model()
    model = model.eval()
    expected = [hf_greedy(model, prompt, 9) for prompt in PROMPTS[:3]]
    engine = TorchSampler(model, attach(model), world.tokenizer)
    ended = run(engine, {str(i): sample(p, replace(GREEDY, max_tokens=9)) for i, p in enumerate(PROMPTS[:3])})
    assert [sequences(ended[str(i)])[0] for i in range(3)] == expected
    drawn = sample(PROMPTS[0], SamplingParams(max_tokens=9, seed=1, stop=()), num_samples=3, prompt_logprobs=True)
    result = succeeded(run(engine, {"x": drawn})["x"])
    for sequence in result.sequences:
        tokens = sequence.tokens.tolist()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPTS[0] + tokens]), use_cache=False).logits[0]
        forced = torch.log_softmax(logits, -1)[len(PROMPTS[0]) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])
        np.testing.assert_allclose(sequence.logprobs, forced[:, 0].numpy(), atol=2e-5)


def _hybrid_model() -> Any:
    """Linear attention (a recurrent state) and full attention in turn."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=259,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=0,
            mlp_only_layers=[0, 1],
        )
    )


# -- seeds and stops -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 2**64 + 3])
def test_seeds_repeat_in_any_company_and_differ_among_samples(world: World, seed: int) -> None:
    params = SamplingParams(max_tokens=8, seed=seed, stop=())
    request = sample(PROMPTS[2], params, num_samples=6)
    first = sequences(run(world.engine(), {"x": request})["x"])
    company = {"y": sample(PROMPTS[1], params), "x": request, "z": sample(PROMPTS[4], SamplingParams(max_tokens=20))}
    assert sequences(run(world.engine(), company)["x"]) == first
    assert len({tuple(tokens) for tokens in first}) == 6
    # sample i does not depend on how many are drawn
    assert sequences(run(world.engine(), {"x": replace(request, num_samples=2)})["x"]) == first[:2]
    other = replace(request, params=replace(params, seed=seed + 1))
    assert sequences(run(world.engine(), {"x": other})["x"]) != first


def test_without_a_seed_every_request_is_drawn_anew(world: World) -> None:
    request = sample(PROMPTS[2], SamplingParams(max_tokens=8, stop=()))
    ended = run(world.engine(), {"x": request, "y": request})
    assert sequences(ended["x"]) != sequences(ended["y"])
    fixed = [run(world.engine(entropy=lambda: 5), {"x": request})["x"] for _ in range(2)]
    assert sequences(fixed[0]) == sequences(fixed[1])


def stopped(world: World, stop: Any, prompt: list[int] = PROMPTS[0], count: int = 40) -> SampledSequence:
    params = SamplingParams(max_tokens=count, temperature=1.0, seed=8, stop=stop)
    return succeeded(run(world.engine(), {"x": sample(prompt, params)})["x"]).sequences[0]


def test_stop_tokens_and_strings_end_the_sequence_once(world: World) -> None:
    free = stopped(world, ())
    tokens = free.tokens.tolist()
    assert (len(tokens), free.stop_reason) == (40, "length")
    by_token = stopped(world, (tokens[17],))
    end = tokens.index(tokens[17])
    assert (by_token.tokens.tolist(), by_token.stop_reason) == (tokens[: end + 1], "stop")
    # A string over two neighbouring printable bytes, each a token of its own.
    words = [world.tokenizer.decode([token]) for token in tokens]
    at = next(i for i in range(5, 39) if all(len(words[j]) == 1 and words[j].isascii() for j in (i, i + 1)))
    string = words[at] + words[at + 1]
    by_string = stopped(world, ("no such text anywhere", string))
    text_end = next(i for i in range(1, 40) if words[i - 1] + words[i] == string)
    assert (by_string.tokens.tolist(), by_string.stop_reason) == (tokens[: text_end + 1], "stop")
    assert len(by_string.logprobs) == text_end + 1


def test_end_of_sequence_stops_only_by_default(world: World) -> None:
    # Among random weights end of sequence is one token of many, so look for a seed that draws it.
    seed = next(s for s in range(200) if 2 in _free_tokens(world, s))
    tokens = _free_tokens(world, seed)
    by_default = _drawn(world, seed, None)
    assert by_default.tokens.tolist() == tokens[: tokens.index(2) + 1]
    assert by_default.stop_reason == "stop"
    assert _drawn(world, seed, (258,)).tokens.tolist() == tokens[: (*tokens, 258).index(258) + 1]


def _drawn(world: World, seed: int, stop: Any) -> SampledSequence:
    params = SamplingParams(max_tokens=30, temperature=1.5, seed=seed, stop=stop)
    return succeeded(run(world.engine(), {"x": sample(PROMPTS[3], params)})["x"]).sequences[0]


def _free_tokens(world: World, seed: int) -> list[int]:
    return _drawn(world, seed, ()).tokens.tolist()


# -- limits and refusals ---------------------------------------------------------------------------------------------
def test_without_max_tokens_it_runs_to_the_end_of_the_context(world: World) -> None:
    result = succeeded(run(world.engine(), {"x": sample([7] * 100, replace(GREEDY, max_tokens=None))})["x"])
    assert len(result.sequences[0].tokens) == 28
    assert result.sequences[0].stop_reason == "length"


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"prompt": np.array([], np.int64)}, "prompt", ["empty"]),
        ({"prompt": np.array([3, 259])}, "prompt", ["259", "0 to 258"]),
        ({"prompt": np.array([-1])}, "prompt", ["-1"]),
        ({"params": SamplingParams(max_tokens=127)}, "sampling_params.max_tokens", ["3", "127", "128"]),
        ({"prompt": np.array([5] * 128), "params": SamplingParams()}, "prompt", ["128"]),
        ({"params": SamplingParams(max_tokens=0)}, "sampling_params.max_tokens", ["0", "at least 1"]),
        ({"params": SamplingParams(4, temperature=-0.1)}, "sampling_params.temperature", ["-0.1"]),
        ({"params": SamplingParams(4, temperature=float("nan"))}, "sampling_params.temperature", ["nan"]),
        ({"params": SamplingParams(4, top_p=0.0)}, "sampling_params.top_p", ["0.0"]),
        ({"params": SamplingParams(4, top_p=float("nan"))}, "sampling_params.top_p", ["nan"]),
        ({"params": SamplingParams(4, top_k=-2)}, "sampling_params.top_k", ["-2"]),
        ({"params": SamplingParams(4, seed=-1)}, "sampling_params.seed", ["-1"]),
        ({"params": SamplingParams(4, stop=("",))}, "sampling_params.stop", ["empty"]),
        ({"num_samples": 0}, "num_samples", ["0"]),
        ({"topk_sample_logprobs": 260}, "topk_sample_logprobs", ["260", "259"]),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n", ["3", "1 to 2"]),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n", ["prompt_logprobs"]),
        ({"target_prompt_logprobs": np.zeros((3, 1), np.int64)}, "target_prompt_logprobs", ["[3, 1]", "[2, K]"]),
        ({"target_prompt_logprobs": np.full((2, 1), -2)}, "target_prompt_logprobs", ["-2"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_and_alone(
    world: World, change: dict[str, Any], field: str, words: list[str]
) -> None:
    good = sample(PROMPTS[0], SamplingParams(max_tokens=4, temperature=0))
    ended = run(world.engine(), {"bad": replace(good, **change), "good": good})
    error = ended["bad"]
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert all(word in error.message for word in words), error.message
    assert isinstance(ended["good"], SampleResult)


# -- the same bits in any company ------------------------------------------------------------------------------------
def bits(result: SampleResult | TinsmithError) -> list[tuple[bytes, bytes]]:
    """Tokens and logprobs, to the last bit."""
    return [(each.tokens.tobytes(), each.logprobs.tobytes()) for each in succeeded(result).sequences]


def mixed(world: World, count: int, seed: int) -> dict[str, Sample]:
    """Requests of any kind."""
    rng = np.random.default_rng(seed)
    requests: dict[str, Sample] = {}
    for i in range(count):
        beginning = [[11] * 70, list(range(5, 75)), []][rng.integers(3)]
        prompt = [*beginning, *rng.integers(3, 259, rng.integers(1, 30)).tolist()]
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 14)),
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.3])),
            top_p=float(rng.choice([1.0, 0.9])),
            top_k=int(rng.choice([-1, 20])),
            seed=int(rng.integers(1 << 40)),
            stop=() if rng.random() < 0.7 else None,
        )
        folder = rng.choice(["a", "b", "c", ""])
        requests[f"{seed}-{i}"] = sample(
            prompt,
            params,
            num_samples=int(rng.choice([1, 1, 2, 5])),
            adapter_folder=world.folders[folder] if folder else None,
            prompt_logprobs=bool(rng.random() < 0.2),
        )
    return requests


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_gives_each_request_the_bits_that_it_has_alone(world: World, seed: int) -> None:
    """In a crowd that joins over time, with little room (rows wait, some are put aside) and with shared beginnings."""
    requests = mixed(world, 24, seed)
    alone = {
        name: bits(run(world.engine(prefix_tokens=0), {name: request})[name]) for name, request in requests.items()
    }
    engine = world.engine(max_rows=12, max_tokens=1280, prefill_tokens=64)
    ended: dict[str, SampleResult | TinsmithError] = {}
    for name, request in requests.items():
        engine.add(name, request)
        ended |= engine.step().ended
    ended |= finish(engine)
    assert {name: bits(result) for name, result in ended.items()} == alone


def test_samples_of_one_request_do_not_depend_on_how_many_there_are(world: World) -> None:
    request = sample(PROMPTS[2], SamplingParams(max_tokens=8, seed=5, stop=()), num_samples=20)
    many = bits(run(world.engine(), {"x": request})["x"])
    for count in (1, 3):
        assert bits(run(world.engine(), {"x": replace(request, num_samples=count)})["x"]) == many[:count]


def test_a_known_beginning_is_not_read_again(world: World) -> None:
    prompt = [(5 * i) % 250 + 3 for i in range(100)]
    request = sample(prompt, SamplingParams(max_tokens=9, seed=1, stop=()), cache_domain="p")
    engine = world.engine()
    first, again = (run(engine, {"x": request})["x"] for _ in range(2))
    assert bits(first) == bits(again)
    assert [succeeded(one).prompt_cache_hit_tokens for one in (first, again)] == [0, 64]
    exact = run(engine, {"x": sample(prompt[:64], request.params, cache_domain="p")})["x"]
    assert succeeded(exact).prompt_cache_hit_tokens == 0  # its last token's logits are needed
    for other in (
        replace(request, cache_domain="q"),
        replace(request, adapter_folder=world.folders["a"]),
        replace(request, prompt=np.array([4, *prompt[1:]])),
        replace(request, prompt_logprobs=True),  # every position's logits are needed
    ):
        assert succeeded(run(engine, {"x": other})["x"]).prompt_cache_hit_tokens == 0
    scored = run(engine, {"x": replace(request, prompt_logprobs=True, prompt_logprobs_last_n=20)})["x"]
    assert succeeded(scored).prompt_cache_hit_tokens == 64
    stats = engine.take_stats()
    assert stats.cached_tokens == 128
    assert engine.load.prefix_tokens > 0


def test_the_youngest_is_put_aside_when_rows_outgrow_the_room(world: World, tmp_path: Path) -> None:
    def roomy(**options: Any) -> TorchSampler:
        """Positions beyond what the tiny model was made for are as good as any others here."""
        engine = world.engine(**options)
        engine._facts = replace(engine._facts, context_length=512)
        return engine

    params = SamplingParams(max_tokens=180, temperature=1.0, seed=3, stop=())
    requests = {str(i): sample([9 + i] * 20, params) for i in range(4)}
    alone = {name: bits(run(roomy(), {name: request})[name]) for name, request in requests.items()}
    engine = start(roomy(max_tokens=512, aside_folder=tmp_path / "aside"), requests)
    ended: dict[str, SampleResult | TinsmithError] = {}
    most = aside = 0
    while engine.load.active:
        ended |= engine.step().ended
        most, aside = max(most, engine.load.tokens), max(aside, engine.load.preempted)
    assert {name: bits(result) for name, result in ended.items()} == alone
    assert aside >= 1
    assert most <= 512
    assert list((tmp_path / "aside").iterdir()) == []


def test_what_can_never_fit_is_refused_with_the_numbers(world: World) -> None:
    with pytest.raises(InvalidRequest, match="room for 384") as caught:
        world.engine(max_tokens=384).add("x", sample([3] * 20, replace(GREEDY, max_tokens=80), num_samples=4))
    assert caught.value.code == "sample_too_large"


def test_streams_tell_every_token_once(world: World) -> None:
    request = sample(PROMPTS[0], SamplingParams(max_tokens=7, seed=2, stop=()), num_samples=3, stream=True)
    engine = start(world.engine(), {"x": request, "quiet": replace(request, stream=False)})
    told: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ended: dict[str, SampleResult | TinsmithError] = {}
    while engine.load.active:
        step = engine.step()
        assert set(step.deltas) <= {"x"}
        for delta in step.deltas.get("x", []):
            told[delta.index] += delta.tokens.tolist()
        ended |= step.ended
    assert [told[i] for i in range(3)] == sequences(ended["x"]) == sequences(ended["quiet"])


# -- life of a batch -------------------------------------------------------------------------------------------------
def test_a_step_draws_one_token_of_each_row(world: World) -> None:
    requests = {"short": sample(PROMPTS[0], replace(GREEDY, max_tokens=2)), "long": sample(PROMPTS[1])}
    engine = start(world.engine(), requests)
    ended = [set(engine.step().ended) for _ in range(13)]  # the first step only reads the prompts
    assert ended == [set(), set(), {"short"}, *[set()] * 9, {"long"}]
    assert engine.load.active == 0
    assert engine.step().ended == {}


def test_requests_join_a_running_batch_and_change_nothing(world: World) -> None:
    requests = {str(i): sample(p) for i, p in enumerate(PROMPTS)}
    expected = {n: sequences(r) for n, r in run(world.engine(), requests).items()}
    engine = world.engine()
    ended: dict[str, SampleResult | TinsmithError] = {}
    for name, request in requests.items():
        engine.add(name, request)
        for _ in range(3):
            ended |= engine.step().ended
    ended |= finish(engine)
    assert {n: sequences(r) for n, r in ended.items()} == expected


def test_a_long_prompt_is_read_over_several_steps_and_can_be_cancelled(world: World) -> None:
    requests = {
        "short": sample(PROMPTS[0]),
        "long": sample([9] * 116, replace(GREEDY, max_tokens=5)),
        "last": sample([4]),
    }
    expected = run(world.engine(), requests)
    engine = start(world.engine(prefill_tokens=16, prefix_tokens=0), requests)
    assert engine.step().ended == {}
    assert engine._running["long"].position == 64  # never less than a block, never off the grid
    assert sequences(finish(engine)["long"]) == sequences(expected["long"])
    engine = start(world.engine(prefill_tokens=16), requests)
    engine.step()
    engine.cancel("long")
    assert active(engine) == {"short", "last"}
    assert sequences(finish(engine)["last"]) == sequences(expected["last"])


def test_a_cancelled_request_leaves_the_others_as_they_were(world: World) -> None:
    requests = {str(i): sample(p, adapter_folder=world.folders["a"]) for i, p in enumerate(PROMPTS)}
    engine = world.engine(max_loaded_adapters=1)
    expected = sequences(run(engine, requests)["4"])
    start(engine, requests)
    engine.cancel("0")
    engine.cancel("unknown")
    ended = dict(engine.step().ended)
    engine.cancel("1")
    engine.cancel("3")
    assert active(engine) == {"2", "4"}
    ended |= finish(engine)
    assert set(ended) == {"2", "4"}
    assert sequences(ended["4"]) == expected
    assert not engine._adapters._users  # every use has ended


def test_least_recently_used_adapters_leave_unless_in_use(world: World) -> None:
    engine = world.engine(max_loaded_adapters=2)

    def use(*names: str) -> None:
        run(engine, {n: sample(PROMPTS[0], adapter_folder=world.folders[n]) for n in names})

    use("a")
    use("b")
    use("a")
    use("c")
    assert engine.loaded_adapters == (world.folders["a"], world.folders["c"])
    start(engine, {n: sample(PROMPTS[0], adapter_folder=world.folders[n]) for n in "abc"})
    while len(engine._running) < 3:
        engine.step()
    assert len(engine.loaded_adapters) == 3  # all in use: none may go
    finish(engine)
    assert len(engine.loaded_adapters) == 2


def test_a_broken_checkpoint_fails_alone_and_names_no_path(world: World, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in Path(world.folders["a"]).iterdir():
        content = bytearray(file.read_bytes())
        if file.name == "adapter_model.safetensors":
            content[-1] ^= 0xFF
        (damaged / file.name).write_bytes(content)
    requests = {
        "damaged": sample(PROMPTS[0], adapter_folder=str(damaged)),
        "missing": sample(PROMPTS[0], adapter_folder=str(tmp_path / "nowhere")),
        "good": sample(PROMPTS[0], adapter_folder=world.folders["a"]),
    }
    ended = run(world.engine(), requests)
    for name in ("damaged", "missing"):
        error = ended[name]
        assert isinstance(error, TinsmithError)
        assert str(tmp_path) not in f"{error.message} {error.hint}"
    assert sequences(ended["good"]) == sequences(run(world.engine(), {"x": requests["good"]})["x"])


def test_an_adapter_of_another_model_is_refused(world: World, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "other", hidden=64)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = TorchSampler(other, attach(other), world.tokenizer)
    error = run(engine, {"x": sample(PROMPTS[0], adapter_folder=world.folders["a"])})["x"]
    assert isinstance(error, InvalidRequest)
    assert "does not fit" in error.message


def test_an_adapter_that_gives_no_numbers_fails_alone(world: World) -> None:
    huge = copy.deepcopy(world.adapters["a"])
    for _, up in huge.pairs.values():
        up.fill_(1e30)
    engine = world.engine(load_adapter=lambda folder: huge if folder.name == "huge" else world.adapters["b"])
    good = sample(PROMPTS[1], SamplingParams(max_tokens=8, seed=1, stop=()), adapter_folder="b")
    ended = run(engine, {"bad": replace(good, adapter_folder="huge"), "good": good})
    assert isinstance(ended["bad"], EngineFailure)
    assert "finite" in ended["bad"].message
    assert sequences(ended["good"]) == sequences(run(engine, {"x": good})["x"])


def test_a_pass_that_fails_half_way_costs_only_the_request_at_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = {str(i): sample(p, adapter_folder=world.folders["ab"[i % 2]]) for i, p in enumerate(PROMPTS)}
    requests["1"] = replace(requests["1"], adapter_folder=world.folders["c"])
    engine = world.engine()
    expected = run(engine, requests)
    layer = world.model.model.layers[1].mlp
    forward = layer.forward

    def fails_for_c(x: torch.Tensor) -> torch.Tensor:
        """Memory runs out in layer 1, when layer 0 has already grown its cache."""
        users = [adapter for adapter, _ in world.router.segments or ()]
        if any(user is bad for user in users):
            raise torch.OutOfMemoryError("no memory for c")
        return forward(x)

    bad = engine._adapters.acquire(world.folders["c"])
    monkeypatch.setattr(layer, "forward", fails_for_c)
    ended = run(engine, requests)
    assert isinstance(ended["1"], OutOfMemory)
    for name in ("0", "2", "3", "4"):
        assert sequences(ended[name]) == sequences(expected[name])


def test_unexpected_failures_do_not_leak_their_text() -> None:
    error = torch_sampler._as_failure(RuntimeError("/secret/path exploded"))
    assert isinstance(error, EngineFailure)
    assert "secret" not in error.message


# -- together with the training engine -------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("bfloat16", 0.15)])
def test_sampler_and_trainer_give_the_same_logprobs(world: World, tmp_path: Path, dtype: str, bound: float) -> None:
    """The promised gap at temperature 1, largest over all tokens: batched decoding against one plain pass."""
    engine = TorchEngine(make_tiny_model(tmp_path / "model"), dtype=dtype, device="cpu")
    engine.load()
    spec = LoraSpec(8, 5)
    engine.create_adapter("run", spec)
    engine.save_adapter("run", tmp_path / "fresh", with_optimizer=False)
    weights = read_adapter(tmp_path / "fresh").weights
    for _, up in weights.pairs.values():
        up.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(0))
    names = list(linear_families(engine.model))
    write_adapter(tmp_path / "noisy", spec=spec, weights=weights, base_model="tiny", all_linears=names)
    engine.load_adapter("run", tmp_path / "noisy", with_optimizer=False, create=False)
    rollout = TorchSampler(engine.model, engine.router, world.tokenizer)
    params = SamplingParams(max_tokens=20, seed=3, stop=())
    requests = {
        str(i): sample(p, params, adapter_folder=str(tmp_path / "noisy"), num_samples=2, prompt_logprobs=True)
        for i, p in enumerate(PROMPTS[:3])
    }
    gaps = []
    for i, result in run(rollout, requests).items():
        prompt = PROMPTS[int(i)]
        prompt_logprobs = succeeded(result).prompt_logprobs
        assert prompt_logprobs is not None
        for sequence in succeeded(result).sequences:
            tokens = np.array(prompt + sequence.tokens.tolist())
            datum = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)})
            trained = engine.forward(TrainBatch("run", (datum,), "cross_entropy", backward=False)).logprobs[0]
            sampled = np.concatenate([prompt_logprobs[1:], sequence.logprobs])
            gaps.append(abs(trained - sampled).max())
    assert max(gaps) <= bound
    assert engine.info.dtype == dtype


def test_rows_of_one_adapter_stand_together(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """However requests arrive, a pass has one segment per adapter: each costs a small product per layer."""
    seen: list[int] = []
    use = Router.use

    def counted(router: Router, segments: Segments) -> AbstractContextManager[None]:
        seen.append(len({id(adapter) for adapter, _ in segments if adapter is not None}))
        assert seen[-1] == sum(adapter is not None for adapter, _ in segments)
        return use(router, segments)

    monkeypatch.setattr(Router, "use", counted)
    names = ["a", "b", "a", "b", "a"]
    pairs = enumerate(zip(PROMPTS, names, strict=True))
    engine = world.engine()
    for name in "ab":
        run(engine, {name: sample([4], replace(GREEDY, max_tokens=1), adapter_folder=world.folders[name])})
    seen.clear()
    run(engine, {str(i): sample(p, adapter_folder=world.folders[n]) for i, (p, n) in pairs})
    assert set(seen) == {2}


def test_engines_in_threads_of_one_process_do_not_meet(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Servers in one process (notebooks, tests) have an engine each; what one pass is over must not be the other's."""
    model = copy.deepcopy(world.twin)
    other = replace(world, model=model, router=attach(model))
    params = SamplingParams(max_tokens=48, temperature=1.0, stop=(), seed=5)
    requests = {str(number): sample(prompt, params) for number, prompt in enumerate(PROMPTS)}

    def drawn(one: World) -> list[list[list[int]]]:
        ended = run(one.engine(), requests)
        return [sequences(ended[name]) for name in requests]

    alone = drawn(world)
    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # let the threads take turns within every pass
    try:
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(drawn, (world, other)))
    finally:
        sys.setswitchinterval(often)
    assert both == [alone, alone]
    assert not caplog.records, "a pass failed and was tried again"
