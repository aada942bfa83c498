"""One turn on the worker: outcomes per operation, whatever fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from schemas.errors import (
    ADAPTERS_BUSY,
    EngineFailure,
    InvalidRequest,
    NotFound,
    OutOfMemory,
    TinsmithError,
    is_adapters_busy,
)
from schemas.operations import (
    AdapterStep,
    DatumRange,
    LoraSpec,
    MicroBatch,
    OptimStep,
    OptimStepParams,
    PassStats,
    StepResult,
    TrainBatch,
    TrainResult,
)
from tests.support.toy_worker import INFO, ToyEngine, ToySampler
from tests.workers.harness import batch, step
from workers.tinker import TinkerActorRolloutRefWorker, TinkerTrainingWorker


@pytest.fixture
def engine() -> ToyEngine:
    engine = ToyEngine()
    for adapter_id in "abc":
        engine.create_adapter(adapter_id, LoraSpec(8, seed=1))
    return engine


def whole(operation_id: str, datums: int = 1) -> DatumRange:
    return DatumRange(operation_id, 0, datums)


def stepped(operation_id: str, adapter_id: str, lr: float = 1.0) -> AdapterStep:
    return AdapterStep(operation_id, adapter_id, step(lr))


def run(engine: ToyEngine, micro: MicroBatch) -> dict[str, TrainResult | StepResult | TinsmithError]:
    return dict(TinkerTrainingWorker(engine).run_micro_batch(micro).outcomes)


def test_batches_and_the_steps_behind_them_of_several_adapters(engine: ToyEngine) -> None:
    micro = MicroBatch(
        {"1": batch("a"), "2": batch("b", datums=2), "3": batch("c", backward=False)},
        (whole("1"), whole("2", 2), whole("3")),
        (stepped("4", "a"), stepped("5", "b", 0.5)),
    )
    result = TinkerTrainingWorker(engine).run_micro_batch(micro)
    assert set(result.outcomes) == set("12345")
    assert [engine.adapters[name].weight for name in "abc"] == [6.0, 6.0, 1.0]
    assert result.stats == PassStats(8, 8, 4, 1, 8000.0, {"base": 0.5, "lora": 0.25})


def test_an_operation_goes_on_over_several_turns(engine: ToyEngine) -> None:
    assert run(engine, MicroBatch({"1": batch("a", datums=3)}, (DatumRange("1", 0, 2),))) == {}
    assert set(run(engine, MicroBatch({}, (DatumRange("1", 2, 3),), (stepped("2", "a"),)))) == {"1", "2"}
    assert engine.adapters["a"].weight == 16.0


def test_an_operation_that_cannot_be_opened_ends_with_its_own_error(engine: ToyEngine) -> None:
    opened = {"1": batch("a", refuse=1.0), "2": batch("unknown"), "3": batch("b")}
    outcomes = run(engine, MicroBatch(opened, (whole("1"), whole("2"), whole("3")), (stepped("4", "a"),)))
    assert isinstance(outcomes["1"], InvalidRequest)
    assert isinstance(outcomes["2"], NotFound)
    assert isinstance(outcomes["3"], TrainResult)
    assert isinstance(outcomes["4"], StepResult), "a step runs even if the batch before it was refused"
    assert engine._operations == {}


def test_a_bad_datum_ends_its_own_operation_only(engine: ToyEngine) -> None:
    opened = {"1": batch("a", datums=3, fail_at=1), "2": batch("b")}
    outcomes = run(engine, MicroBatch(opened, (DatumRange("1", 0, 2), whole("2")), (stepped("3", "a"),)))
    assert isinstance(outcomes["1"], InvalidRequest)
    assert isinstance(outcomes["2"], TrainResult)
    after = outcomes["3"]
    assert isinstance(after, StepResult)
    assert after.metrics["grad_norm:mean"] == 0.0


@pytest.mark.parametrize(("raised", "expected"), [(ValueError("/etc/x"), EngineFailure), (MemoryError(), OutOfMemory)])
def test_a_fault_of_the_engine_ends_what_was_computed_together_and_nothing_stays_open(
    engine: ToyEngine, monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[TinsmithError]
) -> None:
    def broken(ranges: Sequence[DatumRange]) -> dict[str, TrainResult | TinsmithError]:
        raise raised

    monkeypatch.setattr(engine, "compute", broken)
    opened = {"1": batch("a"), "2": batch("b", datums=9), "3": batch("a", refuse=1.0)}
    outcomes = run(engine, MicroBatch(opened, (whole("1"), whole("2"), whole("3")), (stepped("4", "c"),)))
    for operation_id in "12":
        failure = outcomes[operation_id]
        assert isinstance(failure, expected)
        assert "/etc" not in failure.message
    assert isinstance(outcomes["3"], InvalidRequest)
    assert isinstance(outcomes["4"], StepResult)
    assert engine._operations == {}


def test_a_step_that_fails_touches_no_other(engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.adapters["a"].gradient = float("nan")
    outcomes = run(engine, MicroBatch(steps=(stepped("1", "a"), stepped("2", "b"), stepped("3", "unknown"))))
    assert isinstance(outcomes["1"], InvalidRequest)
    assert isinstance(outcomes["2"], StepResult)
    assert isinstance(outcomes["3"], NotFound)

    monkeypatch.setattr(engine, "optimizer_steps", lambda steps: [])
    outcomes = run(engine, MicroBatch({"1": batch("a")}, (whole("1"),), (stepped("2", "a"),)))
    assert isinstance(outcomes["1"], TrainResult)
    assert isinstance(outcomes["2"], EngineFailure)


def test_dropped_operations_are_forgotten_first(engine: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    run(engine, MicroBatch({"1": batch("a", datums=2)}, (DatumRange("1", 0, 1),)))
    assert run(engine, MicroBatch(dropped=("1", "never seen"))) == {}
    assert engine._operations == {}
    assert isinstance(run(engine, MicroBatch(ranges=(whole("1"),)))["1"], NotFound)

    def broken(operation_id: str) -> None:
        raise OSError("busy")

    monkeypatch.setattr(engine, "drop_operation", broken)
    assert isinstance(run(engine, MicroBatch({"2": batch("a")}, (whole("2"),), dropped=("1",)))["2"], TrainResult)


def test_the_combined_worker_runs_turns_on_its_actor(engine: ToyEngine) -> None:
    worker = TinkerActorRolloutRefWorker(engine, ToySampler(), INFO)
    step = AdapterStep("2", "a", OptimStep(OptimStepParams(lr=1.0)))
    assert set(worker.run_micro_batch(MicroBatch({"1": batch("a")}, (whole("1"),), (step,))).outcomes) == {"1", "2"}


class CrowdedEngine(ToyEngine):
    """Memory for operations of one adapter at a time."""

    def open_operation(self, operation_id: str, batch: TrainBatch) -> None:
        if any(other.adapter_id != batch.adapter_id for other in self._operations.values()):
            raise OutOfMemory("no room", code=ADAPTERS_BUSY)
        super().open_operation(operation_id, batch)


def test_adapters_without_room_come_when_others_have_ended() -> None:
    engine = CrowdedEngine()
    for adapter_id in "abc":
        engine.create_adapter(adapter_id, LoraSpec(8, seed=1))
    opened = {"1": batch("a"), "2": batch("b"), "3": batch("a"), "4": batch("c", refuse=1.0), "5": batch("c")}
    outcomes = run(engine, MicroBatch(opened, tuple(whole(name) for name in opened), (stepped("6", "b"),)))
    assert isinstance(outcomes.pop("4"), InvalidRequest)
    assert set(outcomes) == set("12356")
    assert not any(isinstance(outcome, TinsmithError) for outcome in outcomes.values())
    assert [engine.adapters[name].gradient for name in "abc"] == [-10.0, 0.0, -5.0]
    assert engine._operations == {}


def test_who_finds_no_room_has_not_run_and_neither_has_what_is_behind_it() -> None:
    engine = CrowdedEngine()
    for adapter_id in "abc":
        engine.create_adapter(adapter_id, LoraSpec(8, seed=1))
        engine.adapters[adapter_id].gradient = -1.0
    run(engine, MicroBatch({"1": batch("a", datums=3)}, (DatumRange("1", 0, 1),)))
    opened = {"2": batch("b"), "3": batch("b"), "4": batch("c")}
    ranges = (DatumRange("1", 1, 2), *(whole(name) for name in opened))
    outcomes = run(engine, MicroBatch(opened, ranges, (stepped("5", "b"), stepped("6", "a"))))
    assert {name for name, outcome in outcomes.items() if is_adapters_busy(outcome)} == set("2345")
    assert isinstance(outcomes["6"], StepResult)
    assert (engine.adapters["b"].weight, engine.adapters["b"].gradient) == (1.0, -1.0)
    ranges = (DatumRange("1", 2, 3), *(whole(name) for name in opened))
    again = run(engine, MicroBatch(opened, ranges, (stepped("5", "b"),)))
    assert not any(isinstance(outcome, TinsmithError) for outcome in again.values())
    assert engine.adapters["b"].weight == 12.0
