"""The worker group on Ray actors: the contract of every group, and what only a cluster can do wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import ray

from schemas.errors import InvalidRequest, TinsmithError, Unavailable, WorkerDied
from schemas.operations import Datum, LoraSpec, OptimStep, OptimStepParams, TrainBatch
from tests.support.environments import like_this_one
from tests.support.processes import freeze
from tests.support.tiny_model import make_tiny_model
from tests.workers.group_contract import SPEC, GroupContract, batch
from tests.workers.harness import process_exists, running, until, value
from tests.workers.runtime_contract import RuntimeContract
from tests.workers.test_recovery import MemoryLog, Recorder
from workers.group import WorkerGroup
from workers.local import LocalWorkerGroup
from workers.ray.gang import GangOptions
from workers.ray.group import RayWorkerGroup
from workers.ray.placement import rank_bundle
from workers.snapshots import SnapshotPolicy
from workers.spec import WorkerSpec

SMALL = GangOptions(bundle={"CPU": 0.5})
GANG = WorkerSpec("gang", None, "unused", device="cpu", threads=1, ranks=2, builder="tests.ray.gang_worker:build")


# -- without a cluster -------------------------------------------------------------------------------------------------
def test_what_a_rank_takes_of_a_cluster() -> None:
    spec = replace(SPEC, threads=4, device="auto")
    assert rank_bundle(spec, {"CPU": 8.0}) == {"CPU": 4.0}
    assert rank_bundle(spec, {"CPU": 8.0, "GPU": 2.0}) == {"CPU": 4.0, "GPU": 1.0}
    assert rank_bundle(replace(spec, device="cpu"), {"GPU": 2.0}) == {"CPU": 4.0}
    assert rank_bundle(replace(spec, device="cuda", threads=None), {}) == {"CPU": 1.0, "GPU": 1.0}
    with pytest.raises(InvalidRequest, match=r"'cuda:1'.*use 'cuda', 'cpu' or 'auto'") as caught:
        rank_bundle(replace(spec, device="cuda:1"), {"GPU": 2.0})
    assert caught.value.field == "device"


# -- an interpreter of the ranks' own ---------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
async def test_ranks_run_in_the_interpreter_that_is_given_and_none_where_it_is_missing(tmp_path: Path) -> None:
    """The node is asked first: what it says is the error, and not Ray's words for a process that does not start."""
    python = like_this_one(tmp_path / "environment")
    group = RayWorkerGroup(replace(GANG, engine_python=str(python)), start_timeout=240, options=SMALL)
    await group.start()
    try:
        assert await group.call("prefixes") == [str(tmp_path / "environment")] * 2
    finally:
        await group.stop()
    missing = replace(GANG, engine="veomni", engine_python=str(tmp_path / "absent"))
    group = RayWorkerGroup(missing, start_timeout=240, options=SMALL)
    with pytest.raises(Unavailable, match="environment of its own") as caught:
        await group.start()
    assert "make engine-venv NAME=veomni" in (caught.value.hint or "")


# -- one start of a cluster in the ordinary suite ----------------------------------------------------------------------
@pytest.mark.usefixtures("ray_cluster")
async def test_two_ranks_run_calls_and_one_killed_in_a_call_ends_both() -> None:
    group, deaths = RayWorkerGroup(replace(SPEC, ranks=2), start_timeout=120, options=SMALL), list[TinsmithError]()
    group.on_death(deaths.append)
    try:
        await group.start()
        pids = group.pids
        assert len(set(pids)) == 2
        assert await group.call("create_adapter", "a", LoraSpec(8, seed=1)) == 1
        assert (await group.call("forward_backward", batch())).metrics["loss:sum"] == -5.0
        call = asyncio.ensure_future(group.call("forward_backward", batch(sleep=30.0)))
        await asyncio.sleep(0.2)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="rank 1 of base model 'toy' ended unexpectedly"):
            await asyncio.wait_for(call, 25)
        assert len(deaths) == 1
        await until(lambda: not any(process_exists(pid) for pid in pids))
    finally:
        await group.stop()


# -- the rest takes minutes --------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
class TestRayGroup(GroupContract):
    slowest_start: ClassVar[float] = 60.0
    death: ClassVar[str] = "the actor of rank 0 of base model 'toy' ended unexpectedly"
    death_while_loading: ClassVar[str] = "the actor of rank 0 of base model 'dies' ended while loading"
    reaps_at_once: ClassVar[bool] = False

    @staticmethod
    def make(spec: WorkerSpec, *, start_timeout: float, stop_grace: float) -> RayWorkerGroup:
        return RayWorkerGroup(spec, start_timeout=start_timeout, stop_grace=stop_grace, options=SMALL)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
class TestRuntimeOnRay(RuntimeContract):
    slack: ClassVar[float] = 6.0

    @staticmethod
    def make(spec: WorkerSpec, *, stop_grace: float) -> RayWorkerGroup:
        return RayWorkerGroup(spec, stop_grace=stop_grace, options=SMALL)


@pytest.fixture
async def gang(ray_cluster: None) -> AsyncIterator[RayWorkerGroup]:
    group = RayWorkerGroup(replace(GANG, threads=3), start_timeout=120, stop_grace=1, options=SMALL)
    await group.start()
    yield group
    await group.stop()


@pytest.mark.exhaustive
async def test_environment_order_and_sharing_on_two_ranks(gang: RayWorkerGroup) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES"]
    first, second = await gang.call("environments", names)
    assert [first["RANK"], second["RANK"]] == ["0", "1"]
    for found in (first, second):
        assert found["WORLD_SIZE"] == "2"
        assert found["LOCAL_RANK"] == "0"
        assert found["OMP_NUM_THREADS"] == "3", "not what Ray sets"
        assert found["CUDA_VISIBLE_DEVICES"] == "", "an actor without a GPU would see all of them"
        assert sys.platform != "linux" or "hugetlb" in (found["GLIBC_TUNABLES"] or "")
    assert await gang.call("is_shared", np.zeros(1_000_000))
    sizes = [2_000_000, 1, 500_000, 1, 1, 1_000_000, 1]
    heard = await asyncio.gather(*(gang.call("hear", str(i), np.zeros(size)) for i, size in enumerate(sizes)))
    assert heard[-1] == [f"{i}:{size}" for i, size in enumerate(sizes)]
    assert [len(one) for one in heard] == list(range(1, len(sizes) + 1))


@pytest.mark.exhaustive
async def test_a_rank_killed_beside_a_collective_ends_the_gang(gang: RayWorkerGroup) -> None:
    assert await gang.call("add_ranks") == 3.0
    pids = gang.pids
    call = asyncio.ensure_future(gang.call("add_ranks", 60.0))
    await asyncio.sleep(0.2)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 1 of base model 'gang' ended unexpectedly"):
        await asyncio.wait_for(call, 50)
    await until(lambda: not any(process_exists(pid) for pid in pids))
    assert not await gang.ping(1)


@pytest.mark.exhaustive
async def test_a_hung_rank_does_not_answer_a_ping(gang: RayWorkerGroup) -> None:
    assert await gang.ping(10)
    freeze(gang.pids[1])
    assert not await gang.ping(0.5)
    os.kill(gang.pids[1], signal.SIGCONT)
    assert await gang.ping(10)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
async def test_no_room_on_the_cluster_is_told_in_time_with_what_is_missing() -> None:
    options = GangOptions(bundle={"CPU": 2.0, "GPU": 1.0}, place_timeout=1.0)
    group = RayWorkerGroup(replace(SPEC, ranks=2), options=options)
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await group.start()
    assert time.monotonic() - began < 10
    assert "it needs 2 x (2 CPU, 1 GPU), each on one node; the cluster has 2 CPU" in caught.value.message
    assert "0 GPU (0 free) on 1 node" in caught.value.message
    # Nothing of it is left to wait for a place.
    await until(lambda: ray.available_resources().get("CPU") == 2.0)
    whole = RayWorkerGroup(SPEC, options=GangOptions(bundle={"CPU": 2.0}))
    await whole.start()
    assert ray.available_resources().get("CPU", 0.0) == 0.0
    await whole.stop()
    await until(lambda: ray.available_resources().get("CPU") == 2.0)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
async def test_stop_while_it_looks_for_a_place() -> None:
    group = RayWorkerGroup(SPEC, options=GangOptions(bundle={"CPU": 64.0}))
    starting = asyncio.ensure_future(group.start())
    await until(lambda: group.progress == "looking for a place on the cluster")
    began = time.monotonic()
    await group.stop()
    with pytest.raises(WorkerDied):
        await starting
    assert time.monotonic() - began < 5


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
async def test_ranks_may_have_an_interpreter_of_their_own(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nTINSMITH_TEST_PYTHON=own exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    options = replace(SMALL, python=str(python))
    group = RayWorkerGroup(replace(GANG, ranks=1), start_timeout=120, stop_grace=1, options=options)
    try:
        await group.start()
        assert await group.call("environments", ["TINSMITH_TEST_PYTHON"]) == [{"TINSMITH_TEST_PYTHON": "own"}]
    finally:
        await group.stop()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("engine", "ranks"), [("torch", 1), ("fsdp", 2)])
async def test_training_through_a_kill_gives_the_bits_of_a_run_without_one_on_child_processes(
    engine: str, ranks: int, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path / "model")
    rng = np.random.default_rng(3)
    lengths = rng.integers(4, 30, 10)

    def several(first: int, *, backward: bool = True) -> TrainBatch:
        chosen = [np.random.default_rng(first + i).integers(3, 250, int(lengths[first + i])) for i in range(3)]
        datums = [
            Datum(ids[:-1], {"target_tokens": ids[1:], "weights": np.ones(len(ids) - 1, np.float32)}) for ids in chosen
        ]
        return TrainBatch("m", tuple(datums), "cross_entropy", {}, backward)

    async def train(group: WorkerGroup, log: MemoryLog, kill_after: int | None) -> list[np.ndarray]:
        policy = SnapshotPolicy(operations=3)
        async with running(group, wait=False, history=log, snapshots=policy) as (runtime, client, lost):
            await until(lambda: runtime.state == "ready", 180)
            recorder = Recorder(client, log)
            recorder.patience = 120.0
            await recorder.new("m", seed=5)
            seq_id = 0
            for turn in range(6):
                for operation in (several(turn), OptimStep(OptimStepParams(lr=0.02))):
                    seq_id += 1
                    await recorder.run(operation, "m", seq_id)
                if turn == kill_after:
                    assert isinstance(group, RayWorkerGroup)
                    os.kill(group.pids[-1], signal.SIGKILL)
            result = await value(client.submit(several(7, backward=False), "m", seq_id + 1), 60)
            assert lost == []
            return list(result.logprobs)

    model, data = str(tmp_path / "model"), str(tmp_path / "data")
    spec = WorkerSpec("tiny", model, data, engine=engine, ranks=ranks, dtype="float32", device="cpu", threads=1)
    logs = [MemoryLog(tmp_path / name) for name in ("plain", "killed")]
    for log in logs:
        log.folder.mkdir()
    plain = await train(LocalWorkerGroup(spec), logs[0], None)
    killed = await train(RayWorkerGroup(spec, start_timeout=120, options=SMALL), logs[1], kill_after=3)
    assert len(plain) == 3
    for one, other in zip(plain, killed, strict=True):
        np.testing.assert_array_equal(one, other)
