"""Sampling replicas on Ray Serve: the tokens of the one-machine layout, more and fewer replicas, deaths, cancelling."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import serve

from schemas.errors import Gone, InvalidRequest, TinsmithError, Unavailable
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
from tests.workers.harness import Client, running, sample, until, value
from tests.workers.test_real_process import overfit
from workers.ray.sampler_client import SamplerClient
from workers.ray.sampler_replica import Begun, SampleRequest
from workers.ray.samplers import DEPLOYMENT, SamplerOptions, most_ongoing, sampler_application
from workers.spec import WorkerSpec

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("serve_cluster")]

SLOW = WorkerSpec("toy", None, "unused", device="cpu", threads=1, max_sample_rows=4)
ONE = SamplerOptions(bundle={"CPU": 0.25}, builder="tests.ray.slow_sampler:build", health_period=1.0, start_timeout=120)
_names = itertools.count()


@asynccontextmanager
async def sampling(spec: WorkerSpec, options: SamplerOptions = ONE) -> AsyncIterator[tuple[SamplerClient, Client, str]]:
    """A deployment that runs, a client of it, what submits to that, and the application's name."""
    name = f"samplers-{next(_names)}"
    application = sampler_application(spec, options)
    handle = await asyncio.to_thread(serve.run, application, name=name, route_prefix=None)
    samplers = SamplerClient(spec.model, handle, ahead=most_ongoing(spec))
    try:
        yield samplers, Client(samplers), name
    finally:
        await samplers.stop(0)
        await asyncio.to_thread(serve.delete, name)


def replicas(name: str) -> int:
    """How many replicas of an application run."""
    deployment = serve.status().applications[name].deployments[DEPLOYMENT]
    return deployment.replica_states.get("RUNNING", 0)


async def begun_on(handle: Any, sample: Sample, key: str, request_id: str) -> str:
    """Draw a sample; the replica that did."""
    response = handle.options(stream=True, method_name="sample", multiplexed_model_id=key).remote(
        SampleRequest(request_id, "p", sample, False)
    )
    items = [item async for item in response]
    assert not isinstance(items[-1], TinsmithError)
    assert isinstance(items[0], Begun)
    return items[0].replica


async def test_the_same_seeds_give_the_tokens_of_the_one_machine_layout(tmp_path: Path) -> None:
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
    async with sampling(spec, SamplerOptions(bundle={"CPU": 0.5})) as (_, client, _name):
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


async def test_replicas_come_under_load_and_go_after_it() -> None:
    options = replace(ONE, max_replicas=3, upscale_delay=0.5, downscale_delay=2.0)
    async with sampling(SLOW, options) as (samplers, client, name):
        assert replicas(name) == 1
        samples = [client.submit(sample(1 + i, tokens=60)) for i in range(40)]
        most = 0
        while not all(outcome.done() for outcome in samples):
            most = max(most, replicas(name))
            assert samplers.load().samples + 3 * most_ongoing(SLOW) >= 0
            await asyncio.sleep(0.2)
        assert most > 1, "nothing was added under load"
        for i, outcome in enumerate(samples):
            [sequence] = (await value(outcome)).sequences
            assert sequence.tokens.tolist() == [(5 + k) % 100 for k in range(60)], i
        await until(lambda: replicas(name) == 1, 60)


async def test_a_killed_replica_has_its_samples_run_again_and_streams_go_on() -> None:
    async with sampling(SLOW, replace(ONE, min_replicas=2, max_replicas=2)) as (_, client, _name):
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
        victim = await asyncio.to_thread(_replica_pid)
        os.kill(victim, signal.SIGKILL)
        for name, outcome in outcomes.items():
            [sequence] = (await value(outcome, 90)).sequences
            assert told[name] == sequence.tokens.tolist() == [(5 + k) % 100 for k in range(100)]
        assert len(client.started) > 4, "no sample ran on the replica that was killed: the test is vacuous"


def _replica_pid() -> int:
    """The process of some sampling replica on this machine."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith(b"ray::ServeReplica:samplers"):
                return int(folder.name)
    raise AssertionError("there is no replica")


async def test_a_cancelled_sample_stops_decoding() -> None:
    async with sampling(replace(SLOW, max_sample_rows=1)) as (samplers, client, _name):
        told: list[SampleDelta] = []
        long = client.submit(sample(1, tokens=2000), request_id="long", progress=told.append)
        await until(lambda: told, 60)
        assert samplers.waiting("long").reason == "running"
        behind = client.submit(sample(2, tokens=4), request_id="behind")
        await until(lambda: (samplers.waiting("behind").reason or "").startswith("waiting for a sampling replica"))
        samplers.cancel("long")
        with pytest.raises(Gone, match="cancelled"):
            await value(long)
        assert len((await value(behind, 20)).sequences[0].tokens) == 4, "100 s of the long one were in its way"
        count = len(told)
        await asyncio.sleep(0.5)
        assert len(told) == count


async def test_waiting_samples_are_held_back_in_order_and_fail_when_it_stops() -> None:
    spec = replace(SLOW, max_sample_rows=1)
    async with sampling(spec) as (samplers, client, _name):
        other = Client(samplers, "q")
        first = [client.submit(sample(1, tokens=10)) for _ in range(30)]
        assert samplers.samples_waiting("p") == 30
        await until(lambda: samplers.samples_waiting("p") < 30)
        late = other.submit(sample(2, tokens=10))
        assert (samplers.waiting("q-0").reason or "").startswith(("next", "waiting for its turn"))
        await value(late, 30)
        assert sum(outcome.done() for outcome in first) < 20, "a project with many samples held up another one"
        assert len(client.loads) < 30, "waiting samples are not read ahead of time"
        began = time.monotonic()
        await samplers.stop(0.5)
        assert time.monotonic() - began < 5
        with pytest.raises(Unavailable, match="shutting down"):
            await value(first[-1])
        with pytest.raises(Unavailable, match="shutting down"):
            await value(client.submit(sample(1)))
    assert all(count == 1 for count in client.answers.values())


async def test_samples_go_to_the_replica_that_has_their_adapter(tmp_path: Path) -> None:
    folders = []
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "toy.json").write_text('{"weight": 3.0}')
        folders.append(str(tmp_path / name))
    options = replace(ONE, min_replicas=2, max_replicas=2)
    async with sampling(SLOW, options) as (_, _client, name):
        handle, homes = serve.get_app_handle(name), {}
        for folder in folders:
            homes[folder] = await begun_on(handle, sample(1, tokens=2, folder=folder), folder, f"first-{folder}")
        await asyncio.sleep(1.0)  # until the router has heard
        for turn, folder in itertools.product(range(4), folders):
            where = await begun_on(handle, sample(1, tokens=2, folder=folder), folder, f"{turn}-{folder}")
            assert where == homes[folder]
        assert len(set(homes.values())) == 2, "all went to one replica: nothing is shown"


def test_numbers_of_replicas_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="3 to 2 sampling replicas"):
        SamplerOptions(min_replicas=3, max_replicas=2)
