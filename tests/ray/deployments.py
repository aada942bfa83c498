"""Deployments of sampling replicas for tests. Imported only where such a test runs: Serve takes seconds to import."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import ray
from ray import serve

from schemas.errors import TinsmithError
from schemas.operations import Sample
from tests.workers.harness import Client
from workers.ray.sampler_client import SamplerClient
from workers.ray.sampler_options import SamplerOptions
from workers.ray.sampler_replica import Begun, LastWords, SampleRequest
from workers.ray.samplers import DEPLOYMENT, most_ongoing, replaced_within, sampler_application
from workers.spec import WorkerSpec

SLOW = WorkerSpec("toy", None, "unused", device="cpu", threads=1, max_sample_rows=4)
ONE = SamplerOptions(bundle={"CPU": 0.25}, builder="tests.ray.slow_sampler:build", health_period=1.0, start_timeout=120)
_numbers = itertools.count()


@contextmanager
def deployed(spec: WorkerSpec, options: SamplerOptions) -> Iterator[str]:
    """A deployment that runs; the name of its application, which no other one on this machine has."""
    name = f"samplers-{os.getpid()}-{next(_numbers)}"
    serve.run(sampler_application(spec, options), name=name, route_prefix=None)
    try:
        yield name
    finally:
        serve.delete(name)


@asynccontextmanager
async def client_of(name: str, spec: WorkerSpec) -> AsyncIterator[tuple[SamplerClient, Client]]:
    """A client of a deployment, and what submits to it."""
    samplers = SamplerClient(spec.model, ahead=most_ongoing(spec), patience=replaced_within(ONE))
    samplers.connect(serve.get_app_handle(name))
    client = Client(samplers)
    try:
        yield samplers, client
    finally:
        await samplers.stop(0)
    assert all(count == 1 for count in client.answers.values()), "a ticket was answered twice"


def replicas(name: str) -> int:
    """How many replicas of an application run."""
    return serve.status().applications[name].deployments[DEPLOYMENT].replica_states.get("RUNNING", 0)


def replica_pid(name: str) -> int:
    """The process of one of them, on this machine."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith(f"ray::ServeReplica:{name}:".encode()):
                return int(folder.name)
    raise AssertionError("there is no replica")


def worker_pid(replica: int) -> int:
    """The worker process of a replica."""
    tasks = Path(f"/proc/{replica}/task").iterdir()
    [worker] = [pid for task in tasks for pid in (task / "children").read_text().split()]
    return int(worker)


async def begun_on(name: str, sample: Sample, key: str, request_id: str) -> str:
    """Draw a sample; the replica that did."""
    handle = serve.get_app_handle(name).options(stream=True, method_name="sample", multiplexed_model_id=key)
    last_words = ray.remote(LastWords).options(num_cpus=0).remote()
    items = [item async for item in handle.remote(SampleRequest(request_id, "p", sample, False, last_words))]
    assert not isinstance(items[-1], TinsmithError)
    assert isinstance(items[0], Begun)
    return items[0].replica
