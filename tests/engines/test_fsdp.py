"""The FSDP engine on one rank: the common contract, loading, dividing. On two ranks: `test_fsdp_ranks.py`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engines.fsdp.engine import FsdpEngine
from engines.fsdp.group import Ranks
from engines.fsdp.loading import whole
from engines.fsdp.shares import share
from engines.ranks import Place
from engines.registry import get_engine
from engines.sampling.base import SamplingEngine
from engines.torch_engine.adapter_pool import AdapterPool
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.packing import Pack
from engines.torch_engine.training_pass import TrainingPass
from schemas.base_model_info import MemoryEstimate
from schemas.errors import InvalidRequest, Unavailable
from schemas.operations import Sample, SampleTurn, SampleTurnResult, SamplingParams
from tests.engines.batches import make_batch
from tests.engines.contract import SPEC, EngineContract, accumulate, logprobs, train
from workers.dispatch import RankAnswer, merge
from workers.environment import worker_environment
from workers.samplers import build_sampler
from workers.spec import WorkerSpec


def load_engine(folder: Path) -> FsdpEngine:
    engine = FsdpEngine(folder, device="cpu", threads=1, dtype="float32")
    engine.load()
    return engine


@pytest.fixture(scope="module")
def loaded(untied_folder: Path) -> FsdpEngine:
    return load_engine(untied_folder)


@pytest.fixture
def engine(loaded: FsdpEngine) -> Iterator[FsdpEngine]:
    """The engine of the module, without adapters."""
    loaded._pool = AdapterPool(None, None)
    yield loaded
    assert loaded._open is None


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self, loaded: FsdpEngine) -> FsdpEngine:
        loaded._pool = AdapterPool(None, None)
        return loaded


# -- loading -----------------------------------------------------------------------------------------------------------
def weights(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name.replace(".base.", "."): whole(p).clone() for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_are_those_of_the_files_and_training_leaves_them(
    tied: bool, untied_folder: Path, tied_folder: Path
) -> None:
    folder = tied_folder if tied else untied_folder
    engine = load_engine(folder)
    stored = load_file(folder / "model.safetensors")
    engine.create_adapter("a", SPEC)
    for seed in range(2):
        train(engine, make_batch("a", seed=seed))
    found = weights(engine)
    for name, tensor in stored.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert engine.read_bytes == sum(t.numel() * t.element_size() for t in stored.values())
    buffers = dict(engine.model.named_buffers())
    expected = dict(AutoModelForCausalLM.from_pretrained(folder).named_buffers())
    assert expected.keys() == buffers.keys()
    assert all(torch.equal(buffers[name], value) for name, value in expected.items())


def test_weights_in_bfloat16_and_in_several_files(tmp_path: Path, untied_folder: Path) -> None:
    """The same numbers as the torch engine has from the same files."""
    model = AutoModelForCausalLM.from_pretrained(untied_folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "halves", max_shard_size="40KB")
    assert len(list((tmp_path / "halves").glob("*.safetensors"))) > 1
    for dtype in ("float32", "bfloat16"):
        prints = []
        for kind in (TorchEngine, FsdpEngine):
            engine = kind(tmp_path / "halves", device="cpu", threads=1, dtype=dtype)
            engine.load()
            engine.create_adapter("a", SPEC)
            train(engine, make_batch("a"))
            prints.append(logprobs(engine, "a"))
        np.testing.assert_array_equal(*prints)


def test_a_model_tells_the_same_of_itself_on_both_engines(tmp_path: Path, tied_folder: Path) -> None:
    """Ends of sequences included, which a file of their own may name."""
    folder = tmp_path / "ends"
    shutil.copytree(tied_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    infos = []
    for kind in (TorchEngine, FsdpEngine):
        info = kind(folder, device="cpu", threads=1, dtype="float32").load()
        infos.append(replace(info, peak_flops=0.0, memory=MemoryEstimate()))
    assert infos[0] == infos[1]
    assert infos[1].eos_token_ids == (7, 9)


def test_weights_in_another_form_are_refused_by_name(tmp_path: Path, untied_folder: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_bytes((untied_folder / "config.json").read_bytes())
    tensors = load_file(untied_folder / "model.safetensors")
    tensors["model.layers.0.self_attn.qkv"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Unavailable, match=r"layers\.0\.self_attn\.q_proj\.weight"):
        load_engine(folder)


def test_what_cannot_be_shared_says_so(untied_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_engine("fsdp") is FsdpEngine
    with pytest.raises(InvalidRequest, match="ranks is 2"):
        TorchEngine(untied_folder, device="cpu", place=Place(0, 2)).load()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Unavailable, match="there are 1 here"):
        FsdpEngine(untied_folder, device="cuda", place=Place(1, 2, local_rank=1)).load()
    with pytest.raises(InvalidRequest):
        FsdpEngine(untied_folder, model=torch.nn.Linear(1, 1))


def test_a_pass_that_fails_leaves_the_model_ready_for_the_next(
    engine: FsdpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too large together, so one by one: as the torch engine does, on a model that was interrupted midway."""
    engine.create_adapter("a", SPEC)
    engine.create_adapter("b", SPEC)
    accumulate(engine, make_batch("a"))
    hidden: Callable[[TrainingPass, Pack], torch.Tensor] = TrainingPass._hidden
    layer = engine.model.base_model.layers[1]

    def limited(run: TrainingPass, geometry: Pack) -> torch.Tensor:
        if geometry.spans[-1].stop > 14:
            handle = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError()))
            try:
                return hidden(run, geometry)
            finally:
                handle.remove()
        return hidden(run, geometry)

    monkeypatch.setattr(TrainingPass, "_hidden", limited)
    accumulate(engine, make_batch("b"))
    np.testing.assert_array_equal(
        *(engine._pool.get(name).gradient.flat for name in ("a", "b"))  # type: ignore[arg-type]
    )


# -- dividing ----------------------------------------------------------------------------------------------------------
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 1000), st.integers(0, 4)
)
def test_shares_are_balanced_and_depend_on_the_batch_alone(
    lengths: list[int], ranks: int, window: int, first: int
) -> None:
    first %= ranks
    chosen = share(lengths, ranks, window=window, first=first)
    assert chosen == share(lengths, ranks, window=window, first=first)
    assert len(chosen) == len(lengths)
    loads = [sum(n for n, rank in zip(lengths, chosen, strict=True) if rank == each) for each in range(ranks)]
    assert max(loads) - min(loads) <= max(lengths)  # whoever has most got its last datum when it had least
    whole_first = share(lengths[:1], ranks, window=window, first=first)
    assert whole_first == (first,)


def test_longest_first() -> None:
    assert share([1, 1, 1, 3], 2, window=100) == (1, 1, 1, 0)
    assert share([1, 1, 1, 3], 2, window=2) == (0, 1, 0, 1)


def test_the_answer_of_a_call() -> None:
    """Rank 0's value; the error of the lowest rank."""
    assert merge([RankAnswer("a"), RankAnswer()]) == "a"
    with pytest.raises(InvalidRequest, match="first"):
        merge([RankAnswer(), RankAnswer(error=InvalidRequest("first")), RankAnswer(error=InvalidRequest("second"))])


def test_a_sampler_with_weights_of_its_own_runs_once(untied_folder: Path, loaded: FsdpEngine) -> None:
    """Beside rank 0 (which asks for the server here, and finds none); the others take the same calls, and rest."""
    spec = WorkerSpec("tiny", str(untied_folder), "unused", engine="fsdp", ranks=2, sampler="http://127.0.0.1:9/v1")

    def build(rank: int) -> SamplingEngine:
        placed = replace(spec, place=Place(rank, 2))
        return build_sampler(placed, loaded, untied_folder, loaded.info, None, Path("unused"))

    with pytest.raises(Unavailable, match="external server"):
        build(0)
    turn = SampleTurn({"s": Sample(np.arange(3, 6), SamplingParams(max_tokens=2))}, ("t",))
    assert build(1).turn(turn) == SampleTurnResult({})


def test_memory_of_gathered_layers_goes_back_to_the_system() -> None:
    """The tunables that keep it are for engines whose weights stay where they are."""
    spec = WorkerSpec("tiny", None, "unused")
    assert "GLIBC_TUNABLES" not in worker_environment(replace(spec, engine="fsdp"), {})


def test_one_rank_agrees_with_itself() -> None:
    alone = Ranks(0, 1)
    assert (alone.any(True), alone.any(False), alone.first([3, 4])) == (True, False, [3, 4])
    alone.broken(ValueError())
    with pytest.raises(ValueError, match="as it was"):
        alone.together(lambda: (_ for _ in ()).throw(ValueError("as it was")))
