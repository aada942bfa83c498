"""What is under way is told in front of every call, and what servers died over runs with nothing beside it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ModelLost, TinsmithError, WorkerDied
from schemas.operations import Operation, OptimStep
from tests.support.inline_group import InlineWorkerGroup
from tests.workers.harness import batch, create, running, sample, step, toy_group, until, value
from tests.workers.test_recovery import NEVER, MemoryLog, Recorder, weight
from workers.recovery import MAX_SERVER_DEATHS
from workers.reruns import MAX_RERUNS
from workers.runtime import ModelRuntime, Ticket
from workers.tickets import Entry
from workers.under_way import Mark, UnderWay


class Marks:
    """Everything that was told to be written."""

    def __init__(self) -> None:
        self.seen: list[tuple[Mark, bool]] = []

    def __call__(self, mark: Mark, durable: bool) -> None:
        self.seen.append((mark, durable))

    @property
    def named(self) -> list[tuple[str, ...]]:
        return [mark.running for mark, _ in self.seen]


async def no_answer(_: object) -> None:
    """For entries that nobody waits for."""


def entry(name: str, **more: Any) -> Entry:
    async def load() -> Operation:
        raise AssertionError("nothing is read here")

    return Entry(Ticket(name, "p", "m", 1, load, no_answer, **more))


def submit(
    runtime: ModelRuntime, name: str, operation: Operation, model_id: str | None, seq_id: int | None, **more: Any
) -> asyncio.Future[Any]:
    outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def load() -> Operation:
        return operation

    async def done(result: object) -> None:
        outcome.set_result(result)

    is_step = isinstance(operation, OptimStep)
    runtime.submit(Ticket(name, "p", model_id, seq_id, load, done, is_step=is_step, **more))
    return outcome


def noting(group: InlineWorkerGroup, marks: Marks) -> dict[str, list[tuple[str, ...]]]:
    """What was written when each method was called, by method."""
    found: dict[str, list[tuple[str, ...]]] = {}
    call = group.call

    async def noted(method: str, *args: Any, **kwargs: Any) -> Any:
        found.setdefault(method, []).append(marks.named[-1] if marks.seen else ())
        return await call(method, *args, **kwargs)

    group.call = noted  # type: ignore[method-assign]
    return found


async def test_every_call_that_executes_something_is_told_before_it_begins() -> None:
    marks, group = Marks(), toy_group()
    calls = noting(group, marks)
    async with running(group, under_way=UnderWay(marks)) as (runtime, client, _):
        runtime.open_model("m")
        await value(client.submit(create(), "m", 0, request_id="creation"))
        await value(client.submit(batch("m"), "m", 1, request_id="batch"))
        await value(client.submit(step(), "m", 2, request_id="step"))
        await value(client.submit(sample(), request_id="sample"))
        await until(lambda: marks.named[-1] == ())  # what rests executes nothing
    assert "creation" in calls["create_adapter"][0]
    assert [next(name for name in ("batch", "step") if name in named) for named in calls["run_micro_batch"]] == [
        "batch",
        "step",
    ]
    assert all("sample" in named for named in calls["sample_turn"])
    assert not any(durable for _, durable in marks.seen), "a sync in the ordinary path"


async def test_what_is_left_over_or_executed_again_is_written_durably(tmp_path: Path) -> None:
    marks, group, log = Marks(), toy_group(), MemoryLog(tmp_path)
    async with running(group, history=log, snapshots=NEVER, under_way=UnderWay(marks)) as (runtime, client, _):
        recorder = Recorder(client, log)
        await recorder.new("a")
        await recorder.run(batch("a"), "a", 1)
        group.die()
        await value(submit(runtime, "left", step(), "a", 2, left_over=True))
    assert any(durable and mark.again == ("logged-a-1",) for mark, durable in marks.seen)
    assert any(durable and mark.running == ("left",) for mark, durable in marks.seen)


async def test_an_answer_that_is_being_written_is_still_under_way() -> None:
    marks = Marks()
    under_way = UnderWay(marks)
    done, next_one = entry("done"), entry("next")
    async with under_way.call([done]):
        under_way.answering(done, True)
    async with under_way.call([next_one]):
        pass
    under_way.answering(done, False)
    async with under_way.call([next_one]):
        pass
    assert marks.named == [("done",), ("done", "next"), (), ("next",)]
    await under_way.end()
    async with under_way.call([done]):
        assert marks.named[-1] == ()


async def test_what_a_server_died_over_waits_for_all_runtimes_and_keeps_them_waiting() -> None:
    under_way = UnderWay()
    suspect, answering = entry("suspect", deaths=1), entry("answering")
    order: list[str] = []
    release = {name: asyncio.Event() for name in ("first", "suspect")}

    async def call(name: str, *entries: Entry) -> None:
        async with under_way.call(entries):
            order.append(name)
            if name in release:
                await release[name].wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(call("first", entry("x")))
        await until(lambda: order == ["first"])
        under_way.answering(answering, True)
        tasks.create_task(call("suspect", suspect))
        await asyncio.sleep(0.01)
        tasks.create_task(call("late"))
        release["first"].set()
        await asyncio.sleep(0.01)
        assert order == ["first"]
        under_way.answering(answering, False)
        await until(lambda: order == ["first", "suspect"])
        await asyncio.sleep(0.01)
        assert order == ["first", "suspect"]
        release["suspect"].set()
    assert order == ["first", "suspect", "late"]


async def test_a_cancelled_wait_keeps_nobody_waiting() -> None:
    under_way = UnderWay()
    async with under_way.call([]):
        waiting = asyncio.ensure_future(under_way.call([entry("suspect", deaths=1)]).__aenter__())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(20), under_way.call([]):
            pass


async def test_an_operation_that_too_many_servers_died_over_fails_in_its_place_and_others_go_on() -> None:
    group = toy_group()
    async with running(group) as (runtime, client, _):
        for model_id in ("a", "b"):
            runtime.open_model(model_id)
            await value(client.submit(create(), model_id, 0))
        twice = submit(runtime, "twice", batch("a"), "a", 1, deaths=MAX_SERVER_DEATHS - 1)
        deadly = submit(runtime, "deadly", batch("a"), "a", 2, deaths=MAX_SERVER_DEATHS)
        behind = submit(runtime, "behind", step(), "a", 3)
        other = submit(runtime, "other", batch("b"), "b", 1)
        for outcome in (twice, behind, other):
            assert not isinstance(await value(outcome), TinsmithError)
        with pytest.raises(WorkerDied, match="the server died each time"):
            await value(deadly)
        assert weight(group, "a") == (6.0, 0.0)
        assert [sorted(turn.opened) for turn in group.turns if "twice" in turn.opened] == [["twice"]]


async def test_a_creation_and_a_sample_that_servers_died_over_fail_too() -> None:
    async with running(toy_group()) as (runtime, client, _):
        runtime.open_model("a")
        creation = submit(runtime, "creation", create(), "a", 0, deaths=MAX_SERVER_DEATHS)
        behind = client.submit(batch("a"), "a", 1)
        deadly = submit(runtime, "deadly", sample(), None, None, deaths=MAX_RERUNS + 1)
        for outcome in (creation, deadly):
            with pytest.raises(WorkerDied):
                await value(outcome)
        with pytest.raises(TinsmithError, match="was not created"):
            await value(behind)
        await value(submit(runtime, "good", sample(), None, None, deaths=MAX_RERUNS))


async def test_a_model_that_servers_died_over_while_it_came_back_is_lost_alone(tmp_path: Path) -> None:
    group, log = toy_group(), MemoryLog(tmp_path)
    async with running(group, history=log, snapshots=NEVER) as (_, client, lost):
        recorder = Recorder(client, log)
        for model_id in ("a", "b"):
            await recorder.new(model_id)
            await recorder.run(batch(model_id), model_id, 1)
        for model_id, deaths in (("a", MAX_SERVER_DEATHS), ("b", MAX_SERVER_DEATHS - 1)):
            log.operations[model_id] = [replace(one, deaths=deaths) for one in log.operations[model_id]]
        group.die()
        with pytest.raises(ModelLost, match="the server died each time"):
            await value(client.submit(step(), "a", 2))
        await value(client.submit(step(), "b", 2))
        assert lost == ["a"]
