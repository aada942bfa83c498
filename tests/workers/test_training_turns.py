"""Turns in the runtime, on the toy engine: sharing, continuing, failing, closing, dying, and what clients are told."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import EngineFailure, Gone, InvalidRequest, ModelLost
from schemas.operations import Datum, MicroBatch, Operation, SaveWeights, TrainBatch, ZeroGrad
from tests.support.inline_group import InlineWorkerGroup
from tests.workers.harness import Client, batch, create, gate_of, running, step, toy_group, until, until_state, value
from workers import turn_runner
from workers.local import LocalWorkerGroup
from workers.runtime import ModelRuntime, Ticket
from workers.spec import WorkerSpec
from workers.throughput import LogprobGap
from workers.turns import PREFETCHED_BATCHES


async def created(runtime: ModelRuntime, client: Client, *models: str) -> None:
    """Models named "Project.model"."""
    for model_id in models:
        runtime.open_model(model_id)
        await value(client.submit(create(), model_id, 0, project_id=model_id.partition(".")[0]))


def submit(client: Client, model_id: str, seq_id: int, operation: Operation) -> asyncio.Future[Any]:
    return client.submit(operation, model_id, seq_id, f"{model_id}/{seq_id}", model_id.partition(".")[0])


def weight(group: InlineWorkerGroup, model_id: str) -> float:
    value: float = group.worker.actor.engine.adapters[model_id].weight
    return value


def tokens(micro: MicroBatch) -> int:
    return sum(2 * (part.stop - part.start) for part in micro.ranges)


async def test_models_share_turns_and_steps_need_no_turn_of_their_own() -> None:
    group = toy_group()
    async with running(group) as (runtime, client, _):
        models = [f"P{i}.m" for i in range(6)]
        await created(runtime, client, *models)
        outcomes = []
        for model_id in models:
            outcomes += [submit(client, model_id, 1, batch(model_id)), submit(client, model_id, 2, batch(model_id))]
            outcomes.append(submit(client, model_id, 3, step()))
        for outcome in outcomes:
            await value(outcome)
        [turn] = group.turns
        assert len(turn.opened) == 12
        assert {part.adapter_id for part in turn.steps} == set(models)
        assert all(weight(group, model_id) == 11.0 for model_id in models)


async def test_a_batch_larger_than_a_turn_is_sent_once_and_continued_without_gaps() -> None:
    group = toy_group()
    async with running(group, micro_batch_tokens=8) as (runtime, client, _):
        await created(runtime, client, "P.m")
        trained = submit(client, "P.m", 1, batch("P.m", datums=10))
        await value(submit(client, "P.m", 2, step()))
        assert len((await value(trained)).logprobs) == 10
        assert weight(group, "P.m") == 51.0
        ranges = [(part.start, part.stop) for turn in group.turns for part in turn.ranges]
        assert ranges == [(0, 4), (4, 8), (8, 10)]
        assert [len(turn.opened) for turn in group.turns] == [1, 0, 0]
        assert [len(turn.steps) for turn in group.turns] == [0, 0, 1]


async def test_the_turns_of_a_huge_batch_hold_nobody_up() -> None:
    group = toy_group()
    async with running(group, micro_batch_tokens=16) as (runtime, client, _):
        await created(runtime, client, "P.huge", "Q.small")
        huge = submit(client, "P.huge", 1, batch("P.huge", datums=1000))
        while len(group.turns) <= 3:  # noqa: ASYNC110 (between two looks of `until` there is time for dozens of turns)
            await asyncio.sleep(0)
        for seq_id in range(1, 9, 2):
            before = len(group.turns)
            small = submit(client, "Q.small", seq_id, batch("Q.small", datums=2))
            await value(submit(client, "Q.small", seq_id + 1, step()))
            assert small.done()
            [at] = [index for index, turn in enumerate(group.turns[before:]) if turn.steps]
            assert at <= 1, "it waits for the turn that is composed, and for no other"
        runtime.open_model("R.new")
        before = len(group.turns)
        await value(client.submit(create(), "R.new", 0, project_id="R"))
        assert len(group.turns) - before <= 4
        assert not huge.done()
        assert len((await value(huge)).logprobs) == 1000
        assert max(tokens(turn) for turn in group.turns) == 16


async def test_a_failed_batch_leaves_the_step_behind_it_and_the_others_of_the_turn_alone() -> None:
    group = toy_group()
    async with running(group) as (runtime, client, _):
        await created(runtime, client, "P.a", "P.b", "P.c")
        refused = submit(client, "P.a", 1, batch("P.a", refuse=1.0))
        stepped = submit(client, "P.a", 2, step())
        failed = submit(client, "P.b", 1, batch("P.b", datums=3, fail_at=1))
        good = submit(client, "P.c", 1, batch("P.c"))
        for outcome, match in ((refused, "refuses"), (failed, "datum is bad")):
            with pytest.raises(InvalidRequest, match=match):
                await value(outcome)
        assert (await value(stepped)).metrics["grad_norm:mean"] == 0.0
        assert (await value(good)).metrics["loss:sum"] == -5.0
        assert len(group.turns) == 1
        assert (await value(submit(client, "P.b", 2, step()))).metrics["grad_norm:mean"] == 0.0


async def test_a_batch_that_failed_early_gets_no_more_turns_and_its_model_goes_on() -> None:
    group = toy_group()
    async with running(group, micro_batch_tokens=4) as (runtime, client, _):
        await created(runtime, client, "P.m")
        failed = submit(client, "P.m", 1, batch("P.m", datums=100, fail_at=3))
        behind = submit(client, "P.m", 2, batch("P.m"))
        with pytest.raises(InvalidRequest, match="datum is bad"):
            await value(failed)
        await value(behind)
        assert len(group.turns) == 3
        assert (await value(submit(client, "P.m", 3, step()))).metrics["grad_norm:mean"] == 5.0


async def test_closing_a_model_in_the_middle_of_a_batch_drops_the_batch_before_the_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = toy_group()
    async with running(group, micro_batch_tokens=4) as (runtime, client, _):
        await created(runtime, client, "P.m", "Q.other")
        outcome = submit(client, "P.m", 1, batch("P.m", datums=100_000))
        await until(lambda: len(group.turns) > 2)
        engine = group.worker.actor.engine
        assert list(engine._operations) == ["P.m/1"]
        remove, open_at_removal = engine.remove_adapter, []

        def watched(adapter_id: str) -> None:
            open_at_removal.append(list(engine._operations))
            remove(adapter_id)

        monkeypatch.setattr(engine, "remove_adapter", watched)
        runtime.close_model("P.m")
        with pytest.raises(Gone):
            await value(outcome)
        await until(lambda: "P.m" not in engine.adapters)
        assert open_at_removal == [[]]
        assert [turn.dropped for turn in group.turns if turn.dropped] == [("P.m/1",)]
        assert (await value(submit(client, "Q.other", 1, batch("Q.other")))).metrics["loss:sum"] == -5.0


async def test_closing_while_a_turn_waits_for_company_leaves_the_model_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_runner, "GATHER_SECONDS", 0.5)
    group = toy_group()
    async with running(group) as (runtime, client, _):
        await created(runtime, client, "P.a", "P.b", "P.c")
        closed = [submit(client, "P.a", 1, batch("P.a")), submit(client, "P.a", 2, step())]
        stays = submit(client, "P.b", 1, batch("P.b"))
        await until(lambda: {"P.a/1", "P.b/1"} <= set(client.loads))
        runtime.close_model("P.a")
        for outcome in closed:
            with pytest.raises(Gone):
                await value(outcome)
        assert group.turns == []
        await value(stays)
        assert [list(turn.opened) for turn in group.turns] == [["P.b/1"]]
        await until(lambda: "P.a" not in group.worker.actor.engine.adapters)


async def test_a_turn_that_fails_as_a_whole_ends_its_operations_and_the_worker_forgets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = toy_group()
    async with running(group, micro_batch_tokens=4) as (runtime, client, _):
        await created(runtime, client, "P.a", "P.b")
        engine = group.worker.actor.engine
        take_stats = engine.take_stats

        def broken() -> Any:
            monkeypatch.setattr(engine, "take_stats", take_stats)
            raise RuntimeError("no turn of this kind")

        monkeypatch.setattr(engine, "take_stats", broken)
        outcomes = [submit(client, name, 1, batch(name, datums=50)) for name in ("P.a", "P.b")]
        for outcome in outcomes:
            with pytest.raises(EngineFailure):
                await value(outcome)
        await until(lambda: not engine._operations)
        assert (await value(submit(client, "P.a", 2, step()))).metrics["grad_norm:mean"] == 0.0


async def test_a_death_in_the_middle_of_a_batch_loses_its_model_and_the_slot_is_free_again() -> None:
    group = toy_group()
    async with running(group, micro_batch_tokens=4, max_adapters=2) as (runtime, client, lost):
        await created(runtime, client, "P.a", "P.b")
        outcomes = [submit(client, name, 1, batch(name, datums=100_000)) for name in ("P.a", "P.b")]
        outcomes.append(submit(client, "P.a", 2, step()))
        await until(lambda: len(group.turns) > 2)
        group.die()
        for outcome in outcomes:
            with pytest.raises(ModelLost):
                await value(outcome)
        assert sorted(lost) == ["P.a", "P.b"]
        await until_state(runtime, "ready")
        await created(runtime, client, "P.c")
        assert (await value(submit(client, "P.c", 1, batch("P.c", datums=9)))).metrics["loss:sum"] == -45.0


async def test_a_turn_that_hangs_ends_the_worker() -> None:
    group = toy_group()
    async with running(group, turn_timeout=2.0) as (runtime, client, lost):
        await created(runtime, client, "P.m", "P.idle")
        gate = gate_of(group)
        with pytest.raises(ModelLost):
            await value(submit(client, "P.m", 1, batch("P.m", held=1.0)))
        gate.set()
        assert sorted(lost) == ["P.idle", "P.m"]
        await until_state(runtime, "ready")
        await created(runtime, client, "P.n")
        assert (await value(submit(client, "P.n", 1, batch("P.n", sleep=0.05)))).metrics["loss:sum"] == -5.0


async def test_a_batch_that_was_sent_is_not_kept_in_the_server() -> None:
    spec = WorkerSpec("toy", None, "unused", threads=1, builder="tests.support.toy_worker:build")
    async with running(LocalWorkerGroup(spec, stop_grace=0.1), micro_batch_tokens=8) as (runtime, client, _):
        await created(runtime, client, "P.m")
        arrays: list[weakref.ref[Any]] = []
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def load() -> Operation:
            token_ids = np.ones(2, np.int64)
            arrays.append(weakref.ref(token_ids))
            datum = Datum(token_ids, {"target_tokens": token_ids, "weights": np.ones(2, np.float32)})
            return TrainBatch("P.m", (datum,) * 8, "cross_entropy", {"sleep": 0.5})

        async def done(result: Any) -> None:
            outcome.set_result(result)

        runtime.submit(Ticket("r", "P", "P.m", 1, load, done))
        await until(lambda: runtime.waiting("r").reason == "running: 4 of 8 datums")
        assert [array() for array in arrays] == [None]
        assert len((await value(outcome)).logprobs) == 8


async def test_reading_ahead_is_bounded_over_all_models() -> None:
    group = toy_group()
    async with running(group, micro_batch_tokens=4) as (runtime, client, _):
        models = [f"P{i}.m" for i in range(3 * PREFETCHED_BATCHES)]
        await created(runtime, client, *models)
        client.loads.clear()
        outcomes = [submit(client, name, seq_id, batch(name, sleep=0.01)) for seq_id in (1, 2) for name in models]
        ahead: list[int] = []
        while not all(outcome.done() for outcome in outcomes):
            ahead.append(len(client.loads) - sum(len(turn.opened) for turn in group.turns))
            await asyncio.sleep(0.002)
        assert max(ahead) == PREFETCHED_BATCHES, "no batch is read twice, none too early"
        assert len(client.loads) == len(outcomes)


async def test_a_turn_waits_for_busy_models_but_not_for_idle_or_absent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_runner, "GATHER_SECONDS", 1.0)
    now = [0.0]
    group = toy_group()
    async with running(group, clock=lambda: now[0], micro_batch_tokens=20) as (runtime, client, _):
        await created(runtime, client, "P.a", "Q.b")
        first = submit(client, "P.a", 1, batch("P.a"))
        await asyncio.sleep(0.02)
        second = submit(client, "Q.b", 1, batch("Q.b"))
        await value(first)
        await value(second)
        assert len(group.turns) == 1, "the second model was not waited for"
        full_enough = submit(client, "P.a", 2, batch("P.a", datums=5))
        await value(full_enough, 0.9)
        now[0] += 60.0
        await value(submit(client, "P.a", 3, batch("P.a")), 0.9)
        runtime.close_model("Q.b")
        await value(submit(client, "P.a", 4, batch("P.a")), 0.9)


async def test_other_operations_are_calls_between_the_turns_of_their_model(tmp_path: Path) -> None:
    group = toy_group()
    async with running(group) as (runtime, client, _):
        await created(runtime, client, "P.m")
        operations: list[Operation] = [
            batch("P.m"),
            ZeroGrad(),
            batch("P.m"),
            step(),
            SaveWeights(str(tmp_path / "c"), True),
            batch("P.m"),
        ]
        outcomes = [submit(client, "P.m", seq_id, operation) for seq_id, operation in enumerate(operations, 1)]
        for outcome in outcomes:
            await value(outcome)
        assert weight(group, "P.m") == 6.0
        assert group.calls[1:] == [
            "forward_backward",
            "optimizer_zero_grad",
            "forward_backward",
            "optimizer_step",
            "save_checkpoint",
            "forward_backward",
        ]


async def test_clients_learn_how_far_a_batch_has_come() -> None:
    async with running(toy_group(), micro_batch_tokens=24) as (runtime, client, _):
        await created(runtime, client, "P.m")
        outcome = submit(client, "P.m", 1, batch("P.m", datums=16, sleep=0.5))
        await until(lambda: runtime.waiting("P.m/1").reason == "running: 12 of 16 datums")
        behind = submit(client, "P.m", 2, batch("P.m"))
        assert runtime.waiting("P.m/2").reason == "waiting for its turn: next"
        await until(lambda: "P.m/2" in client.loads)
        assert client.started[1:] == ["P.m/1"], "what is read ahead has not begun"
        await asyncio.gather(outcome, behind)
        assert client.started[1:] == ["P.m/1", "P.m/2"]


async def test_throughput_adds_up_over_turns() -> None:
    now = [0.0]
    group = toy_group()
    async with running(group, micro_batch_tokens=8, clock=lambda: now[0]) as (runtime, client, _):
        assert runtime.throughput().turns == 0
        await created(runtime, client, "P.m")
        await value(submit(client, "P.m", 1, batch("P.m", datums=6)))
        await value(submit(client, "P.m", 2, step()))
        now[0] = 10.0
        read = runtime.throughput()
        assert (read.tokens, read.rows, read.sequences, read.passes, read.turns, read.steps) == (12, 12, 6, 2, 3, 1)
        assert (read.flops, read.turn_fill, read.tokens_per_second) == (12_000.0, 0.75, 1.2)
        assert read.seconds == {"base": 1.0, "lora": 0.5}
        assert read.wall_seconds == 10.0
        assert read.mfu is None


async def test_batches_with_logprobs_of_a_sampler_tell_how_far_it_is_from_the_trainer() -> None:
    async with running(toy_group()) as (runtime, client, _):
        await created(runtime, client, "P.m")
        targets = np.array([2, 3])
        for seq_id, sampled in ((1, [2.5, 3.0]), (2, [2.0, 4.0])):
            inputs = {
                "target_tokens": targets,
                "weights": np.ones(2, np.float32),
                "logprobs": np.array(sampled, np.float32),
            }
            datum = Datum(np.array([1, 2], np.int64), inputs)
            await value(submit(client, "P.m", seq_id, TrainBatch("P.m", (datum,), "ppo")))
        await value(submit(client, "P.m", 3, batch("P.m")))
        assert runtime.throughput().logprob_gap == LogprobGap(mean=0.375, max=1.0, batches=2)
