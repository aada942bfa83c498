"""A base model on two ranks, behind the SDK: one is killed in the midst of adding up gradients, one hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.fault.harness import CLIENT_SECONDS, MODEL, Kill, Service, fail_at, sdk, serving, train
from tests.support.processes import freeze

pytestmark = pytest.mark.exhaustive

STEPS = 6
RANK_TIMEOUT = 8
OPTIONS = ("--engine", "fsdp", "--ranks", "2", "--rank-timeout", str(RANK_TIMEOUT))
OFTEN = ("--snapshot-operations", "5", "--snapshot-share", "1")
PROMPT = types.ModelInput.from_ints([5, 9, 17])


def _program(service: Service, at_step: Any = lambda step: None) -> tuple[str, list[list[int]]]:
    """Train a model, save it and sample from it; returns the checkpoint's path and what was drawn."""
    with sdk(service) as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=3).result()
        train(training, STEPS, at_step=at_step)
        path = training.save_state("final").result(timeout=CLIENT_SECONDS).path
        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=12, seed=5, temperature=1.0)
        drawn = sampler.sample(prompt=PROMPT, num_samples=2, sampling_params=params).result(timeout=CLIENT_SECONDS)
        return path, [list(sequence.tokens) for sequence in drawn.sequences]


def _ranks(service: Service) -> list[int]:
    """Process ids, in order of rank."""
    assert service._process is not None
    tasks = Path(f"/proc/{service._process.pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


@pytest.mark.timeout(600)
def test_lost_ranks_leave_no_trace_in_what_was_trained(tmp_path: Path, base: Path) -> None:
    """Bit for bit: a batch that runs again is divided and added up as it was."""
    markers = tmp_path / "markers"
    kill = Kill("gradient.reduce", "self", STEPS + STEPS // 2)
    with serving(tmp_path, base, *OPTIONS, *OFTEN, fail_at=fail_at(markers, [kill])) as service:
        path, drawn = _program(service)
        expected = service.saved(path)

        killed, killed_drawn = _program(service)
        assert (markers / kill.name).exists(), "nobody died"
        assert service.saved(killed) == expected
        assert killed_drawn == drawn

        first = _ranks(service)
        assert len(first) == 2

        def stop_one(step: int) -> None:
            if step == STEPS // 2:
                freeze(first[1])

        began = time.monotonic()
        stopped, stopped_drawn = _program(service, stop_one)
        assert time.monotonic() - began > RANK_TIMEOUT
        assert service.saved(stopped) == expected
        assert stopped_drawn == drawn
        assert not set(first) & set(_ranks(service)), "all ranks are started again, not one of them"
        assert service.starts == 1
        text = service.log.read_text()
        assert "cannot go on with the others" in text
        assert "ended unexpectedly" in text
