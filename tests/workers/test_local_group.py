"""The local worker group on real child processes: life, death, order, errors, environment."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import EngineFailure, NotFound, TinsmithError, Unavailable, WorkerDied
from schemas.operations import Datum, LoraSpec, OptimStepParams, TrainBatch
from tests.workers.harness import process_exists, until
from workers.environment import worker_environment
from workers.local import LocalWorkerGroup
from workers.spec import WorkerSpec

SPEC = WorkerSpec(model="toy", source=None, data_dir="unused", threads=1, builder="tests.support.toy_worker:build")


def batch(adapter_id: str = "a", **config: float) -> TrainBatch:
    datum = Datum(np.array([1, 2], np.int64), {"target_tokens": np.array([2, 3]), "weights": np.ones(2, np.float32)})
    return TrainBatch(adapter_id, (datum,), "cross_entropy", config)


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
async def group() -> AsyncIterator[LocalWorkerGroup]:
    group = LocalWorkerGroup(SPEC, start_timeout=30, stop_grace=1)
    await group.start()
    yield group
    await group.stop()


async def test_trains_over_the_process_border_and_orders_calls(group: LocalWorkerGroup) -> None:
    assert await group.call("create_adapter", "a", LoraSpec(8, seed=1)) == 1
    calls = [group.call("forward_backward", batch()) for _ in range(3)]
    calls.append(group.call("optimizer_step", "a", OptimStepParams(lr=0.5)))
    calls.append(group.call("infer_batch", batch()))
    *trained, stepped, after = await asyncio.gather(*calls)
    assert all(result.metrics["loss:sum"] == -5.0 for result in trained)
    assert stepped.metrics["grad_norm:mean"] == 15.0
    np.testing.assert_array_equal(after.logprobs[0], np.array([17.0, 25.5], np.float32))


async def test_large_arrays_cross(group: LocalWorkerGroup) -> None:
    await group.call("create_adapter", "a", LoraSpec(8, seed=1))
    size = 2_000_000
    datum = Datum(np.ones(size, np.int64), {"target_tokens": np.ones(size, np.int64), "weights": np.ones(size, "f4")})
    results = await asyncio.gather(
        *(group.call("forward_backward", TrainBatch("a", (datum,), "cross_entropy")) for _ in range(3))
    )
    assert [result.logprobs[0].shape for result in results] == [(size,)] * 3


async def test_errors_of_the_tree_cross_whole_and_others_become_generic(
    group: LocalWorkerGroup, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotFound, match="no adapter 'a'"):
        await group.call("forward_backward", batch())
    await group.call("create_adapter", "a", LoraSpec(8, seed=1))
    with pytest.raises(EngineFailure) as caught:
        await group.call("forward_backward", batch(**{"raise": 1.0}))
    assert "secret" not in caught.value.message
    assert caught.value.code == "engine_failure"
    assert (await group.call("infer_batch", batch())).metrics["loss:sum"] == -5.0


async def test_only_registered_methods_can_be_called(group: LocalWorkerGroup) -> None:
    for name in ("__init__", "_smallest_adapter", "engine", "no_such_thing"):
        with pytest.raises(EngineFailure, match="no operation"):
            await group.call(name)


async def test_unpicklable_argument_fails_only_its_call(group: LocalWorkerGroup) -> None:
    with pytest.raises(EngineFailure, match="cannot be sent"):
        await group.call("create_adapter", "a", lambda: None)
    assert await group.call("create_adapter", "a", LoraSpec(8, seed=1)) == 1


async def test_kill_in_the_middle_of_a_call_is_told_and_the_group_can_be_started_again(group: LocalWorkerGroup) -> None:
    deaths: list[TinsmithError] = []
    group.on_death(deaths.append)
    await group.call("create_adapter", "a", LoraSpec(8, seed=1))
    [pid] = group.pids
    call = asyncio.ensure_future(group.call("forward_backward", batch(sleep=30)))
    waiting = asyncio.ensure_future(group.call("infer_batch", batch()))
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    for future in (call, waiting):
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await asyncio.wait_for(future, 5)
    assert len(deaths) == 1
    assert not process_exists(pid), "the dead process was not reaped"
    with pytest.raises(WorkerDied):
        await group.call("infer_batch", batch())
    assert not await group.ping(1)
    await group.stop()
    await group.start()
    assert await group.call("create_adapter", "a", LoraSpec(8, seed=1)) == 1
    assert len(deaths) == 1


async def test_death_while_idle_is_noticed(group: LocalWorkerGroup) -> None:
    deaths: list[TinsmithError] = []
    group.on_death(deaths.append)
    os.kill(group.pids[0], signal.SIGKILL)
    await until(lambda: deaths)


async def test_ping_is_real(group: LocalWorkerGroup) -> None:
    assert await group.ping(5)
    await group.call("create_adapter", "a", LoraSpec(8, seed=1))
    call = asyncio.ensure_future(group.call("forward_backward", batch(sleep=1.0)))
    await asyncio.sleep(0.05)
    assert await group.ping(0.8), "a busy worker answers through its reader thread"
    assert not call.done()
    await call
    os.kill(group.pids[0], signal.SIGSTOP)
    try:
        assert not await group.ping(0.3), "a stopped process must not count as alive"
    finally:
        os.kill(group.pids[0], signal.SIGCONT)
    assert await group.ping(5)


async def test_signals_meant_for_the_server_do_not_end_a_rank(group: LocalWorkerGroup) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(group.pids[0], number)
    assert await group.call("create_adapter", "a", LoraSpec(8, seed=1)) == 1


async def test_stop_ends_even_a_stuck_rank_and_leaves_nothing() -> None:
    group = LocalWorkerGroup(SPEC, start_timeout=30, stop_grace=0.2)
    await group.start()
    [pid] = group.pids
    os.kill(pid, signal.SIGSTOP)
    call = asyncio.ensure_future(group.call("remove_adapter", "a"))
    await asyncio.sleep(0.05)
    await group.stop()
    with pytest.raises(WorkerDied):
        await call
    assert not process_exists(pid)
    await group.stop()


async def test_two_ranks_run_every_call_and_one_death_ends_both() -> None:
    spec = WorkerSpec("toy", None, "unused", threads=1, ranks=2, builder="tests.support.toy_worker:build")
    group = LocalWorkerGroup(spec, start_timeout=30, stop_grace=1)
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
    ("model", "start_timeout", "message"),
    [
        ("broken", 30, "base model 'broken' has no weights"),
        ("dies", 30, "ended while loading: killed .SIGKILL"),
        ("slow", 1.0, "did not load within 1 s .at the end: loading the toy"),
    ],
)
async def test_start_failures_carry_the_reason(model: str, start_timeout: float, message: str) -> None:
    spec = WorkerSpec(model, None, "unused", threads=1, builder="tests.support.toy_worker:build")
    group = LocalWorkerGroup(spec, start_timeout=start_timeout, stop_grace=0.2)
    with pytest.raises(Unavailable, match=message):
        await group.start()
    assert group.pids == []


async def test_unknown_builder_is_a_clear_start_failure(capfd: pytest.CaptureFixture[str]) -> None:
    group = LocalWorkerGroup(WorkerSpec("toy", None, "unused", builder="no.such:thing"), start_timeout=30)
    with pytest.raises(Unavailable, match="cannot be loaded") as caught:
        await group.start()
    assert "Traceback" not in caught.value.message


def test_children_die_with_a_killed_server() -> None:
    script = textwrap.dedent(
        """
        import asyncio, sys
        from tests.workers.test_local_group import SPEC, LocalWorkerGroup

        async def main():
            group = LocalWorkerGroup(SPEC)
            await group.start()
            print(*group.pids, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server.stdout:
        pid = int(server.stdout.readline())
    assert alive(pid)
    server.kill()
    server.wait()
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    outlived = alive(pid)
    if outlived:
        os.kill(pid, signal.SIGKILL)
    assert not outlived, "the worker outlived its server"


def test_server_side_imports_no_torch() -> None:
    code = "import workers.local, workers.runtime, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_environment_of_a_rank() -> None:
    env = worker_environment(SPEC, {"PATH": "/bin", "PYTHONPATH": "/x"})
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "1"
    assert env["TOKENIZERS_PARALLELISM"] == "false"
    assert env["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert env["PYTHONPATH"].endswith(os.pathsep + "/x")
    if sys.platform == "linux":
        assert "glibc.malloc.hugetlb=1" in env["GLIBC_TUNABLES"]
    own = worker_environment(SPEC, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})
    assert own["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=1"
    assert "OMP_NUM_THREADS" not in worker_environment(WorkerSpec("toy", None, "x"), {})
