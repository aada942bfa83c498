"""Sampling replicas on Ray Serve: the tokens of the one-machine layout, more and fewer replicas, deaths, cancelling."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from schemas.errors import Cancelled, InvalidRequest, NotFound, Unavailable
from schemas.operations import (
    CreateModel,
    LoraSpec,
    OptimStep,
    OptimStepParams,
    Sample,
    SampleDelta,
    SamplingParams,
    SaveWeights,
)
from tests.support.inline_group import InlineWorkerGroup
from tests.support.tiny_model import make_tiny_model
from tests.workers.harness import Client, process_exists, running, sample, until, value
from tests.workers.test_real_process import overfit
from workers.ray.sampler_options import SamplerOptions
from workers.spec import WorkerSpec

pytestmark = pytest.mark.exhaustive

SLOWLY = [(5 + place) % 100 for place in range(200)]
"""What the toy sampler draws after the prompts of `sample`."""


@pytest.fixture(scope="module")
def tools(serve_cluster: None) -> ModuleType:
    """`tests.ray.deployments`, imported when it is needed."""
    import tests.ray.deployments

    return tests.ray.deployments


@pytest.fixture(scope="module")
def pair(tools: ModuleType) -> Iterator[str]:
    """Two replicas of four rows each."""
    with tools.deployed(tools.SLOW, replace(tools.ONE, min_replicas=2, max_replicas=2)) as name:
        yield name


async def test_the_same_seeds_give_the_tokens_of_the_one_machine_layout(tools: ModuleType, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    spec = WorkerSpec("tiny", str(tmp_path / "model"), str(tmp_path / "data"), dtype="float32", device="cpu", threads=1)
    folder = str(tmp_path / "saved")
    prompt = np.array([40, 50, 60], np.int64)
    requests = [
        Sample(prompt, SamplingParams(max_tokens=30, seed=7, stop=()), 4, folder),
        Sample(prompt, SamplingParams(max_tokens=30, seed=8, stop=(), temperature=0.7, top_k=20), 2, None),
        Sample(prompt, SamplingParams(max_tokens=40, stop=()), 1, folder),  # its seed comes from its request id
    ]
    async with running(InlineWorkerGroup.from_spec(spec)) as (runtime, client, _):
        runtime.open_model("m")
        await value(client.submit(CreateModel(LoraSpec(8, seed=3)), "m", 0))
        for turn in range(4):
            client.submit(overfit("m"), "m", 1 + 2 * turn)
            await value(client.submit(OptimStep(OptimStepParams(lr=0.02)), "m", 2 + 2 * turn))
        await value(client.submit(SaveWeights(folder, False), "m", 9))
        beside = [await value(client.submit(one, request_id=f"s{i}"), 60) for i, one in enumerate(requests)]
    options = replace(tools.ONE, bundle={"CPU": 0.5}, builder="workers.rollout:build_rollout")
    with tools.deployed(spec, options) as name:
        async with tools.client_of(name, spec) as (_, client):
            told: list[SampleDelta] = []
            drawn = [
                await value(client.submit(one, request_id=f"s{i}", progress=told.append if i == 2 else None), 60)
                for i, one in enumerate(requests)
            ]
            with pytest.raises(InvalidRequest, match="checkpoint"):
                await value(client.submit(replace(requests[0], adapter_folder=str(tmp_path / "none"))), 60)
    for one, other in zip(beside, drawn, strict=True):
        for expected, sequence in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_array_equal(sequence.tokens, expected.tokens)
            np.testing.assert_array_equal(sequence.logprobs, expected.logprobs)
    assert np.concatenate([delta.tokens for delta in told]).tolist() == drawn[2].sequences[0].tokens.tolist()
    assert len(told) > 1, "the tokens of a stream came at its end only"


async def test_replicas_come_under_load_and_go_after_it(tools: ModuleType) -> None:
    options = replace(tools.ONE, max_replicas=2, upscale_delay=0.5, downscale_delay=2.0, look_back=2.0)
    with tools.deployed(tools.SLOW, options) as name:
        async with tools.client_of(name, tools.SLOW) as (_, client):
            assert tools.replicas(name) == 1
            samples: list[asyncio.Future[Any]] = []
            async with asyncio.timeout(120):  # a replica takes its time to start: the load lasts until it is there
                while tools.replicas(name) < 2:
                    waiting = sum(not outcome.done() for outcome in samples)
                    samples += [client.submit(sample(1 + i, tokens=100)) for i in range(24 - waiting)]
                    await asyncio.sleep(0.2)
            for outcome in samples:
                [sequence] = (await value(outcome)).sequences
                assert sequence.tokens.tolist() == SLOWLY[:100]
            await until(lambda: tools.replicas(name) == 1, 60)


async def test_a_cancelled_sample_stops_decoding_and_waiting_ones_are_held_back_in_order(tools: ModuleType) -> None:
    spec = replace(tools.SLOW, max_sample_rows=1)
    with tools.deployed(spec, tools.ONE) as name:
        async with tools.client_of(name, spec) as (samplers, client):
            told: list[SampleDelta] = []
            long = client.submit(sample(1, tokens=2000), request_id="long", progress=told.append)
            await until(lambda: told, 60)
            assert samplers.waiting("long").reason == "running"
            behind = client.submit(sample(2, tokens=4), request_id="behind")
            await until(lambda: (samplers.waiting("behind").reason or "").startswith("waiting for a sampling replica"))
            samplers.cancel("long")
            with pytest.raises(Cancelled) as stopped:
                await value(long, 60)
            heard = sum(len(delta.tokens) for delta in told)
            assert heard <= stopped.value.drawn_tokens <= heard + 8, "a turn more than was told"
            assert stopped.value.prompt_tokens == 2
            assert len((await value(behind, 20)).sequences[0].tokens) == 4, "100 s of the long one were in its way"
            count = len(told)
            await asyncio.sleep(0.5)
            assert len(told) == count

            client.loads.clear()
            first = [client.submit(sample(1, tokens=10)) for _ in range(30)]
            assert samplers.samples_waiting("p") == 30
            assert samplers.load().samples == 30
            await until(lambda: samplers.samples_waiting("p") < 30)
            other = Client(samplers, "q")
            late = other.submit(sample(2, tokens=10))
            assert (samplers.waiting("q-0").reason or "").startswith(("next", "waiting for its turn"))
            samplers.cancel("p-29")
            with pytest.raises(Cancelled) as never_begun:
                await value(first[-1])
            assert never_begun.value.drawn_tokens == never_begun.value.prompt_tokens == 0
            await value(late, 30)
            assert sum(outcome.done() for outcome in first) < 20, "a project with many samples held up another one"
            assert len(client.loads) < 30, "waiting samples are not read ahead of time"
            with pytest.raises(NotFound, match="gone from the log"):
                await value(other.submit(NotFound("this sample is gone from the log")), 30)

            began = time.monotonic()
            await samplers.stop(0.5)
            assert time.monotonic() - began < 5
            for outcome in (first[-2], client.submit(sample(1))):
                with pytest.raises(Unavailable, match="shutting down"):
                    await value(outcome)


async def test_samples_go_to_the_replica_that_has_their_adapter(tools: ModuleType, pair: str, tmp_path: Path) -> None:
    folders, homes = [], {}
    for name in ("a", "b", "c", "d", "e", "f"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "toy.json").write_text('{"weight": 3.0}')
        folders.append(str(tmp_path / name))
    for folder in folders:
        homes[folder] = await tools.begun_on(pair, sample(1, tokens=2, folder=folder), folder, f"first-{folder}")
    assert len(set(homes.values())) == 2, "all went to one replica: nothing is shown"
    await asyncio.sleep(5.0)  # until the router has heard: replicas tell it every tenth of a second
    for turn, folder in itertools.product(range(4), folders):
        where = await tools.begun_on(pair, sample(1, tokens=2, folder=folder), folder, f"{turn}-{folder}")
        assert where == homes[folder]


async def test_a_killed_replica_has_its_samples_run_again_and_streams_go_on(tools: ModuleType, pair: str) -> None:
    async with tools.client_of(pair, tools.SLOW) as (_, client):
        told: dict[str, list[int]] = {f"s{i}": [] for i in range(4)}
        outcomes = {
            name: client.submit(
                sample(1, tokens=100),
                request_id=name,
                progress=lambda delta, name=name: told[name].extend(delta.tokens.tolist()),
            )
            for name in told
        }
        await until(lambda: all(len(tokens) > 10 for tokens in told.values()), 60)
        os.kill(tools.replica_pid(pair), signal.SIGKILL)
        for name, outcome in outcomes.items():
            [sequence] = (await value(outcome, 90)).sequences
            assert told[name] == sequence.tokens.tolist() == SLOWLY[:100]
        assert len(client.started) > 4, "no sample ran on the replica that was killed: the test is vacuous"


async def test_a_replica_whose_worker_cannot_be_brought_back_is_replaced(tools: ModuleType, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    spec = replace(tools.SLOW, source=str(broken))
    as_served = replace(tools.ONE, health_period=SamplerOptions().health_period)  # it is asked again for 9 to 16 s
    with tools.deployed(spec, as_served) as name:
        async with tools.client_of(name, spec) as (_, client):
            told: list[int] = []
            outcome = client.submit(sample(1, tokens=100), progress=lambda delta: told.extend(delta.tokens.tolist()))
            await until(lambda: len(told) > 10, 60)
            broken.touch()
            replica = tools.replica_pid(name)
            os.kill(tools.worker_pid(replica), signal.SIGKILL)
            await until(lambda: not process_exists(replica), 60)
            broken.unlink()
            [sequence] = (await value(outcome, 90)).sequences
            assert told == sequence.tokens.tolist() == SLOWLY[:100]


async def test_numbers_of_replicas_that_cannot_be_are_refused(tools: ModuleType) -> None:
    with pytest.raises(InvalidRequest, match="3 to 2 sampling replicas"):
        replace(tools.ONE, min_replicas=3, max_replicas=2)
