"""What a worker is built from: every option of the spec reaches the engine, and the info tells what became of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.machine import usable_cores
from engines.ranks import Place
from schemas.operations import LoraSpec
from tests.support.tiny_model import make_tiny_model
from workers.build import build_worker, delete_leftovers, idle_folder
from workers.spec import WorkerSpec


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    folder = make_tiny_model(tmp_path / "model")
    return {"model": "acme/tiny", "source": str(folder), "data_dir": str(tmp_path), "device": "cpu", "threads": 1}


def test_defaults(spec: dict[str, Any]) -> None:
    info = build_worker(WorkerSpec(**spec, dtype="float32"), lambda text: None).info
    assert (info.dtype, info.micro_batch_tokens, info.batch_invariant) == ("float32", 512, True)
    assert info.peak_flops > 0
    assert 0 < info.memory.base < info.memory.free <= info.memory.total
    assert info.memory.per_token > info.memory.per_token_checkpointed > 0


def test_options_reach_the_engine(spec: dict[str, Any]) -> None:
    one = LoraSpec(4, 0)
    options = {"micro_batch_tokens": 77, "batch_invariant": False, "adapter_memory_gib": 1e-4, "dtype": "bfloat16"}
    wanted = WorkerSpec(**spec, **options)
    worker = build_worker(wanted, lambda text: None)
    assert (worker.info.dtype, worker.info.micro_batch_tokens, worker.info.batch_invariant) == ("bfloat16", 77, False)
    for number in range(3):
        worker.create_adapter(str(number), one)
    assert any(idle_folder(wanted).iterdir()), "about one adapter fits into 107 kB: the others wait in files"


def test_what_another_number_of_ranks_left_on_disk_goes(tmp_path: Path) -> None:
    alone = WorkerSpec("acme/tiny", None, str(tmp_path))
    places = [replace(alone, ranks=2, place=Place(rank, 2)) for rank in range(3)]
    files = [
        idle_folder(each, kind) / "idle-1.safetensors" for each in (alone, *places) for kind in ("adapters", "samples")
    ]

    def left(spec: WorkerSpec) -> list[bool]:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        delete_leftovers(spec)
        return [file.exists() for file in files]

    assert left(alone) == [True] * 2 + [False] * 6
    assert left(places[0]) == [False] * 2 + [True] * 4 + [False] * 2
    assert left(places[1]) == [True] * 8


def test_threads_left_open_are_all_cores(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have been started with a default of one thread; nobody asked for that."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    former = torch.get_num_threads()
    try:
        build_worker(WorkerSpec(**{**spec, "threads": None}), lambda text: None)
        assert torch.get_num_threads() == usable_cores()
    finally:
        torch.set_num_threads(former)
