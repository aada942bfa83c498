"""More runs than fit into the worker's memory take turns: nobody is refused, and every bit is that of enough memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.torch_engine.engine import TorchEngine
from schemas.errors import Gone, OutOfMemory
from schemas.operations import (
    CreateModel,
    Datum,
    LoadWeights,
    LoraSpec,
    Operation,
    OptimStep,
    OptimStepParams,
    SaveWeights,
    StepResult,
    TrainBatch,
    TrainResult,
    ZeroGrad,
)
from tests.support.inline_group import InlineWorkerGroup
from tests.support.tiny_model import make_tiny_model
from tests.workers.harness import Client, running, until, value
from workers.build import GIB
from workers.runtime import ModelRuntime
from workers.spec import WorkerSpec

STEP = OptimStep(OptimStepParams(lr=0.02, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0))
RANK = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


def make_group(tiny: Path, data: Path, adapters: float | None) -> InlineWorkerGroup:
    """A worker with memory for so many adapters of rank 4; None = for all."""
    gib = None if adapters is None else (one_adapter(tiny) * adapters + 64) / GIB
    spec = WorkerSpec("tiny", str(tiny), str(data), dtype="float32", device="cpu", threads=1, adapter_memory_gib=gib)
    return InlineWorkerGroup.from_spec(spec)


def one_adapter(tiny: Path) -> int:
    engine = TorchEngine(tiny, dtype="float32", device="cpu", threads=1)
    engine.load()
    engine.create_adapter("one", LoraSpec(RANK, seed=1))
    return engine._pool.resident_bytes


def some_batch(model_id: str, seed: int, datums: int = 3, *, backward: bool = True) -> TrainBatch:
    rng = np.random.default_rng(seed)
    made = []
    for length in rng.integers(4, 24, datums):
        ids = rng.integers(3, 250, int(length) + 1)
        made.append(Datum(ids[:-1], {"target_tokens": ids[1:], "weights": np.ones(int(length), np.float32)}))
    return TrainBatch(model_id, tuple(made), "cross_entropy", {}, backward)


def script(number: int, folder: Path) -> list[Operation]:
    """What one run does: batches that end in a turn and batches that need many, steps, and calls of their own."""
    name = f"P{number % 3}.{number}"
    return [
        CreateModel(LoraSpec(RANK, seed=number)),
        some_batch(name, number),
        some_batch(name, 100 + number, 10),
        STEP,
        ZeroGrad(),
        some_batch(name, 200 + number, 2, backward=False),
        some_batch(name, 300 + number, 6),
        STEP,
        SaveWeights(str(folder / f"saved-{number}"), True),
        LoadWeights(str(folder / f"saved-{number}"), True, create=False),
        some_batch(name, 400 + number),
        STEP,
        some_batch(name, 500 + number, backward=False),
    ]


def submit_all(runtime: ModelRuntime, client: Client, model_id: str, operations: Sequence[Operation]) -> list[Any]:
    runtime.open_model(model_id)
    project = model_id.partition(".")[0]
    return [
        client.submit(operation, model_id, seq_id, f"{model_id}/{seq_id}", project)
        for seq_id, operation in enumerate(operations)
    ]


def numbers(outcome: Any) -> Any:
    if isinstance(outcome, TrainResult):
        return [lp.tobytes() for lp in outcome.logprobs], dict(outcome.metrics)
    return dict(outcome.metrics) if isinstance(outcome, StepResult) else None


async def train_all(group: InlineWorkerGroup, folder: Path, tokens: int) -> dict[str, list[Any]]:
    async with running(group, micro_batch_tokens=tokens) as (runtime, client, _):
        outcomes = {
            f"P{number % 3}.{number}": submit_all(runtime, client, f"P{number % 3}.{number}", script(number, folder))
            for number in range(12)
        }
        return {name: [numbers(await value(one, 60)) for one in futures] for name, futures in outcomes.items()}


@pytest.mark.parametrize("tokens", [48, 4096])
async def test_twelve_runs_in_the_memory_of_two(tiny: Path, tmp_path: Path, tokens: int) -> None:
    """With small turns, batches that span them hold all the memory; with large ones, one turn needs all adapters."""
    expected = await train_all(make_group(tiny, tmp_path / "data", None), tmp_path / "enough", tokens)
    group = make_group(tiny, tmp_path / "data", 2)
    assert await train_all(group, tmp_path / "scarce", tokens) == expected
    opened = [operation_id for turn in group.turns for operation_id in turn.opened]
    assert len(opened) < 3 * len(set(opened)), "who finds no room is not sent again and again"


async def test_a_run_that_needs_the_room_of_both_others_gets_it(tiny: Path, tmp_path: Path) -> None:
    group = make_group(tiny, tmp_path / "data", 2)
    async with running(group, micro_batch_tokens=24) as (runtime, client, _):
        for name, first in (("P.a", 7), ("Q.b", 25)):  # so that they do not end at the same time
            many = [some_batch(name, 1, first), *(some_batch(name, seed, 40) for seed in range(9))]
            submit_all(runtime, client, name, [CreateModel(LoraSpec(RANK, seed=1)), *many])
        await until(lambda: len(group.turns) > 5)
        big = submit_all(
            runtime, client, "R.big", [CreateModel(LoraSpec(2 * RANK, seed=1)), some_batch("R.big", 3), STEP]
        )
        await until(lambda: client.runtime.waiting("R.big/0").reason != "running")
        for outcome in big:
            await value(outcome, 60)
        assert not {"P.a/9", "Q.b/9"} & set(client.order), "the others were not done yet"


async def test_a_waiting_run_is_told_what_it_waits_for_and_can_be_closed(tiny: Path, tmp_path: Path) -> None:
    group = make_group(tiny, tmp_path / "data", 1)
    async with running(group, micro_batch_tokens=24) as (runtime, client, _):
        for name in ("P.a", "Q.b"):
            await value(submit_all(runtime, client, name, [CreateModel(LoraSpec(RANK, seed=1))])[0])
        long = client.submit(some_batch("P.a", 1, 200), "P.a", 1, "long", "P")
        await until(lambda: len(group.turns) > 1)
        waiting = [
            client.submit(some_batch("Q.b", 2), "Q.b", 1, "short", "Q"),
            client.submit(STEP, "Q.b", 2, "step", "Q"),
        ]
        wanted = "waiting for memory for its adapter: 1 batches are under way"
        await until(lambda: runtime.waiting("short").reason == wanted)
        assert runtime.waiting("step").reason == "1 operation of this model ahead"
        runtime.close_model("Q.b")
        for outcome in waiting:
            with pytest.raises(Gone):
                await value(outcome)
        assert len((await value(long, 60)).logprobs) == 200


async def test_who_will_never_have_room_is_told_so(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder for idle adapters nobody ever leaves memory."""
    monkeypatch.setattr("workers.build.idle_folder", lambda spec, kind="adapters": None)
    group = make_group(tiny, tmp_path / "data", 1)
    async with running(group, micro_batch_tokens=24) as (runtime, client, _):
        await value(submit_all(runtime, client, "P.a", [CreateModel(LoraSpec(RANK, seed=1))])[0])
        long = client.submit(some_batch("P.a", 1, 50), "P.a", 1, "long", "P")
        await until(lambda: len(group.turns) > 1)
        [refused] = submit_all(runtime, client, "Q.b", [CreateModel(LoraSpec(RANK, seed=1))])
        with pytest.raises(OutOfMemory, match="no room for an adapter"):
            await value(refused, 60)
        assert long.done(), "it was refused while there was still hope"
        runtime.close_model("P.a")
        await until(lambda: "P.a" not in group.worker.actor.engine._pool)
        await value(submit_all(runtime, client, "R.c", [CreateModel(LoraSpec(RANK, seed=1))])[0])
