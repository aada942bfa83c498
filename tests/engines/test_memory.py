"""What training takes: the estimate against what is really allocated, its shares, its refusals; and checkpointing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engines import machine
from engines.lora import Router, views
from engines.lora_targets import attach, init_adapter
from engines.machine import compute_threads, machine_memory, usable_cores
from engines.torch_engine.checkpointing import decoder_layers, use_checkpointing
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.hardware import device_memory, peak_flops, set_threads
from engines.torch_engine.loading import freeze, load_base_model
from engines.torch_engine.memory import (
    activation_room,
    adapter_budget,
    checkpoints_pass,
    estimate_memory,
    refuse_long_datum,
)
from schemas.base_model_info import MemoryEstimate
from schemas.errors import InvalidRequest
from schemas.operations import LoraSpec
from tests.engines.batches import make_batch
from tests.engines.contract import SPEC, accumulate, train
from tests.support.tiny_model import make_tiny_model

CPU = torch.device("cpu")
GIB = 1 << 30
ESTIMATE = MemoryEstimate(
    base=GIB,
    per_adapter_parameter=20,
    adapter_parameters_per_rank=1000,
    per_token=4_000_000,
    per_token_checkpointed=400_000,
    layers=10,
    head=0,
    total=16 * GIB,
    free=10 * GIB,
)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Router]:
    """Eight layers: so that one layer is a small part of the whole."""
    folder = make_tiny_model(tmp_path_factory.mktemp("deep") / "model", layers=8)
    model = load_base_model(folder, torch.float32, CPU)
    router = attach(model)
    freeze(model)
    return model, router


class _Sizes(TorchDispatchMode):
    """The peak of the memory that is alive and was made inside, by the storages of every result."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage.data_ptr()] = (storage._weak_ref(), storage.nbytes())
        self._alive = {key: value for key, value in self._alive.items() if not torch.UntypedStorage._expired(value[0])}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


@contextmanager
def training(model: Any, router: Router, rank: int = 4) -> Iterator[Tensor]:
    weights = init_adapter(model, LoraSpec(rank, 0))
    generator = torch.Generator().manual_seed(0)
    for _, up in weights.pairs.values():
        up.copy_(torch.randn(up.shape, generator=generator) * 0.1)
    flat = torch.zeros(sum(tensor.numel() for tensor in weights.tensors))
    with router.use([(weights, slice(0, 1))], [views(flat, weights.pairs)]), torch.enable_grad():
        yield flat


def run_pass(model: Any, tokens: int) -> Tensor:
    ids = (torch.arange(tokens) % 250).unsqueeze(0)
    hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.autograd.backward([hidden], [hidden.detach().sin()])
    return hidden.detach()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_estimate_is_near_what_a_pass_allocates(deep: tuple[Any, Router], checkpointed: bool) -> None:
    model, router = deep
    memory = estimate_memory(model, router, head=0)
    assert memory.layers == len(decoder_layers(model)) == 8
    assert memory.base == sum(p.numel() * 4 for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    shapes = [(m.in_features, m.out_features) for m in model.modules() if hasattr(m, "router")]
    assert memory.adapter_parameters_per_rank == sum(a + b for a, b in shapes)
    assert memory.adapter(4) == 20 * 4 * memory.adapter_parameters_per_rank
    with training(model, router), use_checkpointing(model, checkpointed), _Sizes() as sizes:
        run_pass(model, 200)
    expected = memory.training_pass([200], checkpointing=checkpointed)
    sys.stdout.write(f"\nestimated {expected}, allocated {sizes.peak}")
    assert 0.85 * expected < sizes.peak < 1.2 * expected
    assert memory.per_token_checkpointed < memory.per_token / 2


def test_the_estimate_leaves_the_model_as_it_was(deep: tuple[Any, Router]) -> None:
    model, router = deep
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    estimate_memory(model, router)
    assert router.segments is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


def test_eager_attention_shows_in_the_pairs(tmp_path: Path) -> None:
    model: Any = load_base_model(make_tiny_model(tmp_path / "m"), torch.float32, CPU)
    router = attach(model)
    assert estimate_memory(model, router).per_token_pair == 0
    model.set_attn_implementation("eager")
    # Softmax keeps its output: 4 heads of float32 in each of 2 layers at least.
    assert estimate_memory(model, router).per_token_pair >= 2 * 4 * 4


def test_checkpointing_changes_no_bit(deep: tuple[Any, Router]) -> None:
    model, router = deep
    found = []
    for on in (False, True):
        with training(model, router) as gradient, use_checkpointing(model, on):
            hidden = run_pass(model, 40)
        assert bool(gradient.abs().sum() > 0)
        found.append((hidden, gradient.clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_checkpointing_ends_with_its_context(deep: tuple[Any, Router]) -> None:
    model, _ = deep
    layers = decoder_layers(model)
    with use_checkpointing(model, True):
        assert all("forward" in vars(layer) for layer in layers)
        assert not any(module.training for module in model.modules())
    assert not any("forward" in vars(layer) for layer in layers)
    with pytest.raises(KeyError), use_checkpointing(model, True):
        raise KeyError
    assert not any("forward" in vars(layer) for layer in layers)
    with use_checkpointing(model, False):
        assert not any("forward" in vars(layer) for layer in layers)


def test_checkpointed_layers_run_twice(deep: tuple[Any, Router]) -> None:
    model, router = deep
    calls = []
    hook = model.base_model.layers[3].self_attn.register_forward_hook(lambda *_: calls.append(1))
    try:
        for on in (False, True):
            with training(model, router), use_checkpointing(model, on):
                run_pass(model, 8)
    finally:
        hook.remove()
    assert len(calls) == 1 + 2


def test_shares_of_the_memory() -> None:
    assert adapter_budget(ESTIMATE, None) == 5 * GIB
    assert adapter_budget(ESTIMATE, 7) == 7
    assert activation_room(ESTIMATE, 5 * GIB) == 3 * GIB
    assert activation_room(ESTIMATE, 11 * GIB) == 0
    unknown = replace(ESTIMATE, total=0, free=0)
    assert adapter_budget(unknown, None) is None
    assert activation_room(unknown, None) is None
    assert unknown.text == "memory: not known"


@pytest.mark.parametrize(
    ("mode", "lengths", "room", "on"),
    [
        ("auto", [500, 500], 4_000_000_000, False),
        ("auto", [500, 501], 4_000_000_000, True),
        ("auto", [10_000], None, False),
        ("on", [1], None, True),
        ("off", [10_000], 1, False),
    ],
)
def test_which_passes_are_checkpointed(mode: Any, lengths: list[int], room: int | None, on: bool) -> None:
    assert checkpoints_pass(ESTIMATE, lengths, room, mode) == on


def test_a_datum_that_can_never_fit_is_refused_with_the_numbers() -> None:
    refuse_long_datum(ESTIMATE, 0, 2500, 1_000_000_000, "auto")
    refuse_long_datum(ESTIMATE, 0, 250, 1_000_000_000, "off")
    refuse_long_datum(ESTIMATE, 0, 1 << 40, None, "off")
    with pytest.raises(InvalidRequest) as refused:
        refuse_long_datum(ESTIMATE, 3, 2501, 1_000_000_000, "auto")
    assert (refused.value.field, refused.value.code) == ("data[3].model_input", "datum_too_large")
    for words in ("data[3]", "2501 tokens", "0.93 GiB", "enough for 2500 tokens"):
        assert words in refused.value.message
    with pytest.raises(InvalidRequest, match=r"gradient_checkpointing is off.* enough for 250 tokens"):
        refuse_long_datum(ESTIMATE, 0, 251, 1_000_000_000, "off")


def test_the_text_has_the_sizes() -> None:
    assert ESTIMATE.text == (
        "memory: base 1.07 GB, each rank-32 adapter 0.00 GB, 1,024 tokens of a training pass 4.10 GB "
        "(0.41 GB with gradient checkpointing), of 17 GB with 11 GB free"
    )


# -- the machine ------------------------------------------------------------------------------------------------------
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """A control group of version 2 in which this process is said to be."""
    own = tmp_path / "a" / "b"
    own.mkdir(parents=True)
    for name, text in files.items():
        (own / name.replace("_", ".", 1)).write_text(text)
    text = machine._text
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_text", lambda file: "0::/a/b" if file.name == "cgroup" else text(file))


def test_memory_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total, free = machine_memory()
    assert 0 < free <= total
    assert device_memory(CPU)[0] == total
    mib = 1 << 20
    group(
        tmp_path,
        monkeypatch,
        memory_max=str(64 * mib),
        memory_current=str(48 * mib),
        memory_stat=f"anon 1\ninactive_file {8 * mib}\n",
    )
    assert machine_memory() == (64 * mib, 24 * mib)


def test_a_group_without_a_limit_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path, monkeypatch, memory_max="max", cpu_max="max 100000")
    assert machine_memory()[0] == machine._physical()[0], "whatever the group of the tests themselves has"
    assert usable_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("quota", "cores"), [("50000 100000", 1), ("150000 100000", 2), ("6400000 100000", 4)])
def test_quota_of_a_control_group(quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    group(tmp_path, monkeypatch, cpu_max=quota)
    assert usable_cores() == cores


def test_who_decides_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 8)
    assert compute_threads(None, 1, {}) == 8
    assert compute_threads(None, 3, {}) == 2
    assert compute_threads(None, 16, {}) == 1
    assert compute_threads(None, 1, {"OMP_NUM_THREADS": "1"}) == 1
    assert compute_threads(None, 1, {"OMP_NUM_THREADS": "6,2"}) == 6
    assert compute_threads(None, 1, {"OMP_NUM_THREADS": "none"}) == 8
    assert compute_threads(5, 4, {"OMP_NUM_THREADS": "1"}) == 5


def test_the_engine_takes_all_cores_unless_told() -> None:
    former = torch.get_num_threads()
    try:
        assert set_threads(1) == torch.get_num_threads() == 1
        assert set_threads(None) == torch.get_num_threads() == usable_cores()
    finally:
        torch.set_num_threads(former)


def test_the_peak_of_products(deep: tuple[Any, Router]) -> None:
    rate = peak_flops(deep[0])
    assert 1e6 < rate < 1e15
    assert peak_flops(deep[0]) == rate, "measured once"
    assert peak_flops(nn.Identity()) == 0.0


# -- the engine -------------------------------------------------------------------------------------------------------
def test_the_engine_checkpoints_for_the_same_bits(untied_folder: Path) -> None:
    found = []
    for mode in ("off", "on"):
        engine = TorchEngine(untied_folder, dtype="float32", device="cpu", threads=1, gradient_checkpointing=mode)
        engine.load()
        layer: Any = decoder_layers(engine.model)[0]
        calls: list[int] = []
        layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        engine.create_adapter("a", SPEC)
        train(engine, make_batch("a"))
        calls.clear()
        result = accumulate(engine, make_batch("a", lengths=(30, 9, 64), seed=1))
        found.append((result.logprobs, engine._pool.get("a").gradient.flat, len(calls)))
    (plain, gradient, once), (again, same, twice) = found
    assert twice == 2 * once > 0
    assert all(np.array_equal(one, other) for one, other in zip(plain, again, strict=True))
    assert gradient is not None
    assert same is not None
    assert torch.equal(gradient, same)


def test_the_engine_refuses_a_datum_before_any_work(untied_folder: Path) -> None:
    engine = TorchEngine(untied_folder, dtype="float32", device="cpu", threads=1, gradient_checkpointing="off")
    info = engine.load()
    engine.create_adapter("a", SPEC)
    engine._room = info.memory.training_pass([40])
    accumulate(engine, make_batch("a", lengths=(9, 40)))
    engine.take_stats()
    with pytest.raises(InvalidRequest) as refused:
        accumulate(engine, make_batch("a", lengths=(9, 41)))
    assert (refused.value.field, refused.value.code) == ("data[1].model_input", "datum_too_large")
    assert engine.take_stats().tokens == 0
    long = make_batch("a", lengths=(9, 41))
    assert len(engine.forward(replace(long, backward=False)).logprobs) == 2, "without a gradient nothing is kept"
