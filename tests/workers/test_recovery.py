"""Bringing models back: what is executed again, what is told meanwhile, and who is to blame for a dying worker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from schemas.base_model_info import BaseModelInfo
from schemas.errors import (
    Cancelled,
    EngineFailure,
    Gone,
    ModelLost,
    NonFiniteGradient,
    NotNow,
    OutOfMemory,
    Unavailable,
    WorkerDied,
)
from schemas.operations import LoadWeights, Operation, OptimStep, SavedSnapshot, TrainBatch, ZeroGrad
from tests.support.inline_group import InlineWorkerGroup
from tests.support.toy_worker import ToyEngine
from tests.workers.harness import (
    Client,
    batch,
    create,
    gate_of,
    running,
    sample,
    step,
    toy_group,
    until,
    until_state,
    value,
)
from workers.local import LocalWorkerGroup
from workers.parked import PATIENCE
from workers.recovery import Past, PastOperation, Snapshot
from workers.snapshots import SnapshotPolicy
from workers.spec import WorkerSpec

OFTEN = SnapshotPolicy(operations=1, share=1.0)
NEVER = SnapshotPolicy(operations=10**6, seconds=1e6)


class MemoryLog:
    """A log in memory, filled by `Recorder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.creations: dict[str, Operation] = {}
        self.operations: dict[str, list[PastOperation]] = {}
        self.snapshots: dict[str, list[Snapshot]] = {}
        self.collected = -1
        self.unavailable = 0
        self.refuse_snapshots = False

    async def recall(self, model_id: str) -> Past:
        if self.unavailable:
            self.unavailable -= 1
            raise Unavailable("the log cannot be read")
        kept = tuple(reversed(self.snapshots.get(model_id, [])))
        done = tuple(self.operations.get(model_id, []))
        return Past("p", kept, done, self.collected, partial(_give, self.creations[model_id]))

    async def new_snapshot_path(self) -> str:
        return str(self.folder / f"{sum(map(len, self.snapshots.values()))}.{len(list(self.folder.iterdir()))}")

    async def keep_snapshot(self, model_id: str, applied_seq: int, path: str, saved: SavedSnapshot) -> bool:
        if self.refuse_snapshots:
            return False
        self.snapshots.setdefault(model_id, []).append(Snapshot(applied_seq, path, saved.sha256))
        return True

    async def drop_snapshot(self, path: str) -> None:
        for kept in self.snapshots.values():
            kept[:] = [one for one in kept if one.path != path]


async def _give(operation: Operation) -> Operation:
    return operation


class Recorder(Client):
    """A client that also keeps the log."""

    patience = 20.0
    """Seconds that an operation may take."""

    def __init__(self, client: Client, log: MemoryLog) -> None:
        super().__init__(client.runtime)
        self.log = log

    async def new(self, model_id: str, seed: int = 1) -> None:
        self.runtime.open_model(model_id)
        self.log.creations[model_id] = create(seed)
        await value(self.submit(create(seed), model_id, 0))

    async def run(self, operation: Operation, model_id: str, seq_id: int) -> object:
        """Run an operation and log it."""
        outcome = self.submit(operation, model_id, seq_id)
        result = await asyncio.wait_for(asyncio.shield(outcome), self.patience)
        failed = isinstance(result, NonFiniteGradient)
        is_step = isinstance(operation, OptimStep)
        changes = isinstance(operation, OptimStep | ZeroGrad) or (
            isinstance(operation, TrainBatch) and operation.backward
        )
        if changes and (failed or not isinstance(result, Exception)):
            load: Callable[[], Awaitable[Operation]] = partial(_give, operation)
            done = PastOperation(seq_id, f"logged-{model_id}-{seq_id}", is_step, 10, failed, load)
            self.log.operations.setdefault(model_id, []).append(done)
        return result


def weight(group: InlineWorkerGroup, model_id: str) -> tuple[float, float]:
    adapter = group.worker.actor.engine.adapters[model_id]
    return adapter.weight, adapter.gradient


@pytest.mark.parametrize("policy", [NEVER, OFTEN])
async def test_a_model_comes_back_with_its_gradient_and_goes_on(tmp_path: Path, policy: SnapshotPolicy) -> None:
    group, log = toy_group(), MemoryLog(tmp_path)
    async with running(group, history=log, snapshots=policy) as (_, client, lost):
        recorder = Recorder(client, log)
        await recorder.new("a")
        operations: tuple[Operation, ...] = (batch("a"), step(), batch("a"), ZeroGrad(), batch("a"))
        for seq_id, operation in enumerate(operations, start=1):
            await recorder.run(operation, "a", seq_id)
        if policy is OFTEN:
            await until(lambda: log.snapshots.get("a") and log.snapshots["a"][-1].applied_seq == 5)
        before = weight(group, "a")
        assert before == (6.0, -5.0)
        group.die()
        await value(client.submit(batch("a", backward=False), "a", 6))
        assert weight(group, "a") == before
        assert await value(client.submit(step(), "a", 7))
        assert weight(group, "a") == (11.0, 0.0)
        assert lost == []
        assert ("restore_snapshot" in group.calls) == (policy is OFTEN)


@pytest.mark.parametrize(("seconds", "least", "most"), [(60.0, 1, 6), (0.0, 20, 30)])
async def test_models_that_come_back_within_their_time_share_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, least: int, most: int
) -> None:
    monkeypatch.setattr("workers.setbacks.RESTORE_SECONDS", seconds)
    group, log = toy_group(), MemoryLog(tmp_path)
    async with running(group, history=log, snapshots=NEVER) as (_, client, lost):
        recorder = Recorder(client, log)
        models = [f"model {number}" for number in range(20)]
        for model_id in models:
            await recorder.new(model_id)
            for seq_id, operation in enumerate((batch(model_id), step(), batch(model_id)), start=1):
                await recorder.run(operation, model_id, seq_id)
        group.die()
        before = len(group.turns)
        await asyncio.gather(
            *(value(client.submit(batch(model_id, backward=False), model_id, 4)) for model_id in models)
        )
        assert {weight(group, model_id) for model_id in models} == {(6.0, -5.0)}
        assert group.calls.count("create_adapter") == 2 * len(models)
        assert least <= len(group.turns) - before <= most
        assert lost == []


async def test_what_is_done_is_told_while_it_is_done(tmp_path: Path) -> None:
    group, log = toy_group(), MemoryLog(tmp_path)
    async with running(group, history=log, snapshots=NEVER, micro_batch_tokens=2) as (runtime, client, _):
        recorder = Recorder(client, log)
        await recorder.new("a")
        for seq_id, seconds in ((1, 0.0), (2, 0.3), (3, 0.0)):
            await recorder.run(batch("a", sleep=seconds), "a", seq_id)
        group.die()
        behind = client.submit(batch("a"), "a", 4, request_id="behind")
        seen = set()

        def watch() -> bool:
            state = runtime.waiting("behind")
            seen.add((state.state, state.reason))
            return behind.done()

        await until(watch)
        assert ("paused_capacity", "recovering: 1 of 3 operations of this model are being executed again") in seen
        assert (await value(behind)).metrics["loss:sum"] == -5.0


async def test_a_log_that_cannot_be_read_now_is_read_later(tmp_path: Path) -> None:
    group, log = toy_group(), MemoryLog(tmp_path)
    async with running(group, history=log, snapshots=NEVER) as (_, client, lost):
        recorder = Recorder(client, log)
        await recorder.new("a", seed=3)
        await recorder.new("b", seed=4)
        log.unavailable = 2
        group.die()
        for model_id, expected in (("a", -15.0), ("b", -20.0)):
            result = await value(client.submit(batch(model_id, backward=False), model_id, 1))
            assert result.metrics["loss:sum"] == expected
        assert lost == []


def unreadable(group: InlineWorkerGroup, times: dict[str, int]) -> list[str]:
    """Snapshots, by path, that cannot be read for the moment, and how often; returns what is tried, in order."""
    tried: list[str] = []
    restore = ToyEngine.restore_adapter

    def maybe(engine: ToyEngine, adapter_id: str, path: Path, sha256: str) -> None:
        tried.append(str(path))
        if tried.count(str(path)) <= times.get(str(path), 0):
            raise NotNow("too many open files")
        restore(engine, adapter_id, path, sha256)

    start = group.start

    async def start_so() -> BaseModelInfo:
        info = await start()
        engine = group.worker.actor.engine
        engine.restore_adapter = partial(maybe, engine)
        return info

    group.start = start_so
    return tried


async def _two_snapshots(recorder: Recorder, log: MemoryLog) -> list[str]:
    """A model with a weight of 11 and no gradient, and the paths of its snapshots, the newest first."""
    await recorder.new("a")
    for seq_id, operation in enumerate((batch("a"), step(), batch("a"), step()), start=1):
        await recorder.run(operation, "a", seq_id)
        if seq_id % 2 == 0:
            await until(lambda seq_id=seq_id: log.snapshots.get("a") and log.snapshots["a"][-1].applied_seq == seq_id)
    kept = log.snapshots["a"] = [one for one in log.snapshots["a"] if one.applied_seq in (2, 4)]
    log.collected = 2
    return [one.path for one in reversed(kept)]


async def test_a_snapshot_that_cannot_be_read_now_is_passed_over_and_kept(tmp_path: Path) -> None:
    group, log, times = toy_group(), MemoryLog(tmp_path), dict[str, int]()
    tried = unreadable(group, times)
    async with running(group, history=log, snapshots=OFTEN) as (_, client, lost):
        newest, older = await _two_snapshots(Recorder(client, log), log)
        times[newest] = 1
        group.die()
        await value(client.submit(batch("a", backward=False), "a", 5))
        assert (tried, weight(group, "a"), lost) == ([newest, older], (11.0, 0.0), [])
        assert {newest, older} <= {one.path for one in log.snapshots["a"]}


async def test_a_model_waits_for_snapshots_that_cannot_be_read_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.recovery._RETRY_SECONDS", 0.01)
    monkeypatch.setattr("workers.recovery._LONGEST_RETRY", 0.05)
    group, log, times = toy_group(), MemoryLog(tmp_path), dict[str, int]()
    tried = unreadable(group, times)
    async with running(group, history=log, snapshots=OFTEN) as (runtime, client, lost):
        newest, older = await _two_snapshots(Recorder(client, log), log)
        times |= {newest: 10, older: 10}
        group.die()
        asked = client.submit(batch("a", backward=False), "a", 5, request_id="asked")
        seen: set[str | None] = set()

        def watch() -> bool:
            seen.add(runtime.waiting("asked").reason)
            return asked.done()

        await until(watch)
        await value(asked)
        assert (tried.count(newest), tried.count(older), lost) == (11, 10, []), "more often than a damaged one is tried"
        assert weight(group, "a") == (11.0, 0.0)
        assert any("too many open files" in (reason or "") for reason in seen)


@pytest.mark.parametrize("replaying", [False, True])
async def test_memory_that_is_short_for_a_while_loses_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaying: bool
) -> None:
    monkeypatch.setattr("workers.recovery._RETRY_SECONDS", 0.01)
    monkeypatch.setattr("workers.recovery._LONGEST_RETRY", 0.05)
    group, log, refusals = toy_group(), MemoryLog(tmp_path), [10]
    method = "optimizer_step" if replaying else "create_adapter"
    real: Callable[..., object] = getattr(ToyEngine, method)
    async with running(group, history=log, snapshots=NEVER) as (_, client, lost):
        recorder = Recorder(client, log)
        await recorder.new("a")
        await recorder.run(batch("a"), "a", 1)
        await recorder.run(step(), "a", 2)

        def short(engine: ToyEngine, *args: object, **options: object) -> object:
            refusals[0] -= 1
            if refusals[0] >= 0:
                raise OutOfMemory("the disk for idle adapters is full", code="idle_disk")
            return real(engine, *args, **options)

        monkeypatch.setattr(ToyEngine, method, short)
        group.die()
        await value(client.submit(batch("a", backward=False), "a", 3))
        assert (refusals[0], weight(group, "a"), lost) == (-1, (6.0, 0.0), [])


async def test_what_cannot_be_read_now_runs_later_in_its_place_and_holds_up_no_other_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.tickets._FIRST_PAUSE", 0.05)
    async with running(toy_group(), history=MemoryLog(tmp_path), snapshots=NEVER) as (runtime, client, lost):
        for model_id in ("a", "b"):
            runtime.open_model(model_id)
        late = client.submit(create(), "a", 0, unread=2)
        await value(client.submit(create(), "b", 0))
        assert not late.done()
        await value(late)
        late = client.submit(batch("a"), "a", 1, request_id="late", unread=5)
        behind = client.submit(step(), "a", 2, request_id="behind")
        for seq_id in range(1, 4):
            await value(client.submit(batch("b"), "b", seq_id))
        assert not late.done()
        for request_id in ("late", "behind"):
            state = runtime.waiting(request_id)
            assert state.state == "paused_capacity"
            assert "the disk is away" in (state.reason or "")
        assert (await value(late)).metrics["loss:sum"] == -5.0
        assert (await value(behind)).metrics["grad_norm:mean"] == 5.0
        assert client.order.index("late") < client.order.index("behind")
        assert lost == []


async def test_reads_that_take_long_to_fail_stall_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.tickets._FIRST_PAUSE", 0.01)
    monkeypatch.setattr("workers.tickets._LONGEST_PAUSE", 0.01)
    async with running(toy_group(), history=MemoryLog(tmp_path), snapshots=NEVER) as (runtime, client, _):
        for model_id in ("a", "b"):
            runtime.open_model(model_id)
            await value(client.submit(create(), model_id, 0))
        late = client.submit(batch("a"), "a", 1, request_id="late", unread=5, unread_after=0.5)
        drawn = client.submit(sample(1, tokens=3), request_id="drawn", unread=5, unread_after=0.5)
        await until(lambda: client.loads.count("late") > 1 and client.loads.count("drawn") > 1)
        for seq_id in range(1, 9):
            await value(client.submit(batch("b"), "b", seq_id))
            await value(client.submit(sample(2, tokens=2)))
        assert client.loads.count("late") < 5, "others waited for its reads"
        assert not late.done()
        assert (await value(late)).metrics["loss:sum"] == -5.0
        assert len((await value(drawn)).sequences[0].tokens) == 3


async def test_what_could_not_be_read_gives_no_claim_to_more_than_a_share_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.tickets._FIRST_PAUSE", 0.01)
    monkeypatch.setattr("workers.tickets._LONGEST_PAUSE", 0.01)
    async with running(toy_group(), micro_batch_tokens=2) as (runtime, client, _):
        for model_id in ("a", "b"):
            runtime.open_model(model_id)
            await value(client.submit(create(), model_id, 0, project_id=model_id))
        away = True
        blocked = client.submit(batch("a"), "a", 1, project_id="a", unread=lambda: away)
        for seq_id in range(1, 41):
            await value(client.submit(batch("b"), "b", seq_id, project_id="b"))
        gate = gate_of(runtime._group)
        held = client.submit(batch("b", held=1), "b", 41, project_id="b")
        names = [f"{model_id}{number}" for number in range(20) for model_id in ("a", "b")]
        later = [
            client.submit(batch(name[0]), name[0], int(name[1:]) + (2 if name[0] == "a" else 42), name, name[0])
            for name in names
        ]
        away = False
        await until(lambda: runtime.waiting("a0").reason is not None and not blocked.done())
        await asyncio.sleep(0.1)
        gate.set()
        await asyncio.gather(value(held), value(blocked), *(value(outcome) for outcome in later))
        order = [name[0] for name in client.order if name in names]
        assert order[:10].count("b") >= 3, f"one project was served for what it had missed: {''.join(order)}"


async def test_a_model_that_found_no_room_and_cannot_be_read_now_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.tickets._FIRST_PAUSE", 0.01)
    async with running(toy_group()) as (runtime, client, _):
        for model_id in ("a", "b"):
            runtime.open_model(model_id)
            await value(client.submit(create(), model_id, 0))
        for _ in range(PATIENCE):
            runtime._training._composer.parked.add("a")
        away = True
        late = client.submit(batch("a"), "a", 1, unread=lambda: away)
        runtime._training._composer.parked.freed()
        await value(client.submit(batch("b"), "b", 1))
        assert not late.done()
        away = False
        await value(late)


async def test_a_model_that_is_closed_while_its_log_is_read_ends_alone(tmp_path: Path) -> None:
    group, log, asked, go = toy_group(), MemoryLog(tmp_path), asyncio.Event(), asyncio.Event()
    recall = log.recall

    async def slow(model_id: str) -> Past:
        if model_id != "a":
            return await recall(model_id)
        asked.set()
        await go.wait()
        raise Unavailable("the log cannot be read")

    log.recall = slow
    async with running(group, history=log, snapshots=NEVER) as (runtime, client, lost):
        recorder = Recorder(client, log)
        await recorder.new("a")
        await recorder.new("b")
        group.die()
        cut_off = client.submit(step(), "a", 1)
        await asyncio.wait_for(asked.wait(), 10)
        runtime.close_model("a")
        go.set()
        with pytest.raises(Gone):
            await value(cut_off)
        await value(client.submit(batch("b", backward=False), "b", 1))
        assert (runtime.state, lost) == ("ready", [])


@pytest.mark.parametrize("older", [False, True])
async def test_no_other_way_back_that_fails_loses_a_model_whose_snapshot_may_be_readable_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    """What made the model, or what came after its older snapshot, read a checkpoint that is deleted."""
    monkeypatch.setattr("workers.recovery._RETRY_SECONDS", 0.01)
    monkeypatch.setattr("workers.recovery._LONGEST_RETRY", 0.02)
    group, log, times = toy_group(), MemoryLog(tmp_path), dict[str, int]()
    unreadable(group, times)
    async with running(group, history=log, snapshots=OFTEN) as (_, client, lost):
        newest, _ = await _two_snapshots(Recorder(client, log), log)
        times[newest] = 15
        loads = LoadWeights(str(tmp_path / "deleted"), with_optimizer=True, create=not older)
        if older:
            deleted = partial(_give, loads)
            log.operations["a"][2] = PastOperation(3, "deleted", False, 10, False, deleted)
        else:
            log.snapshots["a"], log.collected = log.snapshots["a"][1:], -1
            log.creations["a"] = loads
        group.die()
        await value(client.submit(batch("a", backward=False), "a", 5))
        assert (weight(group, "a"), lost) == ((11.0, 0.0), [])


async def test_a_sample_that_cannot_be_read_now_runs_later_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.tickets._FIRST_PAUSE", 0.05)
    async with running(toy_group()) as (runtime, client, _):
        late = client.submit(sample(1, tokens=3), request_id="late", unread=3)
        unwanted = client.submit(sample(2, tokens=3), request_id="unwanted", unread=100)
        await value(client.submit(sample(3, tokens=3)))
        assert not late.done()
        assert "the disk is away" in (runtime.waiting("late").reason or "")
        assert runtime.samples_waiting("p") == 2
        runtime.cancel("unwanted")
        assert isinstance(await asyncio.wait_for(unwanted, 10), Cancelled)
        assert len((await value(late)).sequences[0].tokens) == 3
        assert runtime.samples_waiting("p") == 0


async def test_what_cannot_be_read_back_is_lost_and_not_rewound(tmp_path: Path) -> None:
    group, log = toy_group(), MemoryLog(tmp_path)
    async with running(group, history=log, snapshots=NEVER) as (runtime, client, lost):
        recorder = Recorder(client, log)
        await recorder.new("a")
        await recorder.new("b")
        await recorder.run(batch("a"), "a", 1)
        log.collected = 1
        log.operations["b"] = []
        group.die()
        with pytest.raises(ModelLost, match="no snapshot"):
            await value(client.submit(step(), "a", 2))
        assert "a" in lost
        assert runtime.state == "ready"


async def test_an_operation_that_fails_when_it_is_executed_again_loses_its_model(tmp_path: Path) -> None:
    group, log = toy_group(), MemoryLog(tmp_path)
    async with running(group, history=log, snapshots=NEVER) as (_, client, lost):
        recorder = Recorder(client, log)
        await recorder.new("a")
        await recorder.new("b")
        await recorder.run(batch("b"), "b", 1)
        bad = PastOperation(1, "bad", False, 10, False, partial(_give, batch("a", refuse=1)))
        log.operations["a"] = [bad]
        group.die()
        with pytest.raises(ModelLost):
            await value(client.submit(step(), "a", 2))
        assert lost == ["a"]
        await value(client.submit(step(), "b", 2))
        assert weight(group, "b") == (6.0, 0.0)


async def test_a_call_that_fails_as_a_whole_sets_its_models_back_to_the_log(tmp_path: Path) -> None:
    group, log = toy_group(), MemoryLog(tmp_path)
    async with running(group, history=log, snapshots=NEVER) as (_, client, lost):
        recorder = Recorder(client, log)
        await recorder.new("a")
        await recorder.run(batch("a"), "a", 1)
        engine = group.worker.actor.engine
        take = engine.take_stats
        engine.take_stats = lambda: [][0]  # after everything was computed: nobody knows how far it came
        with pytest.raises(EngineFailure):
            await value(client.submit(batch("a"), "a", 2))
        engine.take_stats = take
        await value(client.submit(batch("a", backward=False), "a", 3))
        assert weight(group, "a") == (1.0, -5.0)
        assert lost == []


async def test_snapshots_that_cannot_be_recorded_are_tried_again_and_hold_nobody_up(tmp_path: Path) -> None:
    group, log = toy_group(), MemoryLog(tmp_path)
    log.refuse_snapshots = True
    async with running(group, history=log, snapshots=OFTEN) as (_, client, _):
        recorder = Recorder(client, log)
        await recorder.new("a")
        for seq_id in range(1, 6):
            await recorder.run(batch("a"), "a", seq_id)
        assert weight(group, "a") == (1.0, -25.0)


async def test_an_operation_that_always_kills_the_worker_fails_alone(tmp_path: Path) -> None:
    spec = WorkerSpec("toy", None, str(tmp_path), builder="tests.support.toy_worker:build")
    log = MemoryLog(tmp_path)
    async with running(LocalWorkerGroup(spec), history=log, snapshots=NEVER, restart_limit=20) as (runtime, client, _):
        recorder = Recorder(client, log)
        for model_id in ("a", "b"):
            await recorder.new(model_id)
            await recorder.run(batch(model_id), model_id, 1)
        deadly = client.submit(batch("a", die=1), "a", 2)
        good = client.submit(step(), "b", 2)
        with pytest.raises(WorkerDied, match="each time"):
            await value(deadly, 120)
        assert (await value(good, 60)).metrics["grad_norm:mean"] == 5.0
        await until_state(runtime, "ready")
        assert (await value(client.submit(step(), "a", 3), 60)).metrics["grad_norm:mean"] == 5.0


async def test_a_hung_turn_is_a_dead_worker_and_its_operation_runs_again(tmp_path: Path) -> None:
    group, log = toy_group(), MemoryLog(tmp_path)
    async with running(group, history=log, snapshots=NEVER, turn_timeout=2.0) as (runtime, client, lost):
        recorder = Recorder(client, log)
        await recorder.new("a")
        await recorder.run(batch("a"), "a", 1)
        engine = group.worker.actor.engine
        hang = threading.Event()
        engine.take_stats = hang.wait
        hung = client.submit(batch("a"), "a", 2)
        await until(lambda: group.worker is not None and group.worker.actor.engine is not engine)
        hang.set()
        assert (await value(hung)).metrics["loss:sum"] == -5.0
        await until_state(runtime, "ready")
        assert weight(group, "a") == (1.0, -10.0)
        assert lost == []
