"""A worker that only samples: the tokens of one that also trains, and nothing but samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from schemas.errors import EngineFailure
from schemas.operations import CreateModel, LoraSpec, Sample, SamplingParams, SaveWeights
from tests.support.inline_group import InlineWorkerGroup
from tests.support.tiny_model import make_tiny_model
from tests.workers.harness import running, value
from workers.dispatch import registered_methods
from workers.rollout import RolloutWorker
from workers.spec import WorkerSpec


async def test_it_draws_what_the_one_machine_layout_draws(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    spec = WorkerSpec("tiny", str(tmp_path / "model"), str(tmp_path / "data"), dtype="float32", device="cpu", threads=1)
    folder = str(tmp_path / "saved")
    requests = [
        Sample(np.array([40, 50, 60]), SamplingParams(max_tokens=20, seed=7, stop=()), 3, adapter, True)
        for adapter in (folder, None)
    ]
    async with running(InlineWorkerGroup.from_spec(spec)) as (runtime, client, _):
        runtime.open_model("m")
        await value(client.submit(CreateModel(LoraSpec(8, seed=3)), "m", 0))
        await value(client.submit(SaveWeights(folder, False), "m", 1))
        beside = [await value(client.submit(one)) for one in requests]
    alone = InlineWorkerGroup.from_spec(replace(spec, builder="workers.rollout:build_rollout"))
    async with running(alone) as (_, client, _lost):
        drawn = [await value(client.submit(one)) for one in requests]
        assert isinstance(alone.worker, RolloutWorker)
        with pytest.raises(EngineFailure, match="no operation 'create_adapter'"):
            await alone.call("create_adapter", "a", LoraSpec(8, seed=1))
    for one, other in zip(beside, drawn, strict=True):
        for expected, sequence in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_array_equal(sequence.tokens, expected.tokens)
            np.testing.assert_array_equal(sequence.logprobs, expected.logprobs)
    assert set(registered_methods(RolloutWorker)) == {"sample_turn"}
