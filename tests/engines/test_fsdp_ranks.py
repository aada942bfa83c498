"""The FSDP engine on two ranks: the numbers of one, all or nothing on both, and whose files count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engines.fsdp.engine import FsdpEngine
from engines.lora import views
from engines.sampling.torch_sampler import TorchSampler
from engines.torch_engine.engine import TorchEngine
from schemas.errors import Cancelled, InvalidRequest, NonFiniteGradient, NotFound, WorkerDied
from schemas.losses import LOSSES
from schemas.operations import (
    AdapterStep,
    Datum,
    DatumRange,
    LoraSpec,
    MicroBatch,
    OptimStep,
    Sample,
    SampleResult,
    SampleTurn,
    SamplingParams,
    TrainBatch,
)
from tests.engines.batches import make_batch, make_datum
from tests.engines.contract import FAST, SPEC, accumulate
from tests.engines.gang import Gang, gang
from tests.support.reference import Reference

UNEQUAL = (3, 40, 1, 17, 8, 25, 2)
CLOSE = 2e-5
"""Of the largest gradient: what another order of adding up may change."""


@pytest.fixture(scope="module")
def two(tied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    """Two ranks on the tied model."""
    with gang(tied_folder, tmp_path_factory.mktemp("gang"), 2) as started:
        yield started


@pytest.fixture(scope="module")
def one(tied_folder: Path) -> TorchEngine:
    """The torch engine on the same model, in this process."""
    engine = TorchEngine(tied_folder, device="cpu", threads=1, dtype="float32")
    engine.load()
    return engine


_NUMBERS = count()
ORDINARY = ("cross_entropy", "gspo")
"""One loss of single positions and one of whole sequences; the others take the same ways."""


@pytest.fixture
def name() -> str:
    """An adapter id of its own."""
    return f"adapter-{next(_NUMBERS)}"


def gradient_of(engine: TorchEngine, adapter_id: str) -> np.ndarray[Any, Any]:
    flat = engine._pool.get(adapter_id).gradient.flat
    assert flat is not None
    return flat.numpy().copy()


def close(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * float(np.abs(expected).max()))


def batch_of(name: str, lengths: tuple[int, ...], loss: str = "cross_entropy", seed: int = 0) -> TrainBatch:
    return make_batch(name, loss, lengths=lengths, seed=seed)


# -- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "loss", [pytest.param(each, marks=() if each in ORDINARY else pytest.mark.exhaustive) for each in sorted(LOSSES)]
)
def test_two_ranks_compute_what_one_does(two: Gang, one: TorchEngine, name: str, loss: str) -> None:
    """Logprobs, metrics and gradients; the gradient's bits are the same on both ranks, and so are they after steps."""
    for seed in range(2):
        batch = batch_of(name, UNEQUAL, loss, seed)
        if not seed:
            two.call("create_adapter", name, SPEC)
            one.create_adapter(name, SPEC)
        shared, alone = two.call("forward_backward", batch), accumulate(one, batch)
        for found, expected in zip(shared.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        assert shared.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-4)
        first, second = two.call("facts", name)
        np.testing.assert_array_equal(first["gradient"], second["gradient"])
        close(first["gradient"], gradient_of(one, name))
        stepped = two.call("optimizer_step", name, FAST)
        assert stepped.metrics == pytest.approx(one.optimizer_step(name, FAST).metrics, rel=1e-4)
    first, second = two.call("facts", name)
    assert first["state"] == second["state"]


def test_one_datum_on_two_ranks(two: Gang, one: TorchEngine, name: str) -> None:
    two.call("create_adapter", name, SPEC)
    one.create_adapter(name, SPEC)
    for seed in range(4):  # whichever rank gets it
        batch = batch_of(name, (11,), seed=seed)
        np.testing.assert_allclose(
            two.call("forward_backward", batch).logprobs[0], accumulate(one, batch).logprobs[0], atol=1e-5
        )
        np.testing.assert_allclose(
            two.call("infer_batch", batch).logprobs[0], one.forward(batch).logprobs[0], atol=1e-5
        )
    close(two.call("facts", name)[0]["gradient"], gradient_of(one, name))


@pytest.mark.parametrize("families", [(True, True, True), (False, False, True), (True, False, False)])
def test_the_gradient_is_that_of_transformers_and_peft(
    two: Gang, tied_folder: Path, tmp_path: Path, name: str, families: tuple[bool, bool, bool]
) -> None:
    """On the head alone as well, where no pass goes back through the body."""
    two.call("create_adapter", name, LoraSpec(4, 3, *families))
    two.call("forward_backward", batch_of(name, (12, 5)))
    two.call("optimizer_step", name, FAST)
    two.call("save_checkpoint", name, str(tmp_path / "saved"), False)
    adapter = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    reference = Reference(tied_folder, config, adapter)
    batch = batch_of(name, UNEQUAL, seed=1)
    found = two.call("forward_backward", batch)
    examples = [
        {"tokens": torch.from_numpy(d.tokens), **{k: torch.from_numpy(v) for k, v in d.inputs.items()}}
        for d in batch.datums
    ]
    for ours, theirs in zip(found.logprobs, reference.forward_backward(examples, "cross_entropy"), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
    flat = torch.from_numpy(two.call("facts", name)[0]["gradient"])
    theirs_by_name = reference.gradient()
    largest = max(float(each.abs().max()) for each in theirs_by_name.values())
    for key, ours in named(flat, adapter).items():
        np.testing.assert_allclose(ours.numpy(), theirs_by_name[key].numpy(), rtol=0, atol=CLOSE * largest)


def named(flat: Tensor, adapter: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts of a flat gradient by PEFT's names, in the order of the model's modules."""
    modules = {key.split(".lora_")[0] for key in adapter}
    order = sorted(modules, key=place_in_llama)
    pairs = {m: (adapter[f"{m}.lora_A.weight"], adapter[f"{m}.lora_B.weight"]) for m in order}
    parts = views(flat, pairs)
    return {f"{m}.lora_{side}.weight": part for m in order for side, part in zip("AB", parts[m], strict=True)}


def place_in_llama(module: str) -> tuple[int, int]:
    """Layers in order, each q, k, v, o, gate, up, down; then the head."""
    leaves = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    parts = module.split(".")
    if parts[-1] == "lm_head":
        return (1 << 30, 0)
    return int(parts[parts.index("layers") + 1]), leaves.index(parts[-1])


def test_company_does_not_change_a_bit(two: Gang) -> None:
    """Turns of several adapters, some of them on the head only, cut anywhere: each has the numbers it has alone."""
    specs = {"x": SPEC, "y": LoraSpec(2, 7, False, False, True), "z": LoraSpec(8, 9)}
    batches = {each: batch_of("", (9, 30, 4, 4, 21), seed=seed) for seed, each in enumerate(specs)}

    def run(round_: str, names: list[str], cuts: tuple[int, ...]) -> dict[str, list[bytes]]:
        for each in names:
            two.call("create_adapter", f"{round_}-{each}", specs[each])
        opened = {
            f"{round_}-{each}": TrainBatch(f"{round_}-{each}", batches[each].datums, "cross_entropy") for each in names
        }
        for start, stop in zip((0, *cuts), (*cuts, 5), strict=True):
            ranges = tuple(DatumRange(operation, start, stop) for operation in opened)
            outcomes = two.call("run_micro_batch", MicroBatch(opened if start == 0 else {}, ranges)).outcomes
        assert set(outcomes) == set(opened)
        steps = tuple(AdapterStep(f"{each} step", each, OptimStep(FAST)) for each in opened)
        two.call("run_micro_batch", MicroBatch(steps=steps))
        return {each: two.call("facts", f"{round_}-{each}")[1]["state"] for each in names}

    together = run("together", list(specs), (1, 2, 4))
    for each in specs:
        assert run(f"alone-{each}", [each], ())[each] == together[each]


# -- failures ----------------------------------------------------------------------------------------------------------
def test_a_gradient_that_is_not_finite_on_one_rank_is_so_on_both(two: Gang, name: str) -> None:
    """Whichever rank had the datum: the step names it, fails on both, and both go on from the same weights."""
    two.call("create_adapter", name, SPEC)
    two.call("forward_backward", batch_of(name, (5, 6)))
    two.call("optimizer_step", name, FAST)
    before = two.call("facts", name)
    for bad in range(2):
        datums = list(batch_of(name, (6, 6), "importance_sampling").datums)
        inputs = dict(datums[bad].inputs, logprobs=np.full(6, -1e4, np.float32), advantages=np.ones(6, np.float32))
        datums[bad] = Datum(datums[bad].tokens, inputs)
        two.call("forward_backward", TrainBatch(name, tuple(datums), "importance_sampling"))
        with pytest.raises(NonFiniteGradient, match=rf"data\[{bad}\] of forward_backward 1 of 1"):
            two.call("optimizer_step", name, FAST)
    after = two.call("facts", name)
    assert [each["state"] for each in after] == [each["state"] for each in before]
    assert all(each["gradient"] is None for each in after)
    assert two.call("run_micro_batch", step_of(name)).outcomes["step"].metrics["grad_norm"] == 0


def step_of(name: str) -> MicroBatch:
    return MicroBatch(steps=(AdapterStep("step", name, OptimStep(FAST)),))


def test_a_datum_that_fails_on_one_rank_fails_its_batch_on_both_and_nothing_else(two: Gang, name: str) -> None:
    """A custom loss that cannot be run on one datum; what was accumulated before stays, neighbours never notice."""
    two.call("create_adapter", name, SPEC)
    two.call("create_adapter", f"{name}-b", SPEC)
    two.call("forward_backward", batch_of(name, (7, 3)))
    expected = [each["gradient"] for each in two.call("facts", name)]
    nodes: list[dict[str, Any]] = [
        {"op": "placeholder", "name": each, "target": each} for each in ("logprobs", "weights")
    ]
    nodes.append(
        {"op": "call_function", "name": "p", "target": "mul", "args": [{"ref": "logprobs"}, {"ref": "weights"}]}
    )
    nodes.append({"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "p"}]})
    nodes.append(
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "s"}, {"dict": {}}]}]}
    )
    graph = json.dumps({"inputs": [{"name": each, "rank": 1} for each in ("logprobs", "weights")], "nodes": nodes})
    for bad in range(2):
        datums = [make_datum("cross_entropy", 8, np.random.default_rng(seed)) for seed in range(2)]
        inputs = dict(datums[bad].inputs, weights=np.ones(3, np.float32))
        datums[bad] = Datum(datums[bad].tokens, inputs)
        custom = TrainBatch(name, tuple(datums), "custom", loss_graph=graph)
        micro = MicroBatch(
            {"bad": custom, "good": batch_of(f"{name}-b", (8, 4))}, (DatumRange("bad", 0, 2), DatumRange("good", 0, 2))
        )
        outcomes = two.call("run_micro_batch", micro).outcomes
        assert isinstance(outcomes["bad"], InvalidRequest), outcomes["bad"]
        assert outcomes["good"].metrics["loss:sum"] != 0
        for found, kept in zip(two.call("facts", name), expected, strict=True):
            np.testing.assert_array_equal(found["gradient"], kept)


def test_what_one_rank_cannot_do_none_does(two: Gang, name: str, tmp_path: Path) -> None:
    for rank in range(2):
        with pytest.raises(InvalidRequest, match=f"rank {rank} cannot do it"):
            two.call("fail_on", rank, True)
    with pytest.raises(InvalidRequest):
        two.call("load_checkpoint", name, str(tmp_path / "nothing"), False, True)
    with pytest.raises(NotFound):
        two.call("forward_backward", batch_of(name, (3,)))
    with pytest.raises(InvalidRequest) as caught:
        two.call("create_adapter", name, LoraSpec(4, 0, False, False, False))
    assert caught.value.field == "lora_config"
    two.call("create_adapter", name, SPEC)


# -- the base model and files ------------------------------------------------------------------------------------------
def test_every_rank_reads_and_keeps_only_its_slices(two: Gang, tied_folder: Path) -> None:
    stored = sum(t.numel() * t.element_size() for t in load_file(tied_folder / "model.safetensors").values())
    facts = two.call("facts")
    assert sum(each["read"] for each in facts) == stored
    assert all(0.45 * stored < each["read"] < 0.55 * stored for each in facts)
    assert all(each["kept"] < 0.7 * stored for each in facts)  # tiny slices are rounded up to whole rows


def test_training_never_changes_the_base_model(two: Gang, one: TorchEngine, name: str) -> None:
    batch = batch_of("any", UNEQUAL)
    before = two.call("ref_infer_batch", batch).logprobs
    two.call("create_adapter", name, SPEC)
    for seed in range(3):
        two.call("forward_backward", batch_of(name, UNEQUAL, seed=seed))
        two.call("optimizer_step", name, FAST)
    after = two.call("ref_infer_batch", batch).logprobs
    one.create_adapter(f"{name}-fresh", SPEC)
    expected = one.forward(batch_of(f"{name}-fresh", UNEQUAL)).logprobs
    for found, again, own in zip(before, after, expected, strict=True):
        np.testing.assert_array_equal(found, again)
        np.testing.assert_allclose(found, own, atol=1e-5)


def test_checkpoints_and_snapshots_go_from_two_ranks_to_one_and_back(
    two: Gang, tied_folder: Path, tmp_path: Path, name: str
) -> None:
    """Bit for bit, moments and a pending gradient included; the numbers of the next steps then agree."""
    single = FsdpEngine(tied_folder, device="cpu", threads=1, dtype="float32")
    single.load()
    two.call("create_adapter", name, SPEC)
    for seed in range(2):
        two.call("forward_backward", batch_of(name, UNEQUAL, seed=seed))
        two.call("optimizer_step", name, FAST)
    saved = two.call("save_checkpoint", name, str(tmp_path / "two"), True)
    assert single.load_adapter(name, tmp_path / "two", with_optimizer=True, create=True) == saved
    two.call("forward_backward", batch_of(name, UNEQUAL, seed=2))
    two.call("begin_snapshot", name, str(tmp_path / "snapshot"))
    while not (written := two.call("finished_snapshots")):
        pass
    facts = two.call("facts", name)[0]
    single.restore_adapter(f"{name}-snapshot", tmp_path / "snapshot", written[str(tmp_path / "snapshot")].sha256)
    state = single._pool.get(f"{name}-snapshot")
    assert [vector.numpy().tobytes() for vector in (state.flat, *state.moments.values())] == facts["state"]
    np.testing.assert_array_equal(gradient_of(single, f"{name}-snapshot"), facts["gradient"])
    accumulate(single, batch_of(name, UNEQUAL, seed=2))
    close(gradient_of(single, name), facts["gradient"])
    single.optimizer_step(name, FAST)
    single.save_adapter(name, tmp_path / "one", with_optimizer=True)
    keys = [set(load_file(tmp_path / each / "adapter_model.safetensors")) for each in ("one", "two")]
    assert keys[0] == keys[1]
    two.call("load_checkpoint", f"{name}-back", str(tmp_path / "one"), True, True)
    first, second = two.call("facts", f"{name}-back")
    state = single._pool.get(name)
    assert first["state"] == second["state"]
    assert first["state"] == [vector.numpy().tobytes() for vector in (state.flat, *state.moments.values())]


# -- sampling ----------------------------------------------------------------------------------------------------------
def test_samples_are_those_of_one_process(two: Gang, one: TorchEngine, name: str, tmp_path: Path) -> None:
    """Token for token, many at once, some cancelled, over several turns; a folder that cannot be read fails alone."""
    two.call("create_adapter", name, SPEC)
    two.call("forward_backward", batch_of(name, (20, 20)))
    two.call("optimizer_step", name, FAST)
    folder = str(tmp_path / "saved")
    two.call("save_checkpoint", name, folder, False)
    samples = {
        f"s{i}": Sample(
            np.arange(5, 12 + 9 * i),
            SamplingParams(max_tokens=10 + i, temperature=0.7 + 0.1 * i, top_k=50, seed=i, stop=()),
            1 + i % 3,
            folder if i % 2 else None,
            prompt_logprobs=True,
            stream=i == 3,
        )
        for i in range(5)
    }
    missing = Sample(np.arange(5, 9), SamplingParams(max_tokens=3, seed=1), 1, str(tmp_path / "missing"))
    ended: dict[str, Any] = {}
    turn = SampleTurn({**samples, "gone": samples["s0"], "missing": missing}, steps=3, seconds=0.02)
    while len(ended) < 7:
        result = two.call("sample_turn", turn)
        ended |= result.ended
        turn = SampleTurn(cancelled=("gone",), steps=3, seconds=0.02)
    assert isinstance(ended.pop("missing"), InvalidRequest)
    assert isinstance(ended.pop("gone"), Cancelled)
    alone = TorchSampler(one.model, one.router, None)
    expected: dict[str, Any] = {}
    turn = SampleTurn(samples, steps=100)
    while len(expected) < len(samples):
        expected |= alone.turn(turn).ended
        turn = SampleTurn(steps=100)
    assert set(ended) == set(samples)
    for each, found in ended.items():
        own = expected[each]
        assert isinstance(own, SampleResult)
        assert [s.tokens.tolist() for s in found.sequences] == [s.tokens.tolist() for s in own.sequences]
        np.testing.assert_allclose(found.prompt_logprobs, own.prompt_logprobs, atol=1e-4)
        for ours, theirs in zip(found.sequences, own.sequences, strict=True):
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


# -- the end (the last test that uses the ranks) -----------------------------------------------------------------------
def test_ranks_that_would_differ_end_together(two: Gang) -> None:
    """One rank could not undo what another one failed to do: the group is lost, all of it, and says so once."""
    with pytest.raises(WorkerDied, match="exit code 70"):
        two.call("fail_on", 1, False)
    assert len(two.deaths) == 1
    with pytest.raises(WorkerDied):
        two.call("facts")
