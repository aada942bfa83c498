"""Engine megatron on two ranks: each with a whole model, or both sharing one; the numbers of one rank, both ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engines.torch_engine.engine import TorchEngine
from schemas.errors import InvalidRequest, NonFiniteGradient
from schemas.operations import Datum, LoraSpec, Sample, SampleTurn, SamplingParams, TrainBatch
from tests.engines.contract import FAST, SPEC, accumulate
from tests.engines.field import needs
from tests.engines.field.megatron_models import make_family
from tests.engines.field.test_megatron import STEPS, assert_gradient, examples_of, reference_of
from tests.engines.gang import Gang, gang
from tests.engines.test_fsdp_ranks import UNEQUAL, batch_of, close, gradient_of

pytestmark = needs("megatron")
_NUMBERS = count()
WEIGHTED = json.dumps(
    {
        "inputs": [{"name": each, "rank": 1} for each in ("logprobs", "weights")],
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            {"op": "placeholder", "name": "weights", "target": "weights"},
            {"op": "call_function", "name": "p", "target": "mul", "args": [{"ref": "logprobs"}, {"ref": "weights"}]},
            {"op": "call_method", "name": "s", "target": "sum", "args": [{"ref": "p"}]},
            {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "s"}, {"dict": {}}]}]},
        ],
    }
)
"""A custom loss: the sum of weighted logprobs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 3 whose head is its input embedding."""
    return make_family(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", tied=True)


@pytest.fixture(scope="module", params=[1, 2], ids=["data", "tensor"])
def two(folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Gang]:
    """Two ranks with a whole model each, then two that share one."""
    spec = {"engine": "megatron", "tensor_parallel": request.param}
    spec["builder"] = "tests.engines.field.megatron_models:build"
    with gang(folder, tmp_path_factory.mktemp("gang"), 2, **spec) as started:
        yield started


@pytest.fixture(scope="module")
def one(folder: Path) -> TorchEngine:
    """Engine torch on the same model, in this process."""
    engine = TorchEngine(folder, device="cpu", threads=1, dtype="float32")
    engine.load()
    return engine


@pytest.fixture
def name() -> str:
    """An adapter id of its own."""
    return f"adapter-{next(_NUMBERS)}"


def trained(two: Gang, name: str, spec: LoraSpec = SPEC) -> None:
    """An adapter whose B is not zero."""
    two.call("create_adapter", name, spec)
    two.call("forward_backward", batch_of(name, (12, 5)))
    two.call("optimizer_step", name, FAST)


def gradients(two: Gang, name: str) -> np.ndarray[Any, Any]:
    """The accumulated gradient, which has the same bits on both ranks."""
    first, second = two.call("facts", name)
    np.testing.assert_array_equal(first["gradient"], second["gradient"])
    found: np.ndarray[Any, Any] = first["gradient"]
    return found


@pytest.mark.parametrize("families", [(True, True, True), (False, False, True), (True, False, False)])
@pytest.mark.parametrize("lengths", [UNEQUAL, (11,)])
def test_the_numbers_are_those_of_transformers_and_peft(
    two: Gang, folder: Path, tmp_path: Path, name: str, families: tuple[bool, bool, bool], lengths: tuple[int, ...]
) -> None:
    """Uneven datums, one datum (a rank has none), the head alone; accumulated over two calls; then a step with values
    of its own."""
    trained(two, name, LoraSpec(4, 3, *families))
    two.call("save_checkpoint", name, str(tmp_path / "saved"), False)
    two.call("load_checkpoint", name, str(tmp_path / "saved"), False, False)
    reference, adapter = reference_of(folder, tmp_path / "saved")
    for seed in (1, 2):
        batch = batch_of(name, lengths, seed=seed)
        found = two.call("forward_backward", batch)
        expected = reference.forward_backward(examples_of(batch), "cross_entropy")
        for ours, theirs in zip(found.logprobs, expected, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
    theirs_by_name = {each: p.grad.clone() for each, p in reference.parameters.items() if p.grad is not None}
    assert_gradient(torch.from_numpy(gradients(two, name)), adapter, theirs_by_name, close=5e-5)
    two.call("optimizer_step", name, STEPS[1])
    reference.step(**asdict(STEPS[1]))
    two.call("save_checkpoint", name, str(tmp_path / "after"), False)
    after = load_file(tmp_path / "after" / "adapter_model.safetensors")
    for each, tensor in reference.get().items():
        np.testing.assert_allclose(after[each].numpy(), tensor.numpy(), rtol=0, atol=2e-4, err_msg=each)
    first, second = two.call("facts", name)
    assert first["state"] == second["state"]


@pytest.mark.parametrize("loss", ["importance_sampling", "gspo"])
def test_other_losses_and_their_metrics(two: Gang, one: TorchEngine, name: str, loss: str) -> None:
    trained(two, name)
    one.create_adapter(name, SPEC)
    accumulate(one, batch_of(name, (12, 5)))
    one.optimizer_step(name, FAST)
    batch = batch_of(name, UNEQUAL, loss, 4)
    shared, alone = two.call("forward_backward", batch), accumulate(one, batch)
    for found, expected in zip(shared.logprobs, alone.logprobs, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-3)
    assert shared.metrics == pytest.approx(alone.metrics, rel=5e-3, abs=1e-3)


def test_a_cleared_gradient_is_cleared_on_both(two: Gang, name: str) -> None:
    two.call("create_adapter", name, SPEC)
    two.call("forward_backward", batch_of(name, (9, 4)))
    kept = gradients(two, name)
    two.call("optimizer_zero_grad", name)
    two.call("forward_backward", batch_of(name, (9, 4)))
    np.testing.assert_array_equal(gradients(two, name), kept)


def test_a_gradient_that_is_not_finite_on_one_rank_fails_on_both(two: Gang, name: str) -> None:
    trained(two, name)
    before = two.call("facts", name)
    for bad in range(2):
        datums = list(batch_of(name, (6, 6), "importance_sampling").datums)
        inputs = dict(datums[bad].inputs, logprobs=np.full(6, -1e4, np.float32), advantages=np.ones(6, np.float32))
        datums[bad] = Datum(datums[bad].tokens, inputs)
        two.call("forward_backward", TrainBatch(name, tuple(datums), "importance_sampling"))
        with pytest.raises(NonFiniteGradient, match=rf"data\[{bad}\] of forward_backward 1 of 1"):
            two.call("optimizer_step", name, FAST)
    assert [each["state"] for each in two.call("facts", name)] == [each["state"] for each in before]


def test_a_datum_that_fails_on_one_rank_fails_its_batch_on_both(two: Gang, name: str) -> None:
    """A custom loss that cannot be run on one datum: what earlier calls accumulated stays, bit for bit."""
    trained(two, name)
    two.call("forward_backward", batch_of(name, (7, 3)))
    kept = gradients(two, name)
    for bad in range(2):
        datums = list(batch_of(name, (8, 8)).datums)
        datums[bad] = Datum(datums[bad].tokens, dict(datums[bad].inputs, weights=np.ones(3, np.float32)))
        with pytest.raises(InvalidRequest):
            two.call("forward_backward", TrainBatch(name, tuple(datums), "custom", loss_graph=WEIGHTED))
        np.testing.assert_array_equal(gradients(two, name), kept)


def test_checkpoints_go_to_engine_torch_and_back(two: Gang, one: TorchEngine, name: str, tmp_path: Path) -> None:
    """With the optimizer's state, bit for bit; the next gradient agrees."""
    trained(two, name)
    saved = two.call("save_checkpoint", name, str(tmp_path / "ours"), True)
    assert one.load_adapter(f"{name}-x", tmp_path / "ours", with_optimizer=True, create=True) == saved
    batch = batch_of(name, UNEQUAL, seed=3)
    two.call("forward_backward", batch)
    accumulate(one, TrainBatch(f"{name}-x", batch.datums, batch.loss_fn))
    close(gradients(two, name), gradient_of(one, f"{name}-x"))
    one.optimizer_step(f"{name}-x", FAST)
    one.save_adapter(f"{name}-x", tmp_path / "theirs", with_optimizer=True)
    two.call("load_checkpoint", f"{name}-back", str(tmp_path / "theirs"), True, True)
    first, second = two.call("facts", f"{name}-back")
    state = one._pool.get(f"{name}-x")
    assert first["state"] == second["state"]
    assert first["state"] == [vector.numpy().tobytes() for vector in (state.flat, *state.moments.values())]


def test_training_never_changes_the_base_model(two: Gang, name: str) -> None:
    before = two.call("checksums")
    trained(two, name)
    two.call("forward_backward", batch_of(name, UNEQUAL))
    two.call("optimizer_step", name, FAST)
    assert two.call("checksums") == before


def test_samples_are_those_of_engine_torch(two: Gang, one: TorchEngine, name: str, tmp_path: Path) -> None:
    from engines.sampling.torch_sampler import TorchSampler

    trained(two, name)
    folder = str(tmp_path / "saved")
    two.call("save_checkpoint", name, folder, False)
    sample = Sample(np.arange(5, 17), SamplingParams(max_tokens=8, seed=5), 2, folder)
    sampler = TorchSampler(one.model, one.router, None)
    ended: list[dict[str, Any]] = [{}, {}]
    for found, turn in zip(ended, (lambda each: two.call("sample_turn", each), sampler.turn), strict=True):
        following = SampleTurn({"s": sample}, steps=50)
        while not found:
            found |= turn(following).ended
            following = SampleTurn(steps=50)
    for ours, theirs in zip(ended[0]["s"].sequences, ended[1]["s"].sequences, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_who_keeps_what(two: Gang, folder: Path, request: pytest.FixtureRequest) -> None:
    """The whole model on every rank; or half of the linears, and the embedding and the norms whole."""
    stored = load_file(folder / "model.safetensors")
    size = {each: tensor.numel() * tensor.element_size() for each, tensor in stored.items()}
    expected = sum(size.values())
    if "tensor" in request.node.callspec.id:
        expected -= sum(size[each] for each in size if each.endswith("_proj.weight")) // 2
    assert [each["read"] for each in two.call("facts")] == [expected] * 2


@pytest.mark.exhaustive
def test_two_copies_of_two_ranks_each(folder: Path, one: TorchEngine, tmp_path: Path, name: str) -> None:
    """Datums shared by copies, tensors within a copy; the head, which all have whole, counts once for each copy."""
    spec = {"engine": "megatron", "tensor_parallel": 2, "builder": "tests.engines.field.megatron_models:build"}
    with gang(folder, tmp_path / "gang", 4, **spec) as four:
        trained(four, name)
        four.call("save_checkpoint", name, str(tmp_path / "saved"), True)
        one.load_adapter(name, tmp_path / "saved", with_optimizer=True, create=True)
        for lengths in (UNEQUAL, (11,)):
            batch = batch_of(name, lengths, seed=5)
            found, expected = four.call("forward_backward", batch), accumulate(one, batch)
            for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-4)
            assert found.metrics == pytest.approx(expected.metrics, rel=1e-4)
        facts = four.call("facts", name)
        assert len(facts) == 4
        assert all(np.array_equal(each["gradient"], facts[0]["gradient"]) for each in facts)
        close(facts[0]["gradient"], gradient_of(one, name))
