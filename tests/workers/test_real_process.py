"""The whole of it on a tiny real model: torch engine and sampler in a child process, driven by the runtime."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.errors import ModelLost
from schemas.operations import (
    CreateModel,
    Datum,
    LoadWeights,
    LoraSpec,
    Operation,
    OptimStep,
    OptimStepParams,
    Sample,
    SamplingParams,
    SaveWeights,
    TrainBatch,
)
from tests.support.inline_group import InlineWorkerGroup
from tests.support.tiny_model import make_tiny_model
from tests.workers.harness import running, until, until_state, value
from workers.local import LocalWorkerGroup
from workers.spec import WorkerSpec

STEP = OptimStep(OptimStepParams(lr=0.02, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0))


def overfit(model_id: str, *, backward: bool = True) -> TrainBatch:
    text = np.frombuffer(b"the quick brown fox", np.uint8).astype(np.int64) + 3
    inputs = {"target_tokens": text[1:], "weights": np.ones(len(text) - 1, np.float32)}
    return TrainBatch(model_id, (Datum(text[:-1], inputs),), "cross_entropy", {}, backward)


@pytest.mark.slow
async def test_train_save_sample_kill_and_resume(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    spec = WorkerSpec("tiny", str(tmp_path / "model"), str(tmp_path / "data"), dtype="float32", device="cpu", threads=1)
    group = LocalWorkerGroup(spec)
    async with running(group, grace=5) as (runtime, client, lost):
        assert runtime.info is not None
        assert runtime.info.vocab_size == 259
        runtime.open_model("m")
        await value(client.submit(CreateModel(LoraSpec(8, seed=3)), "m", 0), 30)
        losses = []
        for turn in range(8):
            trained = client.submit(overfit("m"), "m", 1 + 2 * turn)
            await value(client.submit(STEP, "m", 2 + 2 * turn))
            losses.append((await value(trained)).metrics["loss:sum"])
        assert losses[-1] < 0.5 * losses[0]
        folder = str(tmp_path / "saved")
        saved = await value(client.submit(SaveWeights(folder, True), "m", 17))
        assert saved.size_bytes > 0
        before = await value(client.submit(overfit("m", backward=False), "m", 18))
        request = Sample(np.array([40, 50], np.int64), SamplingParams(max_tokens=40, seed=7, stop=()), 4, folder)
        drawn = await value(client.submit(request), 30)

        again = client.submit(request)
        told: list[int] = []
        unseeded = Sample(np.array([40, 50], np.int64), SamplingParams(max_tokens=200, stop=()), 1, folder)
        streamed = client.submit(unseeded, progress=lambda delta: told.extend(delta.tokens.tolist()))
        await until(lambda: len(told) > 8)
        seen = list(told)
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(ModelLost):
            await value(client.submit(STEP, "m", 19), 30)
        await until_state(runtime, "ready")
        assert lost == ["m"]
        for one, other in zip(drawn.sequences, (await value(again, 30)).sequences, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
        [stream] = (await value(streamed, 30)).sequences
        assert told == stream.tokens.tolist(), "every token once, also those of before the kill"
        assert 8 < len(seen) < 200
        assert told[: len(seen)] == seen
        runtime.open_model("r")
        assert (await value(client.submit(LoadWeights(folder, True, create=True), "r", 0))).lora.rank == 8
        after = await value(client.submit(overfit("r", backward=False), "r", 1))
        np.testing.assert_array_equal(after.logprobs[0], before.logprobs[0])


async def test_turns_shared_with_others_give_the_numbers_of_a_run_alone(tmp_path: Path) -> None:
    """However a run's batches are cut into turns and whoever is beside them, every bit of its results is the same."""
    make_tiny_model(tmp_path / "model")
    spec = WorkerSpec("tiny", str(tmp_path / "model"), str(tmp_path / "data"), dtype="float32", device="cpu", threads=1)
    rng = np.random.default_rng(5)
    datums = [rng.integers(3, 250, int(length)) for length in rng.integers(2, 30, 12)]

    def several(model_id: str, first: int, *, backward: bool = True) -> TrainBatch:
        inputs = [
            Datum(ids[:-1], {"target_tokens": ids[1:], "weights": np.ones(len(ids) - 1, np.float32)})
            for ids in datums[first : first + 6]
        ]
        return TrainBatch(model_id, tuple(inputs), "cross_entropy", {}, backward)

    async def train(models: Sequence[str], micro_batch_tokens: int) -> dict[str, list[np.ndarray[Any, Any]]]:
        group = InlineWorkerGroup.from_spec(spec)
        results: dict[str, list[np.ndarray[Any, Any]]] = {}
        async with running(group, micro_batch_tokens=micro_batch_tokens) as (runtime, client, _):
            outcomes: dict[str, list[asyncio.Future[Any]]] = {}
            for number, model_id in enumerate(models):
                runtime.open_model(model_id)
                operations: list[Operation] = [CreateModel(LoraSpec(8, seed=3 + number))]
                operations += [several(model_id, 0), several(model_id, 6), STEP, several(model_id, 3), STEP]
                operations += [several(model_id, 0, backward=False)]
                outcomes[model_id] = [client.submit(op, model_id, seq_id) for seq_id, op in enumerate(operations)]
            for model_id, futures in outcomes.items():
                values = [await value(future, 60) for future in futures]
                results[model_id] = [array for at in (1, 2, 4, 6) for array in values[at].logprobs]
        return results

    alone = await train(["m"], 100_000)
    shared = await train(["m", "n", "o"], 40)
    assert len(alone["m"]) == len(shared["m"]) == 24
    for one, other in zip(alone["m"], shared["m"], strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(shared["m"][-1], shared["n"][-1])


async def test_a_model_that_cannot_be_loaded_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    spec = WorkerSpec("tiny", str(tmp_path / "model"), str(tmp_path / "data"), device="cpu", threads=1)
    async with running(InlineWorkerGroup.from_spec(spec), wait=False) as (runtime, _, _lost):
        await until_state(runtime, "failed")
        assert runtime.failure is not None
        assert "model_type" in runtime.failure.message
        assert str(tmp_path) not in runtime.failure.message


async def test_an_unknown_engine_is_refused_by_name(tmp_path: Path) -> None:
    spec = WorkerSpec("tiny", str(tmp_path), str(tmp_path), engine="abacus")
    async with running(InlineWorkerGroup.from_spec(spec), wait=False) as (runtime, _, _lost):
        await until_state(runtime, "failed")
        assert runtime.failure is not None
        assert "abacus" in runtime.failure.message
