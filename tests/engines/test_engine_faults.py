"""An exception that nobody expected ends the operations whose numbers it may have spoiled, and no others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.losses import datum_metrics
from engines.torch_engine import operations
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.operations import OpenOperation
from engines.torch_engine.packing import Pack
from engines.torch_engine.training_pass import TrainingPass
from schemas.errors import EngineFailure, TinsmithError
from schemas.operations import DatumRange, LoraSpec, TrainResult
from tests.engines.batches import make_batch

SPEC = LoraSpec(rank=4, seed=11)
SECRET = "secret detail /etc/passwd"
LENGTHS = {"a": (9, 5), "b": (13, 7), "c": (8, 6)}


def raising(*args: object, **kwargs: object) -> Any:
    raise ValueError(SECRET)


@pytest.fixture
def engine(untied_folder: Path) -> TorchEngine:
    """Passes of at most 40 tokens: the datums of a and b share one, those of c have one of their own."""
    engine = TorchEngine(untied_folder, dtype="float32", device="cpu", threads=1, micro_batch_tokens=40)
    engine.load()
    for name in LENGTHS:
        engine.create_adapter(name, SPEC)
    return engine


def begin(engine: TorchEngine, prefix: str = "") -> list[DatumRange]:
    for name, lengths in LENGTHS.items():
        engine.open_operation(prefix + name, make_batch(name, lengths=lengths, seed=5))
    return [DatumRange(prefix + name, 0, 2) for name in LENGTHS]


def gradient(engine: TorchEngine, name: str) -> torch.Tensor | None:
    return engine._pool.get(name).gradient.flat


def sound(engine: TorchEngine) -> dict[str, tuple[TrainResult, torch.Tensor]]:
    """What the same operations give when nothing fails; the accumulators are clear afterwards."""
    ended = engine.compute(begin(engine, "sound-"))
    results = {}
    for name in LENGTHS:
        result, collected = ended[f"sound-{name}"], gradient(engine, name)
        assert isinstance(result, TrainResult)
        assert collected is not None
        results[name] = (result, collected.clone())
        engine.optimizer_zero_grad(name)
    return results


def check(engine: TorchEngine, ended: Any, failed: set[str], expected: dict[str, Any], log: Any) -> None:
    """The failed ones ended with a failure that names nothing and left nothing; the others have every bit."""
    assert set(ended) == set(LENGTHS)
    for name, outcome in ended.items():
        if name in failed:
            assert isinstance(outcome, EngineFailure)
            assert SECRET not in outcome.message + str(outcome.hint)
            assert gradient(engine, name) is None
        else:
            result, collected = expected[name]
            assert outcome.metrics == result.metrics
            assert torch.equal(gradient(engine, name), collected)  # type: ignore[arg-type]
    assert not any(engine._operations_of(name) for name in LENGTHS)
    assert not engine._pool._pins
    assert engine.router.segments is None
    assert any(record.exc_info and SECRET in str(record.exc_info[1]) for record in log.records)


def fails_for(length: int, function: Callable[..., Any], length_of: Callable[..., int]) -> Callable[..., Any]:
    def failing(*args: Any, **kwargs: Any) -> Any:
        return raising() if length_of(*args) == length else function(*args, **kwargs)

    return failing


def test_the_datum_at_fault_is_found_while_nothing_is_written(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = sound(engine)
    hidden = TrainingPass._hidden

    def failing(run: TrainingPass, geometry: Pack) -> torch.Tensor:
        return raising() if any(span.stop - span.start == 7 for span in geometry.spans) else hidden(run, geometry)

    monkeypatch.setattr(TrainingPass, "_hidden", failing)
    with caplog.at_level(logging.ERROR):
        check(engine, engine.compute(begin(engine)), {"b"}, expected, caplog)


def test_a_broken_backward_pass_ends_its_own_operations_and_no_other_pass(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = sound(engine)
    backward, calls = torch.autograd.backward, []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        backward(*args, **kwargs)
        if len(calls) == 1:
            raising()

    monkeypatch.setattr("engines.torch_engine.training_pass.torch.autograd.backward", failing)
    with caplog.at_level(logging.ERROR):
        check(engine, engine.compute(begin(engine)), {"a", "b"}, expected, caplog)
    assert len(calls) == 2
    again = engine.compute(begin(engine))
    assert {name: outcome.metrics for name, outcome in again.items()} == {  # type: ignore[union-attr]
        name: result.metrics for name, (result, _) in expected.items()
    }


@pytest.mark.parametrize("place", ["loss", "metrics", "result"])
def test_a_fault_in_the_numbers_of_one_operation_touches_no_other(
    engine: TorchEngine, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = sound(engine)
    if place == "metrics":
        failing = fails_for(13, datum_metrics, lambda term, lp, inputs: len(lp))
        monkeypatch.setattr(operations, "datum_metrics", failing)
    if place == "result":
        failing = fails_for(13, OpenOperation.result, lambda operation: len(operation.logprobs[0]))
        monkeypatch.setattr(OpenOperation, "result", failing)
    ranges = begin(engine)
    if place == "loss":
        assert engine._turns is not None
        engine._turns._open["b"].function = raising
    with caplog.at_level(logging.ERROR):
        check(engine, engine.compute(ranges), {"b"}, expected, caplog)


def test_a_fault_of_a_batch_alone_leaves_the_accumulator(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sound(engine)
    with engine.train_mode("a", zero_grad_on_exit=False):
        engine.forward_backward(make_batch("a"))
    kept = gradient(engine, "a")
    assert kept is not None
    kept = kept.clone()
    monkeypatch.setattr("engines.torch_engine.training_pass.torch.autograd.backward", raising)
    with (
        pytest.raises(TinsmithError, match="unexpectedly in a training pass"),
        engine.train_mode("a", zero_grad_on_exit=False),
    ):
        engine.forward_backward(make_batch("a", seed=4))
    assert torch.equal(gradient(engine, "a"), kept)  # type: ignore[arg-type]
