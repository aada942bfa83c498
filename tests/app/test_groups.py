"""Settings of the workers reach them: none is shown in the help and then ignored."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from app.groups import local_groups
from app.settings import Settings
from engines.machine import usable_cores
from tests.app.conftest import MODEL, running
from workers.environment import worker_environment
from workers.local import LocalWorkerGroup


def test_the_settings_reach_the_worker(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path, dtype="bfloat16", device="cpu", threads=3, sample_logprobs="plain", worker_start_timeout=5.0
    )
    group = local_groups(settings)("acme/tiny", "/models/tiny")
    assert isinstance(group, LocalWorkerGroup)
    spec = group._spec
    assert (spec.model, spec.source, spec.data_dir) == ("acme/tiny", "/models/tiny", str(tmp_path))
    assert (spec.engine, spec.dtype, spec.device, spec.threads) == ("torch", "bfloat16", "cpu", 3)
    assert spec.sample_logprobs == "plain"
    assert group._start_timeout == 5.0


def test_the_settings_of_turns_and_memory_reach_the_worker(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path,
        batch_invariant=False,
        micro_batch_tokens=99,
        gradient_checkpointing="on",
        adapter_memory_gib=1.5,
    )
    group = local_groups(settings)("acme/tiny", None)
    assert isinstance(group, LocalWorkerGroup)
    spec = group._spec
    assert (spec.batch_invariant, spec.micro_batch_tokens) == (False, 99)
    assert (spec.gradient_checkpointing, spec.adapter_memory_gib) == ("on", 1.5)


@pytest.mark.parametrize(
    ("setting", "said", "threads"), [(None, "1", 1), (3, "1", 3), (None, None, usable_cores()), (2, None, 2)]
)
def test_who_decides_on_threads(
    setting: int | None, said: str | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting, else the server's own environment, else all cores; the rank's environment says the same."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    group = local_groups(Settings(data_dir=tmp_path, threads=setting))("acme/tiny", None)
    assert isinstance(group, LocalWorkerGroup)
    assert group._spec.threads == threads
    env = worker_environment(group._spec, os.environ)
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(
    ("setting", "seconds"), [({}, 900.0), ({"turn_timeout": 7.5}, 7.5), ({"turn_timeout": 0}, None)]
)
async def test_the_limit_of_a_turn_reaches_the_runtime(
    setting: dict[str, float], seconds: float | None, make_settings: Callable[..., Settings]
) -> None:
    async with running(make_settings(**setting)) as edge:
        assert edge.app.state.services.models.runtimes[MODEL]._turn_timeout == seconds
