"""Properties of the sampler: what it draws is distributed as it should be, and no company, want of room, cancelled or
broken neighbour changes a bit of anybody's numbers."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engines.lora import AdapterWeights
from engines.lora_targets import attach, init_adapter, linear_families
from engines.peft_format import write_adapter
from engines.sampling import torch_sampler
from engines.sampling.adapter_cache import AdapterCache
from engines.sampling.kv import Holder
from engines.sampling.torch_sampler import TorchSampler
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.invariance import arrange_rows
from schemas.errors import Cancelled, EngineFailure, TinsmithError
from schemas.operations import (
    Datum,
    LoraSpec,
    OptimStepParams,
    Sample,
    SampleResult,
    SampleStats,
    SamplingParams,
    TrainBatch,
)
from tests.engines.contract import train
from tests.engines.test_torch_sampler import bits, finish, run, sample, sequences, succeeded
from tests.support.tiny_model import make_tiny_model

# -- distribution ----------------------------------------------------------------------------------------------------
SMALL = 7
DRAWS = 4000


@dataclass(frozen=True)
class Rule:
    temperature: float
    top_k: int = -1
    top_p: float = 1.0

    def probabilities(self, logits: torch.Tensor) -> np.ndarray:
        """The textbook distribution, float64 [V]: temperature, then top-k, then the smallest set that holds top_p."""
        p = torch.softmax(logits.double() / self.temperature, -1).numpy()
        order = np.argsort(-p, kind="stable")
        kept = order[: self.top_k] if self.top_k > 0 else order
        mass = p[kept] / p[kept].sum()
        kept = kept[: int(np.searchsorted(np.cumsum(mass), self.top_p)) + 1]
        result = np.zeros_like(p)
        result[kept] = p[kept] / p[kept].sum()
        return result


@pytest.fixture(scope="module")
def small_model() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=SMALL,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=0,
            )
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0.0, 0.4)
    return model


@pytest.fixture(scope="module")
def small(small_model: Any) -> TorchSampler:
    twin = copy.deepcopy(small_model)
    return TorchSampler(twin, attach(twin), None, max_rows=64, max_tokens=64 * (DRAWS + 1))


def pairs_expected(model: Any, prompt: list[int], rule: Rule) -> np.ndarray:
    """Probabilities of the first two tokens [V, V]."""
    with torch.no_grad():
        first = rule.probabilities(model(torch.tensor([prompt])).logits[0, -1])
        second = model(torch.tensor([[*prompt, token] for token in range(SMALL)])).logits[:, -1]
    return np.stack([first[token] * rule.probabilities(second[token]) for token in range(SMALL)])


def assert_distributed(tokens: list[list[int]], expected: np.ndarray) -> None:
    """Chi-square over all pairs; rare ones count together. Five deviations are less than one chance in ten thousand."""
    counts = np.zeros_like(expected)
    np.add.at(counts, tuple(np.array(tokens).T), 1)
    assert counts[expected == 0].sum() == 0
    wanted = expected * len(tokens)
    common, rare = wanted >= 5, (wanted > 0) & (wanted < 5)
    cells = [*zip(counts[common], wanted[common], strict=True), (counts[rare].sum(), wanted[rare].sum())]
    statistic = sum((found - due) ** 2 / due for found, due in cells if due > 0)
    freedom = max(1, len(cells) - 1)
    assert statistic <= freedom + 5 * np.sqrt(2 * freedom)


RULES = [Rule(1.0), Rule(0.5), Rule(1.8), Rule(1.0, top_p=0.7), Rule(1.3, 4, 0.85), Rule(0.7, 2)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_samples_of_one_request_follow_the_distribution(small: TorchSampler, small_model: Any, rule: Rule) -> None:
    params = SamplingParams(2, rule.temperature, rule.top_k, rule.top_p, seed=12, stop=())
    tokens = sequences(run(small, {"x": sample([3, 5], params, num_samples=DRAWS)})["x"])
    assert_distributed(tokens, pairs_expected(small_model, [3, 5], rule))


@pytest.mark.parametrize("rule", [Rule(1.0), Rule(1.2, top_p=0.8)], ids=str)
def test_seeds_of_many_requests_follow_the_distribution(small: TorchSampler, small_model: Any, rule: Rule) -> None:
    """Neighbouring seeds, as clients count them, give streams that have nothing to do with one another."""
    params = SamplingParams(2, rule.temperature, rule.top_k, rule.top_p, stop=())
    ended = run(small, {str(i): sample([4], replace(params, seed=i)) for i in range(1500)})
    tokens = [sequences(ended[str(i)])[0] for i in range(1500)]
    assert_distributed(tokens, pairs_expected(small_model, [4], rule))
    following = [[one[0], other[0]] for one, other in zip(tokens[::2], tokens[1::2], strict=True)]
    first = pairs_expected(small_model, [4], rule).sum(1)
    assert_distributed(following, np.outer(first, first))


# -- random mixes ----------------------------------------------------------------------------------------------------
BEGINNINGS: tuple[list[int], ...] = ([], [11] * 70, [(7 * i) % 250 + 3 for i in range(140)])


class Crowd:
    """One tiny model, three adapters, and a fixed stock of requests with the bits that each has alone."""

    def __init__(self, root: Path) -> None:
        folder = make_tiny_model(root / "model", context_length=512)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.router = attach(self.model)
        linears = [self.model.get_submodule(name).weight for name in linear_families(self.model)]
        arrange_rows(self.router, linears, self.model.lm_head.weight)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.root = root
        self.adapters: dict[str, AdapterWeights] = {}
        for name, spec in {"a": LoraSpec(8, 1), "b": LoraSpec(4, 2, train_mlp=False), "c": LoraSpec(2, 3)}.items():
            self.adapters[name] = self.write(name, spec)
        self.stock = [self._request(np.random.default_rng(i), growing=i >= 30) for i in range(40)]
        """The last ten draw many tokens: rows that outgrow the room that they began with."""
        self.alone = cache(self._alone)

    def write(self, name: str, spec: LoraSpec) -> AdapterWeights:
        weights = init_adapter(self.model, spec)
        noise = torch.Generator().manual_seed(spec.seed)
        for _, up in weights.pairs.values():
            up.normal_(0.0, 0.05, generator=noise)
        names = list(linear_families(self.model))
        write_adapter(self.root / name, spec=spec, weights=weights, base_model="tiny", all_linears=names)
        return weights

    def engine(self, **options: Any) -> TorchSampler:
        return TorchSampler(self.model, self.router, self.tokenizer, **options)

    def _request(self, rng: np.random.Generator, *, growing: bool) -> Sample:
        beginning = BEGINNINGS[0 if growing else rng.integers(3)]
        prompt = [*beginning, *rng.integers(3, 259, rng.integers(1, 62)).tolist()]
        scored = bool(rng.random() < 0.25)
        params = SamplingParams(
            max_tokens=int(rng.choice([120, 140] if growing else [1, 4, 12, 20])),
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.3])),
            top_p=float(rng.choice([1.0, 0.9])),
            top_k=int(rng.choice([-1, 20])),
            seed=int(rng.integers(1 << 40)),
            stop=() if growing else [(), None, (77, 90, 101)][rng.integers(3)],
        )
        folder = str(rng.choice(["a", "b", "c", ""]))
        return sample(
            prompt,
            params,
            num_samples=int(rng.choice([1, 1, 2] if growing else [1, 1, 2, 3])),
            adapter_folder=str(self.root / folder) if folder else None,
            prompt_logprobs=scored,
            prompt_logprobs_last_n=min(3, len(prompt) - 1) if scored and len(prompt) > 1 else None,
            topk_sample_logprobs=int(rng.choice([0, 0, 3])),
            cache_domain=str(rng.choice(["p", "q"])),
        )

    def _alone(self, index: int) -> tuple[Any, ...]:
        return everything(run(self.engine(prefix_tokens=0), {"x": self.stock[index]})["x"])


def everything(result: SampleResult | TinsmithError) -> tuple[Any, ...]:
    """All numbers of a result, to the last bit."""
    found = succeeded(result)
    tops = [each.topk for each in found.sequences]
    scores = b"" if found.prompt_logprobs is None else found.prompt_logprobs.tobytes()
    return bits(found), scores, [None if t is None else (t.ids.tobytes(), t.logprobs.tobytes()) for t in tops]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Crowd:
    return Crowd(tmp_path_factory.mktemp("crowd"))


@contextmanager
def nothing_fails() -> Iterator[None]:
    """No pass may fail: one that is done again request by request gives right numbers, slowly."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment,method-assign]
    logger = logging.getLogger(torch_sampler.__name__)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


def assert_empty(engine: TorchSampler, aside: Path) -> None:
    load = engine.load
    assert (load.active, load.waiting, load.rows, load.tokens, load.preempted) == (0, 0, 0, 0, 0)
    assert not engine._adapters._users
    assert not engine._adapters._reading
    assert not aside.exists() or list(aside.iterdir()) == []


def events(first: int, last: int, most: int) -> st.SearchStrategy[list[tuple[int, int, int | None]]]:
    """Each: a request of this part of the stock arrives, so many steps pass, perhaps an earlier one is cancelled."""
    victim = st.one_of(st.none(), st.none(), st.integers(0, 9))
    return st.lists(st.tuples(st.integers(first, last), st.integers(0, 4), victim), min_size=3, max_size=most)


def taken(
    samples: Sequence[Sample], ended: Mapping[str, SampleResult | TinsmithError], cancelled: Mapping[str, Cancelled]
) -> tuple[int, int, int]:
    """Tokens of prompts that were read and that came from the cache, and tokens drawn: as the requests tell it."""
    results = {name: succeeded(result) for name, result in ended.items()}
    cached = {name: result.prompt_cache_hit_tokens for name, result in results.items()}
    read = sum(len(samples[int(name)].prompt) - cached[name] for name in results)
    rows = sum(len(sequence.tokens) for result in results.values() for sequence in result.sequences)
    return (
        read + sum(stopped.prompt_tokens - stopped.cached_tokens for stopped in cancelled.values()),
        sum(cached.values()) + sum(stopped.cached_tokens for stopped in cancelled.values()),
        rows + sum(stopped.drawn_tokens for stopped in cancelled.values()),
    )


def drawn(stats: SampleStats) -> tuple[int, int, int]:
    """The same as the passes tell it."""
    return stats.prompt_tokens, stats.cached_tokens, stats.drawn_tokens


MIXES = {
    "many": (180, events(0, 29, 10), (896, 1088), {"waiting": 200, "cached": 50, "cancelled": 50, "cut off": 20}),
    "growing": (20, events(30, 39, 6), (512, 640), {"waiting": 200, "put aside": 100}),
}


@pytest.mark.parametrize("part", [pytest.param(1, marks=pytest.mark.exhaustive), 4], ids=["all", "a quarter"])
@pytest.mark.parametrize("kind", MIXES)
def test_random_mixes_give_everybody_the_bits_that_it_has_alone(
    crowd: Crowd, tmp_path: Path, kind: str, part: int
) -> None:
    """Arrivals, cancellations and budgets at random; requests wait, are put aside and share beginnings."""
    count, arrivals, budgets, least = MIXES[kind]
    count = count // part
    seen: Counter[str] = Counter()
    aside = tmp_path / "aside"

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    @given(
        events=arrivals,
        rows=st.integers(3, 10),
        tokens=st.sampled_from(budgets),
        prefill=st.sampled_from([1, 64, 256]),
        loaded=st.integers(1, 3),
    )
    def mix(events: list[tuple[int, int, int | None]], rows: int, tokens: int, prefill: int, loaded: int) -> None:
        engine = crowd.engine(
            max_rows=rows, max_tokens=tokens, prefill_tokens=prefill, max_loaded_adapters=loaded, aside_folder=aside
        )
        ended: dict[str, SampleResult | TinsmithError] = {}
        cancelled: dict[str, Cancelled] = {}

        def step() -> None:
            new = engine.step().ended
            assert not new.keys() & (cancelled.keys() | ended.keys())
            ended.update(new)
            load = engine.load
            assert load.tokens <= tokens
            assert load.rows <= rows
            assert load.preempted == (len(list(aside.iterdir())) if aside.exists() else 0)
            seen["waiting"] += load.waiting > 0
            seen["put aside"] += load.preempted > 0

        for place, (index, steps, victim) in enumerate(events):
            engine.add(str(place), crowd.stock[index])
            for _ in range(steps):
                step()
            if victim is not None and victim <= place and str(victim) not in ended:
                stopped = engine.cancel(str(victim))
                assert (stopped is None) == (str(victim) in cancelled)
                cancelled |= {} if stopped is None else {str(victim): stopped}
        while engine.load.active:
            step()
        for place, (index, _, _) in enumerate(events):
            if str(place) in cancelled:
                assert str(place) not in ended
            else:
                assert everything(ended[str(place)]) == crowd.alone(index)
        seen["cached"] += sum(succeeded(result).prompt_cache_hit_tokens > 0 for result in ended.values())
        seen["cancelled"] += len(cancelled)
        seen["cut off"] += sum(stopped.drawn_tokens > 0 for stopped in cancelled.values())
        assert taken([crowd.stock[index] for index, _, _ in events], ended, cancelled) == drawn(engine.take_stats())
        seen["mixes"] += 1
        assert_empty(engine, aside)

    with nothing_fails():
        mix()
    assert seen["mixes"] >= count
    assert all(seen[what] >= number // part**3 for what, number in least.items()), seen


# -- cancelled in the middle -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("after", [0, 1, 3, 8, 40, 110])
def test_cancelling_everything_at_any_time_leaves_nothing_behind(crowd: Crowd, tmp_path: Path, after: int) -> None:
    engine = crowd.engine(max_rows=8, max_tokens=704, prefill_tokens=64, aside_folder=tmp_path / "aside")
    params = SamplingParams(max_tokens=160, seed=1, stop=())
    requests = {
        str(i): sample([5 + i] * (30 + 35 * (i % 3)), params, adapter_folder=str(crowd.root / "abc"[i % 3]))
        for i in range(6)
    }
    for name, request in requests.items():
        engine.add(name, request)
    put_aside = 0
    for _ in range(after):
        engine.step()
        put_aside = max(put_aside, engine.load.preempted)
    assert engine.load.active == 6
    assert put_aside >= 1 or after < 110
    for name in requests:
        engine.cancel(name)
    assert_empty(engine, tmp_path / "aside")
    again = everything(run(engine, {"x": crowd.stock[0]})["x"])
    assert again == crowd.alone(0)


def test_what_is_read_for_cancelled_samples_is_not_kept(crowd: Crowd) -> None:
    """Neither adapters, beyond all bounds, nor an error that may not be true any more."""
    present = False

    def read(folder: Path) -> AdapterWeights:
        if not present:
            raise FileNotFoundError(folder)
        return crowd.adapters["a"]

    engine = crowd.engine(load_adapter=read)
    for i in range(5):
        engine.add(str(i), sample([4], SamplingParams(max_tokens=2, seed=0), adapter_folder=f"folder {i}"))
        engine._adapters.wait(5)
        engine.cancel(str(i))
    assert not engine._adapters._reading
    present = True
    ended = run(engine, {"x": sample([4], SamplingParams(max_tokens=2, seed=0), adapter_folder="folder 0")})
    assert isinstance(ended["x"], SampleResult)


def test_a_cancelled_sample_does_not_take_an_adapter_from_one_that_waits(crowd: Crowd) -> None:
    engine = crowd.engine()
    request = sample([4], SamplingParams(max_tokens=2, seed=0), adapter_folder=str(crowd.root / "a"))
    engine.add("x", request)
    engine.add("y", request)
    reading = dict(engine._adapters._reading)
    engine.cancel("x")
    assert engine._adapters._reading == reading
    assert isinstance(finish(engine)["y"], SampleResult)


def test_waiting_for_adapters_ends_with_the_first_one() -> None:
    go_on = {"quick": threading.Event(), "slow": threading.Event()}

    def read(folder: Path) -> Any:
        go_on[folder.name].wait(60)
        return object()

    adapters = AdapterCache(read, 2)
    for name in ("quick", "slow"):
        adapters.ask(name)
    threading.Timer(0.5, go_on["quick"].set).start()
    began = time.monotonic()
    adapters.wait(30)
    assert time.monotonic() - began < 25
    assert adapters.ask("quick")
    assert not adapters.ask("slow")
    go_on["slow"].set()


# -- what fails, fails alone -----------------------------------------------------------------------------------------
def _not_a_number(folder: Path, weights: AdapterWeights) -> None:
    """With checksums that are right."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, file)
    manifest = json.loads((folder / "tinsmith.json").read_text())
    manifest["sha256"][file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    (folder / "tinsmith.json").write_text(json.dumps(manifest))


def _overflowing(folder: Path, weights: AdapterWeights) -> None:
    """Finite weights on the head whose logits are not."""
    down, up = weights.pairs["lm_head"]
    down.fill_(1e5)
    up[::2], up[1::2] = 1e38, -1e38


def _narrow(folder: Path, weights: AdapterWeights) -> None:
    name = "model.layers.0.self_attn.q_proj"
    weights.pairs[name] = (weights.pairs[name][0][:, :-1].contiguous(), weights.pairs[name][1])


def _incomplete(folder: Path, weights: AdapterWeights) -> None:
    del weights.pairs["model.layers.1.mlp.up_proj"]


def _cut_off(folder: Path, weights: AdapterWeights) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:500])


def _bad_config(folder: Path, weights: AdapterWeights) -> None:
    (folder / "adapter_config.json").write_text("{")


def _missing(folder: Path, weights: AdapterWeights) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


CHANGED_WEIGHTS = [_overflowing, _narrow, _incomplete]
DAMAGED_FILES = [_not_a_number, _cut_off, _bad_config, _missing]


@pytest.mark.parametrize("damage", [*CHANGED_WEIGHTS, *DAMAGED_FILES], ids=lambda f: f.__name__[1:])
def test_bad_adapters_fail_alone_quickly_and_without_paths(crowd: Crowd, tmp_path: Path, damage: Any) -> None:
    folder = tmp_path / "secret" / "adapter"
    folder.parent.mkdir()
    weights = copy.deepcopy(crowd.adapters["a"])
    if damage in CHANGED_WEIGHTS:
        damage(folder, weights)
    names = list(linear_families(crowd.model))
    write_adapter(folder, spec=LoraSpec(8, 1), weights=weights, base_model="tiny", all_linears=names)
    if damage in DAMAGED_FILES:
        damage(folder, weights)
    bad = sample([9, 8, 7], SamplingParams(max_tokens=5, seed=0, stop=()), adapter_folder=str(folder))
    engine = crowd.engine()
    for name, index in (("before", 1), ("after", 2)):
        engine.add(name, crowd.stock[index])
        if name == "before":
            engine.step()
            engine.add("bad", bad)
            began = time.monotonic()
    ended: dict[str, SampleResult | TinsmithError] = {}
    took = 0.0
    while engine.load.active:
        ended |= engine.step().ended
        if "bad" in ended and not took:
            took = time.monotonic() - began
    assert everything(ended["before"]) == crowd.alone(1)
    assert everything(ended["after"]) == crowd.alone(2)
    outcome = ended["bad"]
    assert isinstance(outcome, TinsmithError)
    assert took < 4.0
    text = f"{outcome.message} {outcome.hint} {outcome.field}"
    assert str(tmp_path) not in text
    assert "secret" not in text
    assert len(outcome.message) > 20


@pytest.mark.parametrize("broken", ["written", "read"])
def test_a_disk_that_fails_costs_one_request(crowd: Crowd, tmp_path: Path, broken: str) -> None:
    params = SamplingParams(max_tokens=150, seed=3, stop=())
    requests = {str(i): sample([9 + i] * 20, params) for i in range(4)}
    aside = tmp_path / "aside"
    if broken == "written":
        aside.write_text("a file where the folder should be")
    engine = crowd.engine(max_tokens=576, aside_folder=aside)
    for name, request in requests.items():
        engine.add(name, request)
    ended: dict[str, SampleResult | TinsmithError] = {}
    while engine.load.active:
        ended |= engine.step().ended
        if broken == "read" and aside.exists():
            for file in aside.iterdir():
                file.write_bytes(b"not what was written")
    failed = {name for name, result in ended.items() if isinstance(result, TinsmithError)}
    assert ended.keys() == requests.keys()
    assert "0" not in failed
    assert failed
    assert all(isinstance(ended[name], EngineFailure) for name in failed)
    assert str(tmp_path) not in " ".join(f"{ended[name]}" for name in failed)
    for name in requests.keys() - failed:
        assert bits(ended[name]) == bits(run(crowd.engine(), {name: requests[name]})[name])
    if broken == "read":
        assert_empty(engine, aside)


def test_a_file_half_written_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder()
    holder.write(0, torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    holder.advance(3)

    def no_space(content: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engines.sampling.kv.save_file", no_space)
    with pytest.raises(OSError, match="No space"):
        holder.put_aside(tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []
    assert not holder.aside
    assert holder.capacity == 64


# -- the trainer's numbers -------------------------------------------------------------------------------------------
def test_trained_adapters_in_one_batch_have_the_trainers_logprobs(tmp_path: Path) -> None:
    """After real optimizer steps, adapters of several shapes at once, with prompts that are read in pieces."""
    engine = TorchEngine(make_tiny_model(tmp_path / "model"), dtype="float32", device="cpu", threads=1)
    engine.load()
    specs = {"a": LoraSpec(8, 1), "b": LoraSpec(4, 2, train_mlp=False), "c": LoraSpec(16, 3, train_attn=False)}
    rng = np.random.default_rng(0)
    for name, spec in specs.items():
        engine.create_adapter(name, spec, "adamw")
        for _ in range(4):
            tokens = rng.integers(3, 259, 30)
            train(engine, batch(name, tokens), OptimStepParams(lr=0.02))
        engine.save_adapter(name, tmp_path / name, with_optimizer=False)
    sampler = TorchSampler(engine.model, engine.router, None, prefill_tokens=64)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, stop=())
    requests: dict[str, Sample] = {}
    for i, length in enumerate((3, 80, 150, 7, 66, 20)):
        name = "abc"[i % 3]
        prompt = rng.integers(3, 259, length).tolist()
        requests[f"{name}{i}"] = sample(
            prompt, params, adapter_folder=str(tmp_path / name), num_samples=2, prompt_logprobs=True
        )
    base = Sample(requests["a0"].prompt, params, num_samples=2)
    with nothing_fails():
        ended = run(sampler, {**requests, "base": base})
    assert sequences(ended["base"]) != sequences(ended["a0"])  # training has moved the adapter
    for key, request in requests.items():
        result = succeeded(ended[key])
        assert result.prompt_logprobs is not None
        for sequence in result.sequences:
            tokens = np.concatenate([request.prompt, sequence.tokens])
            trained = engine.forward(replace(batch(key[0], tokens), backward=False)).logprobs[0]
            sampled = np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])
            np.testing.assert_allclose(sampled, trained, atol=3e-5)


def batch(name: str, tokens: np.ndarray) -> TrainBatch:
    tokens = tokens.astype(np.int64)
    weights = np.ones(len(tokens) - 1, np.float32)
    return TrainBatch(name, (Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights}),), "cross_entropy")
