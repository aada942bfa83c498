"""Engine `torchtitan` on two ranks: the numbers of transformers and PEFT, all or nothing, and files that go around."""

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

from engines.torch_engine.engine import TorchEngine
from engines.torchtitan.engine import TorchTitanEngine
from schemas.errors import InvalidRequest, NonFiniteGradient
from schemas.operations import Datum, LoraSpec, OptimStepParams, Sample, SampleTurn, SamplingParams, TrainBatch
from tests.engines.batches import make_batch
from tests.engines.contract import FAST, SPEC, accumulate
from tests.engines.field.titan_models import make_model, reference_gradient, skip_without_titan
from tests.engines.gang import Gang, gang
from tests.engines.test_reference import ours

skip_without_titan()

UNEVEN = (3, 40, 1, 17, 8, 25, 2)
CLOSE = 2e-5
"""Of the largest gradient."""

_NUMBERS = count()


@pytest.fixture(scope="module", params=["llama-tied", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    with gang(folder, tmp_path_factory.mktemp("gang"), 2, engine="torchtitan") as started:
        yield started


@pytest.fixture(scope="module")
def one(folder: Path) -> TorchEngine:
    """The torch engine on the same model, in this process."""
    engine = TorchEngine(folder, device="cpu", threads=1, dtype="float32")
    engine.load()
    return engine


@pytest.fixture
def name() -> str:
    """An adapter id of its own."""
    return f"adapter-{next(_NUMBERS)}"


def batch_of(name: str, lengths: tuple[int, ...] = UNEVEN, loss: str = "cross_entropy", seed: int = 0) -> TrainBatch:
    return make_batch(name, loss, lengths=lengths, seed=seed)


def flat_gradient(two: Gang, name: str) -> np.ndarray[Any, Any]:
    """The accumulated gradient, which has the same bits on both ranks."""
    first, second = two.call("facts", name)
    np.testing.assert_array_equal(first["gradient"], second["gradient"])
    gradient: np.ndarray[Any, Any] = first["gradient"]
    return gradient


def close(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * float(np.abs(expected).max()))


def reference_flat(
    two: Gang, one: TorchEngine, name: str, folder: Path, saved: Path, batch: TrainBatch
) -> tuple[list[np.ndarray], np.ndarray]:
    """Logprobs and the gradient by transformers and PEFT of the present adapter, in the order of our flat gradient."""
    two.call("save_checkpoint", name, str(saved), False)
    logprobs, theirs = reference_gradient(folder, saved, batch)
    one.load_adapter(f"{name}-order", saved, with_optimizer=False, create=True)
    order = list(ours(one, f"{name}-order", "weights"))
    assert set(order) == set(theirs)
    return logprobs, torch.cat([theirs[key].reshape(-1) for key in order]).numpy()


def trained(two: Gang, name: str, spec: LoraSpec = SPEC) -> None:
    """An adapter after a step, so that B is not zero."""
    two.call("create_adapter", name, spec)
    two.call("forward_backward", batch_of(name, (12, 5), seed=9))
    two.call("optimizer_step", name, FAST)


# -- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lengths", [UNEVEN, (11,)], ids=["uneven", "one datum"])
@pytest.mark.parametrize("families", [(True, True, True), (False, False, True)], ids=["all", "head"])
def test_the_gradient_is_that_of_transformers_and_peft(
    two: Gang,
    one: TorchEngine,
    name: str,
    folder: Path,
    tmp_path: Path,
    lengths: tuple[int, ...],
    families: tuple[bool, bool, bool],
) -> None:
    """A rank without a datum included; and of two batches, the sum."""
    trained(two, name, LoraSpec(4, 3, *families))
    batch = batch_of(name, lengths, seed=1)
    logprobs, expected = reference_flat(two, one, name, folder, tmp_path / "saved", batch)
    result = two.call("forward_backward", batch)
    for found, own in zip(result.logprobs, logprobs, strict=True):
        np.testing.assert_allclose(found, own, atol=1e-4)
    close(flat_gradient(two, name), expected)
    two.call("forward_backward", batch)
    close(flat_gradient(two, name), 2 * expected)
    for found, own in zip(two.call("infer_batch", batch).logprobs, logprobs, strict=True):
        np.testing.assert_allclose(found, own, atol=1e-4)
    two.call("optimizer_zero_grad", name)
    assert all(each["gradient"] is None for each in two.call("facts", name))


def test_overrides_rule_for_one_step_on_both_ranks(two: Gang, one: TorchEngine, name: str) -> None:
    """Steps with hyperparameters of their own, then plain ones: as the torch engine takes them."""
    two.call("create_adapter", name, SPEC)
    one.create_adapter(name, SPEC)
    for seed, params in enumerate((FAST, OptimStepParams(3e-3, (0.5, 0.9), 1e-5, 0.1), FAST)):
        batch = batch_of(name, seed=seed)
        two.call("forward_backward", batch)
        accumulate(one, batch)
        assert two.call("optimizer_step", name, params).metrics == pytest.approx(
            one.optimizer_step(name, params).metrics, rel=1e-3
        )
    batch = batch_of(name, seed=9)
    for found, own in zip(two.call("infer_batch", batch).logprobs, one.forward(batch).logprobs, strict=True):
        np.testing.assert_allclose(found, own, atol=5e-3)
    first, second = two.call("facts", name)
    assert first["state"] == second["state"]


# -- failures ----------------------------------------------------------------------------------------------------------
def test_a_gradient_that_is_not_finite_on_one_rank_is_so_on_both(two: Gang, name: str) -> None:
    """Whichever rank had the datum; weights and moments stay, and training goes on."""
    trained(two, name)
    before = two.call("facts", name)
    for bad in range(2):
        datums = list(batch_of(name, (6, 6), "importance_sampling").datums)
        inputs = dict(datums[bad].inputs, logprobs=np.full(6, -1e4, np.float32), advantages=np.ones(6, np.float32))
        datums[bad] = Datum(datums[bad].tokens, inputs)
        two.call("forward_backward", TrainBatch(name, tuple(datums), "importance_sampling"))
        with pytest.raises(NonFiniteGradient):
            two.call("optimizer_step", name, FAST)
    after = two.call("facts", name)
    assert [each["state"] for each in after] == [each["state"] for each in before]
    two.call("forward_backward", batch_of(name))
    assert two.call("optimizer_step", name, FAST).metrics["grad_norm"] > 0


def test_a_datum_that_fails_on_one_rank_fails_on_both_and_keeps_what_was_accumulated(two: Gang, name: str) -> None:
    """Whichever rank had the datum, whose logprobs and weights a custom loss cannot multiply."""
    trained(two, name)
    two.call("forward_backward", batch_of(name))
    expected = flat_gradient(two, name)
    for bad in range(2):
        datums = list(batch_of(name, (8, 8)).datums)
        datums[bad] = Datum(datums[bad].tokens, dict(datums[bad].inputs, weights=np.ones(3, np.float32)))
        with pytest.raises(InvalidRequest):
            two.call("forward_backward", TrainBatch(name, tuple(datums), "custom", loss_graph=weighted_sum()))
        np.testing.assert_array_equal(flat_gradient(two, name), expected)
    two.call("forward_backward", batch_of(name))
    close(flat_gradient(two, name), 2 * expected)


def weighted_sum() -> str:
    """The graph of the custom loss `(logprobs * weights).sum()`."""
    names = ("logprobs", "weights")
    nodes: list[dict[str, Any]] = [{"op": "placeholder", "name": each, "target": each} for each in names]
    product = [{"ref": each} for each in names]
    nodes += [
        {"op": "call_function", "name": "p", "target": "mul", "args": product},
        {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "p"}]},
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "s"}, {"dict": {}}]}]},
    ]
    return json.dumps({"inputs": [{"name": each, "rank": 1} for each in names], "nodes": nodes})


# -- the base model and files ------------------------------------------------------------------------------------------
def test_every_rank_reads_its_rows_and_training_leaves_the_base_model(
    two: Gang, one: TorchEngine, name: str, folder: Path
) -> None:
    stored = sum(t.numel() * t.element_size() for t in load_file(folder / "model.safetensors").values())
    facts = two.call("facts")
    assert sum(each["read"] for each in facts) == stored
    assert all(0.45 * stored < each["read"] < 0.55 * stored for each in facts)
    batch = batch_of("any")
    before = two.call("ref_infer_batch", batch).logprobs
    trained(two, name)
    for seed in range(2):
        two.call("forward_backward", batch_of(name, seed=seed))
        two.call("optimizer_step", name, FAST)
    one.create_adapter(f"{name}-fresh", SPEC)
    own = one.forward(batch_of(f"{name}-fresh")).logprobs
    for found, again, expected in zip(before, two.call("ref_infer_batch", batch).logprobs, own, strict=True):
        np.testing.assert_array_equal(found, again)
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("kind", [TorchEngine, TorchTitanEngine], ids=["torch", "torchtitan on one rank"])
def test_checkpoints_go_around_with_the_optimizer(
    two: Gang, folder: Path, tmp_path: Path, name: str, kind: type[TorchEngine]
) -> None:
    """From two ranks to another engine and back, bit for bit; the gradients in between agree."""
    single = kind(folder, device="cpu", threads=1, dtype="float32")
    single.load()
    trained(two, name)
    saved = two.call("save_checkpoint", name, str(tmp_path / "two"), True)
    assert single.load_adapter(name, tmp_path / "two", with_optimizer=True, create=True) == saved
    batch = batch_of(name, seed=2)
    two.call("forward_backward", batch)
    accumulate(single, batch)
    own = single._pool.get(name).gradient.flat
    assert own is not None
    close(flat_gradient(two, name), own.numpy())
    single.optimizer_step(name, FAST)
    single.save_adapter(name, tmp_path / "one", with_optimizer=True)
    two.call("load_checkpoint", f"{name}-back", str(tmp_path / "one"), True, True)
    first, second = two.call("facts", f"{name}-back")
    state = single._pool.get(name)
    assert first["state"] == second["state"]
    assert first["state"] == [vector.numpy().tobytes() for vector in (state.flat, *state.moments.values())]


# -- sampling ----------------------------------------------------------------------------------------------------------
def test_samples_are_those_of_one_process(two: Gang, one: TorchEngine, name: str, tmp_path: Path) -> None:
    from engines.sampling.torch_sampler import TorchSampler

    trained(two, name)
    two.call("save_checkpoint", name, str(tmp_path / "saved"), False)
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, stop=())
    samples = {
        each: Sample(np.arange(5, 14), params, 2, str(tmp_path / "saved") if each == "adapted" else None)
        for each in ("adapted", "plain")
    }

    def collect(turn_of: Any) -> dict[str, Any]:
        ended: dict[str, Any] = {}
        turn = SampleTurn(samples, steps=20)
        while len(ended) < len(samples):
            ended |= turn_of(turn).ended
            turn = SampleTurn(steps=20)
        return ended

    found = collect(lambda turn: two.call("sample_turn", turn))
    expected = collect(TorchSampler(one.model, one.router, None).turn)
    for each in samples:
        assert [s.tokens.tolist() for s in found[each].sequences] == [
            s.tokens.tolist() for s in expected[each].sequences
        ]
