"""The server of a runtime is lost, or the way to it: nothing is lost, nothing is done twice, the order stays."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import Gone, Unavailable
from schemas.operations import Operation, SampleDelta, SaveWeights, ZeroGrad
from tests.support.inline_group import InlineWorkerGroup
from tests.workers.harness import Client, batch, create, sample, step, toy_group, until, until_state, value
from tests.workers.remote.harness import Cluster, QueueLink, remotely, server_on
from tests.workers.test_recovery import NEVER, OFTEN, MemoryLog, Recorder, weight
from workers.remote import RemoteRuntime
from workers.runtime import Ticket
from workers.snapshots import SnapshotPolicy


class Groups:
    """Makes the worker group of each server."""

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.made: list[InlineWorkerGroup] = []
        self._step_seconds = step_seconds

    def __call__(self) -> InlineWorkerGroup:
        self.made.append(toy_group(self._step_seconds))
        return self.made[-1]

    @property
    def last(self) -> InlineWorkerGroup:
        """The group of the server that lives."""
        return self.made[-1]


def steps(count: int, **config: float) -> list[Operation]:
    """Batches and steps of different sizes: another order, or one more or less, gives another weight."""
    return [batch("a", **config) if number % 2 else step(0.1 * number) for number in range(1, count + 1)]


def expected(count: int) -> tuple[float, float]:
    """The weight and the gradient after `steps(count)`, each done once and in order."""
    weight, gradient = 1.0, 0.0
    for number in range(1, count + 1):
        if number % 2:
            gradient -= 5.0
        else:
            weight, gradient = weight - 0.1 * number * gradient, 0.0
    return weight, gradient


@pytest.mark.parametrize("policy", [NEVER, OFTEN])
@pytest.mark.parametrize("lose_at", [0, 3, 9])
async def test_a_new_server_goes_on_where_the_log_is(tmp_path: Path, policy: SnapshotPolicy, lose_at: int) -> None:
    groups, log = Groups(), MemoryLog(tmp_path)
    async with remotely(groups, history=log, snapshots=policy) as (cluster, _, runtime, client, lost):
        recorder = Recorder(client, log)
        await recorder.new("a")
        for seq_id, operation in enumerate(steps(10), start=1):
            if seq_id == lose_at + 1:
                cluster.lose()
                running = asyncio.ensure_future(recorder.run(operation, "a", seq_id))
                await until(lambda: runtime.state == "restarting")
                await cluster.begin()
                await running
            else:
                await recorder.run(operation, "a", seq_id)
        assert weight(groups.last, "a") == pytest.approx(expected(10))
        assert lost == []
    assert cluster.servers == 2


async def test_what_was_under_way_runs_again_in_its_place(tmp_path: Path) -> None:
    groups, log = Groups(), MemoryLog(tmp_path)
    async with remotely(groups, history=log, snapshots=NEVER) as (cluster, _, _, client, _):
        recorder = Recorder(client, log)
        await recorder.new("a")
        await recorder.run(steps(1)[0], "a", 1)
        later = [client.submit(operation, "a", seq_id) for seq_id, operation in enumerate(steps(8), 1) if seq_id > 3]
        slow = client.submit(step(0.2), "a", 2)
        client.submit(batch("a", sleep=0.3), "a", 3)
        await value(slow)
        cluster.lose()  # 2 is answered and not in the log: it is not to be done again, but the log does not know it
        log.operations["a"].append(_logged(2, step(0.2)))
        await cluster.begin()
        for outcome in later:
            await value(outcome)
        assert weight(groups.last, "a") == pytest.approx(expected(8))


def _logged(seq_id: int, operation: Operation) -> Any:
    from workers.recovery import PastOperation

    async def load() -> Operation:
        return operation

    return PastOperation(seq_id, f"logged-{seq_id}", True, 10, False, load)


@pytest.mark.exhaustive
async def test_servers_lost_again_and_again_leave_the_right_weights(tmp_path: Path) -> None:
    groups, log = Groups(), MemoryLog(tmp_path)
    async with remotely(groups, history=log, snapshots=OFTEN) as (cluster, link, _, client, lost):
        recorder = Recorder(client, log)
        await recorder.new("a")
        over = asyncio.Event()

        async def chaos() -> None:
            for number in itertools.count():
                await asyncio.sleep(0.15 + 0.03 * (number % 4))
                if over.is_set():
                    return
                if number % 3 == 0:
                    cluster.break_links()
                elif number % 3 == 1:
                    link.drop_answers += 1
                else:
                    cluster.lose()
                    await asyncio.sleep(0.02)
                    await cluster.begin()

        breaking = asyncio.ensure_future(chaos())
        done = 0
        for operation in steps(240, sleep=0.1):
            await recorder.run(operation, "a", done := done + 1)
            if done >= 24 and cluster.servers > 2:
                break
        over.set()
        await breaking
        forward = await value(client.submit(batch("a", backward=False), "a", done + 1))
        assert forward.metrics["loss:sum"] == pytest.approx(-5.0 * expected(done)[0])
        assert cluster.servers > 2
        assert lost == []


async def test_a_broken_way_costs_nothing_while_the_server_lives(tmp_path: Path) -> None:
    groups, log = Groups(), MemoryLog(tmp_path)
    async with remotely(groups, history=log, snapshots=NEVER) as (cluster, link, runtime, client, _):
        recorder = Recorder(client, log)
        await recorder.new("a")
        for seq_id, operation in enumerate(steps(12), start=1):
            if seq_id % 3 == 0:
                cluster.break_links()
            if seq_id % 4 == 0:
                link.drop_answers, link.refuse_sends = 1, 1
            await recorder.run(operation, "a", seq_id)
        assert weight(groups.last, "a") == pytest.approx(expected(12))
        await until_state(runtime, "ready")
        assert await runtime.probe(5.0)
    assert cluster.servers == 1
    assert groups.last.calls.count("create_adapter") == 1, "the model was brought back without need"


async def test_a_stream_goes_on_after_its_server_was_lost_without_telling_anything_twice() -> None:
    groups, deltas = Groups(step_seconds=0.02), list[SampleDelta]()
    async with remotely(groups) as (cluster, _, _, client, _):
        outcome = client.submit(sample(tokens=30), progress=deltas.append)
        await until(lambda: sum(len(delta.tokens) for delta in deltas) >= 5)
        cluster.lose()
        told = sum(len(delta.tokens) for delta in deltas)
        await cluster.begin()
        result = await value(outcome)
        assert 5 <= told < 30
        assert [int(token) for delta in deltas for token in delta.tokens] == list(result.sequences[0].tokens)


async def test_cancelled_samples_and_closed_models_stay_so(tmp_path: Path) -> None:
    groups, log = Groups(step_seconds=0.05), MemoryLog(tmp_path)
    async with remotely(groups, history=log, snapshots=NEVER) as (cluster, _, runtime, client, _):
        recorder = Recorder(client, log)
        for model_id in ("a", "b"):
            await recorder.new(model_id)
        unwanted = client.submit(sample(tokens=1000), request_id="unwanted")
        waiting = client.submit(batch("a"), "a", 2)  # behind 1, which never came
        cluster.lose()
        runtime.cancel("unwanted")
        runtime.close_model("a")
        await cluster.begin()
        for outcome in (unwanted, waiting):
            with pytest.raises(Gone):
                await value(outcome)
        await value(client.submit(batch("b"), "b", 1))
        assert set(groups.last.worker.actor.engine.adapters) == {"b"}


async def test_a_model_that_was_never_created_stays_unusable(tmp_path: Path) -> None:
    groups, log = Groups(), MemoryLog(tmp_path)
    async with remotely(groups, history=log, snapshots=NEVER) as (cluster, _, runtime, client, _):
        runtime.open_model("m")
        with pytest.raises(Exception, match="rank"):
            await value(client.submit(create(rank=0), "m", 0))
        cluster.lose()
        later = client.submit(step(), "m", 1)
        await cluster.begin()
        with pytest.raises(Exception, match="rank"):
            await value(later)


async def test_refused_numbers_and_early_arrivals_are_known_to_the_new_server(tmp_path: Path) -> None:
    groups, log = Groups(), MemoryLog(tmp_path)
    async with remotely(groups, history=log, snapshots=NEVER, gap_timeout=20.0) as (cluster, _, runtime, client, _):
        recorder = Recorder(client, log)
        await recorder.new("a")
        early = [client.submit(operation, "a", seq_id) for seq_id, operation in ((3, batch("a")), (5, step(1.0)))]
        runtime.note_refused("a", 4)
        runtime.note_refused("a", 2)
        cluster.lose()
        await cluster.begin()
        await until_state(runtime, "ready")
        assert not any(outcome.done() for outcome in early)
        await value(client.submit(ZeroGrad(), "a", 1))
        for outcome in early:
            await value(outcome)
        assert weight(groups.last, "a") == (6.0, 0.0)


async def test_what_a_cut_off_save_left_is_removed_before_it_runs_again(tmp_path: Path) -> None:
    groups, log, undone = Groups(), MemoryLog(tmp_path / "log"), list[int]()
    (tmp_path / "log").mkdir()
    async with remotely(groups, history=log, snapshots=NEVER) as (cluster, _, runtime, client, _):
        recorder = Recorder(client, log)
        await recorder.new("a")

        async def save(seq_id: int, lose: str) -> None:
            saved: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            async def load() -> Operation:
                return SaveWeights(str(tmp_path / f"saved{seq_id}.{cluster.servers}"), True)

            async def done(outcome: Any) -> None:
                saved.set_result(outcome)

            async def undo() -> None:
                undone.append(seq_id)

            def started() -> None:
                if lose == "at its start" and cluster.servers == 2:
                    cluster.lose()

            runtime.submit(Ticket(f"save{seq_id}", "p", "a", seq_id, load, done, undo=undo, started=started))
            if lose == "before it":
                cluster.lose()
            await until(lambda: cluster.server is None)
            await cluster.begin()
            assert (await value(saved)).size_bytes > 0

        await save(1, "before it")
        assert undone == []
        await save(2, "at its start")
        assert undone == [2]


async def test_a_new_edge_takes_over_from_one_that_died(tmp_path: Path) -> None:
    """The edge's process is killed and the server lives: the next edge begins from the log, and the state that the
    server had, which is further than the log, is not used."""
    groups, log = Groups(), MemoryLog(tmp_path)
    cluster = Cluster(server_on(groups, snapshots=NEVER))
    await cluster.begin()

    async def nobody(models: Any) -> None:
        raise AssertionError(f"{models} were lost")

    first = RemoteRuntime("toy", QueueLink(cluster), history=log, on_models_lost=nobody)
    second = RemoteRuntime("toy", QueueLink(cluster), history=log, on_models_lost=nobody)
    await first.start()
    await until_state(first, "ready")
    recorder = Recorder(Client(first), log)
    await recorder.new("a")
    await recorder.run(batch("a"), "a", 1)
    await value(recorder.submit(step(), "a", 2))  # done, and the edge dies before the log has it
    recorder.submit(batch("a", sleep=0.2), "a", 3)
    await asyncio.sleep(0.05)
    for task in list(first._tasks):
        task.cancel()
    client = Client(second)
    second.reopen_model("a", 4, frozenset({2, 3}))
    outcomes = [client.submit(operation, "a", seq_id) for seq_id, operation in ((2, step()), (3, batch("a")))]
    await second.start()
    for outcome in outcomes:
        await value(outcome)
    await value(client.submit(step(), "a", 4))
    assert weight(groups.last, "a") == (11.0, 0.0)
    assert cluster.server is not None
    assert cluster.server.edges == 1
    await second.stop(0.0)
    await until(lambda: cluster.server is not None and cluster.server.edges == 0)
    await cluster.end()


async def test_an_edge_that_was_silent_for_too_long_begins_anew(tmp_path: Path) -> None:
    groups, log = Groups(), MemoryLog(tmp_path)
    async with remotely(groups, history=log, snapshots=NEVER, silence=0.4) as (cluster, link, _, client, _):
        recorder = Recorder(client, log)
        await recorder.new("a")
        await recorder.run(batch("a"), "a", 1)
        link.refuse_sends = 10**6
        assert cluster.server is not None
        await until(lambda: groups.last.calls.count("remove_adapter") == 1)
        link.refuse_sends = 0
        await value(client.submit(step(), "a", 2))
        assert weight(groups.last, "a") == (6.0, 0.0)


async def test_a_server_that_cannot_be_had_fails_what_waits() -> None:
    groups = Groups()
    async with remotely(groups) as (cluster, _, runtime, client, _):
        outcome = client.submit(sample(tokens=10_000))
        cluster.gone = Unavailable("needs 8 GPUs; the cluster has 0")
        cluster.lose()
        with pytest.raises(Unavailable, match="8 GPUs"):
            await value(outcome)
        assert runtime.state == "failed"
        with pytest.raises(Unavailable, match="8 GPUs"):
            await value(client.submit(sample()))


async def test_stopping_answers_everything_and_leaves_the_server() -> None:
    groups = Groups(step_seconds=0.01)
    async with remotely(groups) as (cluster, _, runtime, client, _):
        short, long = client.submit(sample(tokens=5)), client.submit(sample(tokens=100_000))
        await until(lambda: groups.last.calls)
        await runtime.stop(0.5)
        assert len((await value(short)).sequences[0].tokens) == 5
        with pytest.raises(Unavailable, match="shutting down"):
            await value(long)
        with pytest.raises(Unavailable):
            await value(client.submit(sample()))
        assert cluster.server is not None
        assert cluster.server.edges == 0


async def test_reasons_and_numbers_reach_the_edge() -> None:
    groups = Groups()
    async with remotely(groups, gap_timeout=30.0) as (_, _, runtime, client, _):
        runtime.open_model("m")
        await value(client.submit(create(), "m", 0))
        behind = client.submit(batch("m"), "m", 2, request_id="behind")
        await until(lambda: runtime.waiting("behind").reason == "waiting for seq_id 1 of this model")
        await until(lambda: runtime.load().training == 1 and runtime.load().adapters == 1)
        await value(client.submit(step(), "m", 1))
        await value(behind)
        await until(lambda: runtime.throughput().steps == 1)
        assert runtime.info is not None
        assert runtime.samples_waiting("p") == 0
