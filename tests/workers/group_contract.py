"""The contract of a worker group whose ranks are processes: subclass it, say how a group is made, and every test runs.

The ranks of these tests run on this machine, whatever starts them, so that they can be killed and stopped by pid.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import ClassVar, Protocol

import numpy as np
import pytest

from schemas.errors import EngineFailure, NotFound, TinsmithError, Unavailable, WorkerDied
from schemas.operations import Datum, LoraSpec, OptimStepParams, TrainBatch
from tests.support.processes import freeze
from tests.workers.harness import process_exists, until
from workers.group import WorkerGroup
from workers.spec import WorkerSpec

SPEC = WorkerSpec(model="toy", source=None, data_dir="unused", threads=1, builder="tests.support.toy_worker:build")


class ProcessGroup(WorkerGroup, Protocol):
    """A group that tells where its ranks are."""

    @property
    def pids(self) -> list[int]: ...


def batch(adapter_id: str = "a", **config: float) -> TrainBatch:
    datum = Datum(np.array([1, 2], np.int64), {"target_tokens": np.array([2, 3]), "weights": np.ones(2, np.float32)})
    return TrainBatch(adapter_id, (datum,), "cross_entropy", config)


class GroupContract:
    """What every such group does."""

    slowest_start: ClassVar[float] = 30.0
    death: ClassVar[str] = "SIGKILL"
    death_while_loading: ClassVar[str] = "ended while loading: killed .SIGKILL"
    """What is said of a rank that was killed."""
    reaps_at_once: ClassVar[bool] = True
    """Whether a dead process is out of the table when its death is told, or a moment later."""

    @staticmethod
    @abstractmethod
    def make(spec: WorkerSpec, *, start_timeout: float, stop_grace: float) -> ProcessGroup:
        """A group that is not started yet."""

    @pytest.fixture
    async def group(self) -> AsyncIterator[ProcessGroup]:
        group = self.make(SPEC, start_timeout=self.slowest_start, stop_grace=1)
        await group.start()
        yield group
        await group.stop()

    async def test_trains_over_the_process_border_and_orders_calls(self, group: ProcessGroup) -> None:
        assert await group.call("create_adapter", "a", LoraSpec(8, seed=1)) == 1
        calls = [group.call("forward_backward", batch()) for _ in range(3)]
        calls.append(group.call("optimizer_step", "a", OptimStepParams(lr=0.5)))
        calls.append(group.call("infer_batch", batch()))
        *trained, stepped, after = await asyncio.gather(*calls)
        assert all(result.metrics["loss:sum"] == -5.0 for result in trained)
        assert stepped.metrics["grad_norm:mean"] == 15.0
        np.testing.assert_array_equal(after.logprobs[0], np.array([17.0, 25.5], np.float32))

    async def test_large_arrays_cross(self, group: ProcessGroup) -> None:
        await group.call("create_adapter", "a", LoraSpec(8, seed=1))
        size = 2_000_000
        datum = Datum(
            np.ones(size, np.int64), {"target_tokens": np.ones(size, np.int64), "weights": np.ones(size, "f4")}
        )
        results = await asyncio.gather(
            *(group.call("forward_backward", TrainBatch("a", (datum,), "cross_entropy")) for _ in range(3))
        )
        assert [result.logprobs[0].shape for result in results] == [(size,)] * 3

    async def test_errors_of_the_tree_cross_whole_and_others_become_generic(
        self, group: ProcessGroup, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(NotFound, match="no adapter 'a'"):
            await group.call("forward_backward", batch())
        await group.call("create_adapter", "a", LoraSpec(8, seed=1))
        with pytest.raises(EngineFailure) as caught:
            await group.call("forward_backward", batch(**{"raise": 1.0}))
        assert "secret" not in caught.value.message
        assert caught.value.code == "engine_failure"
        assert (await group.call("infer_batch", batch())).metrics["loss:sum"] == -5.0

    async def test_only_registered_methods_can_be_called(self, group: ProcessGroup) -> None:
        for name in ("__init__", "_smallest_adapter", "engine", "no_such_thing"):
            with pytest.raises(EngineFailure, match="no operation"):
                await group.call(name)

    async def test_unpicklable_argument_fails_only_its_call(self, group: ProcessGroup) -> None:
        with pytest.raises(EngineFailure, match="cannot be sent"):
            await group.call("create_adapter", "a", threading.Lock())
        assert await group.call("create_adapter", "a", LoraSpec(8, seed=1)) == 1

    async def test_kill_in_the_middle_of_a_call_is_told_and_the_group_can_be_started_again(
        self, group: ProcessGroup
    ) -> None:
        deaths: list[TinsmithError] = []
        group.on_death(deaths.append)
        await group.call("create_adapter", "a", LoraSpec(8, seed=1))
        [pid] = group.pids
        call = asyncio.ensure_future(group.call("forward_backward", batch(sleep=30)))
        waiting = asyncio.ensure_future(group.call("infer_batch", batch()))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        for future in (call, waiting):
            with pytest.raises(WorkerDied, match=self.death):
                await asyncio.wait_for(future, 20)
        assert len(deaths) == 1
        if self.reaps_at_once:
            assert not process_exists(pid), "the dead process was not reaped"
        await until(lambda: not process_exists(pid))
        with pytest.raises(WorkerDied):
            await group.call("infer_batch", batch())
        assert not await group.ping(1)
        await group.stop()
        await group.start()
        assert await group.call("create_adapter", "a", LoraSpec(8, seed=1)) == 1
        assert len(deaths) == 1

    async def test_death_while_idle_is_noticed(self, group: ProcessGroup) -> None:
        deaths: list[TinsmithError] = []
        group.on_death(deaths.append)
        os.kill(group.pids[0], signal.SIGKILL)
        await until(lambda: deaths)

    async def test_ping_is_real(self, group: ProcessGroup) -> None:
        assert await group.ping(20)
        await group.call("create_adapter", "a", LoraSpec(8, seed=1))
        call = asyncio.ensure_future(group.call("forward_backward", batch(sleep=30.0)))
        await asyncio.sleep(0.05)
        assert await group.ping(20), "a busy worker answers through its reader thread"
        assert not call.done()
        freeze(group.pids[0])
        try:
            assert not await group.ping(0.3), "a stopped process must not count as alive"
        finally:
            os.kill(group.pids[0], signal.SIGCONT)
        assert await group.ping(20)
        await group.stop()
        with pytest.raises(WorkerDied):
            await call

    async def test_stop_ends_even_a_stuck_rank_and_leaves_nothing(self) -> None:
        group = self.make(SPEC, start_timeout=self.slowest_start, stop_grace=0.2)
        await group.start()
        [pid] = group.pids
        freeze(pid)
        call = asyncio.ensure_future(group.call("remove_adapter", "a"))
        await asyncio.sleep(0.05)
        await group.stop()
        with pytest.raises(WorkerDied):
            await call
        if self.reaps_at_once:
            assert not process_exists(pid)
        await until(lambda: not process_exists(pid))
        await group.stop()

    async def test_two_ranks_run_every_call_and_one_death_ends_both(self) -> None:
        spec = WorkerSpec("toy", None, "unused", threads=1, ranks=2, builder="tests.support.toy_worker:build")
        group = self.make(spec, start_timeout=self.slowest_start, stop_grace=1)
        try:
            await group.start()
            pids = group.pids
            assert len(set(pids)) == 2
            await group.call("create_adapter", "a", LoraSpec(8, seed=1))
            assert (await group.call("forward_backward", batch())).metrics["loss:sum"] == -5.0
            os.kill(pids[1], signal.SIGKILL)
            await until(lambda: not any(process_exists(pid) for pid in pids))
        finally:
            await group.stop()

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            ("broken", "base model 'broken' has no weights"),
            ("dies", "{death_while_loading}"),
            ("slow", "did not load within {short_start:g} s .at the end: loading the toy"),
        ],
    )
    async def test_start_failures_carry_the_reason(self, model: str, message: str) -> None:
        spec = WorkerSpec(model, None, "unused", threads=1, builder="tests.support.toy_worker:build")
        start_timeout = await self._time_to_begin() if model == "slow" else self.slowest_start
        group = self.make(spec, start_timeout=start_timeout, stop_grace=0.2)
        expected = message.format(death_while_loading=self.death_while_loading, short_start=start_timeout)
        with pytest.raises(Unavailable, match=expected):
            await group.start()
        assert group.pids == []

    async def _time_to_begin(self) -> float:
        """Seconds in which a process has surely started and begun to load here, and not many times as many."""
        group = self.make(SPEC, start_timeout=self.slowest_start, stop_grace=0.2)
        began = time.monotonic()
        await group.start()
        took = time.monotonic() - began
        await group.stop()
        return round(max(5.0, 0.5 + 2.5 * took), 1)

    async def test_unknown_builder_is_a_clear_start_failure(self, capfd: pytest.CaptureFixture[str]) -> None:
        spec = WorkerSpec("toy", None, "unused", threads=1, builder="no.such:thing")
        group = self.make(spec, start_timeout=self.slowest_start, stop_grace=1)
        with pytest.raises(Unavailable, match="cannot be loaded") as caught:
            await group.start()
        assert "Traceback" not in caught.value.message
