"""The runtime on worker groups whose ranks are processes: kill -9 at bad moments, restart, start failures.

A contract: subclass it and say how a group is made. Nothing may be left of a group in the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from abc import abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest

from schemas.errors import ModelLost, NotFound, TinsmithError, Unavailable, WorkerDied
from schemas.operations import LoadWeights, SampleResult, SaveWeights
from tests.support.toy_worker import KILL_PROMPT
from tests.workers.group_contract import ProcessGroup
from tests.workers.harness import (
    batch,
    create,
    process_exists,
    running,
    sample,
    step,
    until,
    until_state,
    value,
)
from workers.spec import WorkerSpec

TOY = "tests.support.toy_worker:build"


class RuntimeContract:
    """What a runtime does on every such group."""

    slack: ClassVar[float] = 1.0
    """How many times longer than on child processes things may take."""

    @staticmethod
    @abstractmethod
    def make(spec: WorkerSpec, *, stop_grace: float) -> ProcessGroup:
        """A group that is not started yet."""

    @pytest.fixture
    async def group(self) -> AsyncIterator[ProcessGroup]:
        group = self.make(WorkerSpec("toy", None, "unused", threads=1, builder=TOY), stop_grace=1)
        yield group
        assert group.pids == [], "the runtime did not stop its group"

    async def test_kill_in_a_call_loses_live_models_restarts_and_resumes_from_a_checkpoint(
        self, group: ProcessGroup, tmp_path: Path
    ) -> None:
        folder = str(tmp_path / "saved")
        async with running(group) as (runtime, client, lost):
            for model_id in ("a", "b", "uncreated"):
                runtime.open_model(model_id)
            await value(client.submit(create(), "a", 0))
            await value(client.submit(create(), "b", 0))
            await value(client.submit(batch("a"), "a", 1))
            await value(client.submit(step(), "a", 2))
            await value(client.submit(SaveWeights(folder, True), "a", 3))
            [pid] = group.pids
            hit = client.submit(batch("a", sleep=30), "a", 4)
            behind = client.submit(step(), "a", 5)
            early = client.submit(batch("uncreated"), "uncreated", 1)
            await until(lambda: runtime.waiting("p-5").reason == "running")
            os.kill(pid, signal.SIGKILL)
            for outcome in (hit, behind):
                with pytest.raises(ModelLost, match="'a' was lost") as caught:
                    await value(outcome, 10 * self.slack)
                assert "create_training_client_from_state_with_optimizer" in (caught.value.hint or "")
            await until_state(runtime, "ready")
            assert sorted(lost) == ["a", "b"]
            with pytest.raises(ModelLost):
                await value(client.submit(step(), "b", 1))
            await until(lambda: not process_exists(pid))
            assert group.pids != [pid]
            await value(client.submit(create(), "uncreated", 0))
            assert (await value(early)).metrics["loss:sum"] == -5.0
            runtime.open_model("resumed")
            await value(client.submit(LoadWeights(folder, True, create=True), "resumed", 0))
            resumed = await value(client.submit(batch("resumed", backward=False), "resumed", 1))
            assert resumed.metrics["loss:sum"] == -30.0
            assert await runtime.probe(5)

    async def test_samples_in_flight_survive_a_kill(self, group: ProcessGroup) -> None:
        async with running(group, decode_slice=1) as (runtime, client, _):
            before = await value(client.submit(sample(3, tokens=4, rows=2)), 10 * self.slack)
            outcomes = [client.submit(sample(3, tokens=20_000, rows=2), request_id=f"s{i}") for i in range(3)]
            await until(lambda: runtime.waiting("s0").reason == "running")
            os.kill(group.pids[0], signal.SIGKILL)
            for outcome in outcomes:
                result = await value(outcome, 30 * self.slack)
                assert list(result.sequences[1].tokens[:4]) == list(before.sequences[1].tokens)

    async def test_a_deadly_sample_fails_after_two_reruns_and_the_others_get_their_tokens(
        self, group: ProcessGroup
    ) -> None:
        async with running(group) as (runtime, client, _):
            good = [client.submit(sample(i)) for i in range(1, 4)]
            deadly = client.submit(sample(KILL_PROMPT))
            with pytest.raises(WorkerDied, match="each time"):
                await value(deadly, 20 * self.slack)
            for outcome in good:
                assert isinstance(await value(outcome, 20 * self.slack), SampleResult)
            await until_state(runtime, "ready")

    async def test_death_while_idle_restarts_in_the_background(self, group: ProcessGroup) -> None:
        async with running(group) as (runtime, client, lost):
            runtime.open_model("m")
            await value(client.submit(create(), "m", 0))
            [pid] = group.pids
            os.kill(pid, signal.SIGKILL)
            await until(lambda: group.pids not in ([], [pid]) and runtime.state == "ready")
            assert lost == ["m"]
            assert isinstance(await value(client.submit(sample()), 10 * self.slack), SampleResult)

    async def test_a_failing_model_ends_in_state_failed_with_the_reason(self) -> None:
        group = self.make(WorkerSpec("broken", None, "unused", threads=1, builder=TOY), stop_grace=1)
        async with running(group, wait=False) as (runtime, client, _):
            early = client.submit(sample())
            await until_state(runtime, "failed")
            assert runtime.failure is not None
            assert runtime.failure.message == "base model 'broken' has no weights"
            for outcome in (early, client.submit(sample())):
                with pytest.raises(Unavailable, match="has no weights"):
                    await value(outcome, 10 * self.slack)
            assert not await runtime.probe(1)
            assert runtime.info is None

    async def test_work_waits_while_loading_and_says_so(self) -> None:
        group = self.make(WorkerSpec("slow", None, "unused", threads=1, builder=TOY), stop_grace=0.1)
        async with running(group, wait=False) as (runtime, client, _):
            outcome = client.submit(sample(), request_id="s")
            await until(lambda: group.progress == "loading the toy")
            waiting = runtime.waiting("s")
            assert waiting.state == "paused_capacity"
            assert waiting.reason is not None
            assert waiting.reason.startswith("base model is loading (")
            assert waiting.reason.endswith("s): loading the toy")
            pids = group.pids
            started = time.monotonic()
            await runtime.stop(grace=30)
            assert time.monotonic() - started < 3 * self.slack, "nothing can be drained while loading"
            with pytest.raises(Unavailable, match="shutting down"):
                await value(outcome, 10 * self.slack)
            await until(lambda: not any(process_exists(pid) for pid in pids))

    async def test_two_runtimes_die_apart(self) -> None:
        spec = WorkerSpec("toy", None, "unused", threads=1, builder=TOY)
        groups = [self.make(spec, stop_grace=1) for _ in range(2)]
        async with running(groups[0]) as (first, client, _), running(groups[1]) as (second, other, lost):
            second.open_model("m")
            await value(other.submit(create(), "m", 0))
            os.kill(groups[0].pids[0], signal.SIGKILL)
            assert (await value(other.submit(batch("m"), "m", 1))).metrics["loss:sum"] == -5.0
            await until_state(first, "ready")
            assert isinstance(await value(client.submit(sample()), 10 * self.slack), SampleResult)
            assert lost == []

    async def test_kill_storm_answers_every_ticket_exactly_once(self) -> None:
        group = self.make(WorkerSpec("toy", None, "unused", threads=1, builder=TOY), stop_grace=1)
        async with running(group, restart_limit=50) as (runtime, client, _):
            outcomes: list[asyncio.Future[object]] = []

            async def trainer(model_id: str) -> None:
                runtime.open_model(model_id)
                for seq_id in range(12):
                    operation = create() if seq_id == 0 else batch(model_id, sleep=0.01) if seq_id % 2 else step()
                    outcomes.append(client.submit(operation, model_id, seq_id))
                    outcomes.append(client.submit(sample(tokens=30)))
                    await asyncio.sleep(0.02)

            async def killer() -> None:
                for _ in range(4):
                    await asyncio.sleep(0.15)
                    for pid in group.pids:
                        if process_exists(pid):
                            os.kill(pid, signal.SIGKILL)

            await asyncio.gather(killer(), *(trainer(f"m{i}") for i in range(4)))
            results = [await asyncio.wait_for(outcome, 30 * self.slack) for outcome in outcomes]
            allowed = (ModelLost, NotFound, WorkerDied)
            assert all(isinstance(result, allowed) or not isinstance(result, TinsmithError) for result in results)
            assert any(isinstance(result, ModelLost) for result in results), (
                "no kill hit a live model: the test is vacuous"
            )
            assert any(isinstance(result, SampleResult) for result in results)
            await until_state(runtime, "ready")

    async def test_a_process_that_hangs_in_a_turn_is_replaced(self, group: ProcessGroup) -> None:
        """What was in the turn is answered as after a death; samples and new models go on with the next process."""
        async with running(group, turn_timeout=max(2.0, self.slack)) as (runtime, client, lost):
            for model_id in ("a", "b", "new"):
                runtime.open_model(model_id)
            for model_id in ("a", "b"):
                await value(client.submit(create(), model_id, 0))
            [pid] = group.pids
            hung = client.submit(batch("a", sleep=60), "a", 1)
            behind = client.submit(step(), "a", 2)
            await until(lambda: (runtime.waiting("p-2").reason or "").startswith("running"))
            drawn, created = client.submit(sample()), client.submit(create(), "new", 0)
            for outcome in (hung, behind):
                with pytest.raises(ModelLost, match="'a' was lost"):
                    await value(outcome, 10 * self.slack)
            assert sorted(lost) == ["a", "b"]
            assert isinstance(await value(drawn, 10 * self.slack), SampleResult)
            await value(created, 10 * self.slack)
            assert (await value(client.submit(batch("new", sleep=0.1), "new", 1))).metrics["loss:sum"] == -5.0
            assert group.pids != [pid]
            await until(lambda: not process_exists(pid))
