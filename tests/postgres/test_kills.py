"""Servers and the database are killed under training clients, who notice nothing but time.

Clients of the SDK talk to one server, or through a proxy that spreads their connections over both: who loses a server
goes on at the other one, as behind a load balancer, with the same session and the same numbers.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.fault.harness import CLIENT_SECONDS, MODEL, train
from tests.postgres.harness import LEASE, Cluster, cluster
from tests.support.postgres import Postgres
from tests.support.processes import freeze

pytestmark = pytest.mark.exhaustive
STEPS = 8


def _program(
    cluster: Cluster, url: str, seed: int, at_step: Callable[[str, int], None] = lambda model_id, step: None
) -> tuple[str, str]:
    """Train a model and save it; returns the checkpoint's path and the model's id."""
    with tinker.ServiceClient(base_url=url, api_key=cluster.key) as client:
        training: Any = client.create_lora_training_client(base_model=MODEL, rank=4, seed=seed).result()
        model_id = str(training.get_info().model_id)
        train(training, STEPS, at_step=lambda step: at_step(model_id, step))
        at_step(model_id, STEPS)
        return training.save_state("final").result(timeout=CLIENT_SECONDS).path, model_id


def _same(cluster: Cluster, run: tuple[str, str], expected: tuple[str, str]) -> None:
    """Nothing was lost, nothing was done twice, and the adapters have the same bits."""
    (path, model_id), (expected_path, expected_id) = run, expected
    assert cluster.saved(path) == cluster.saved(expected_path)
    assert cluster.outcomes(model_id) == cluster.outcomes(expected_id)
    assert all(state == "done" for _, _, state in cluster.outcomes(model_id))
    sessions = [model.split(":")[0] for model in (model_id, expected_id)]
    assert cluster.tokens(sessions[0]) == cluster.tokens(sessions[1])


def _samples(cluster: Cluster, url: str) -> list[list[int]]:
    with tinker.ServiceClient(base_url=url, api_key=cluster.key) as client:
        sampler = client.create_sampling_client(base_model=MODEL).result()
        params = tinker.SamplingParams(max_tokens=6, seed=3, temperature=1.0)
        prompt = tinker.ModelInput.from_ints([5, 6, 7])
        futures = [sampler.sample(prompt, 1, params) for _ in range(12)]
        return [list(future.result(timeout=CLIENT_SECONDS).sequences[0].tokens) for future in futures]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, base: Path, postgres: Postgres) -> Iterator[Cluster]:
    """Two servers; the last test ends one of them."""
    postgres.create_database("kills")
    with cluster(tmp_path_factory.mktemp("kills"), base, postgres.url("kills")) as running:
        yield running


def test_training_goes_on_after_the_database_was_killed(servers: Cluster, postgres: Postgres) -> None:
    first, second = servers.servers
    alone = {seed: _program(servers, first.url, seed) for seed in (1, 2)}

    def kill(model_id: str, step: int) -> None:
        if step == STEPS // 2:
            postgres.kill()
            time.sleep(1.0)
            postgres.start()

    with ThreadPoolExecutor(2) as threads:
        one = threads.submit(_program, servers, first.url, 1, kill)
        two = threads.submit(_program, servers, second.url, 2)
        runs = {1: one.result(timeout=CLIENT_SECONDS), 2: two.result(timeout=CLIENT_SECONDS)}
    for seed, run in runs.items():
        _same(servers, run, alone[seed])


def test_a_server_that_slept_through_its_lease_stops_and_nothing_is_done_twice(servers: Cluster) -> None:
    first, second = servers.servers
    alone = _program(servers, second.url, 1)
    with tinker.ServiceClient(base_url=first.url, api_key=servers.key) as client:
        training: Any = client.create_lora_training_client(base_model=MODEL, rank=4, seed=1).result()
        model_id = training.get_info().model_id
        edge, fence = servers.holder(model_id)

        def sleep(step: int) -> None:
            if step != STEPS // 2:
                return
            freeze(first.process.pid)
            deadline = time.monotonic() + 90
            while servers.holder(model_id)[1] == fence:
                assert time.monotonic() < deadline, second.log.read_text()[-4000:]
                time.sleep(0.2)
            time.sleep(LEASE / 2)
            first.process.send_signal(signal.SIGCONT)

        train(training, STEPS, at_step=sleep)
        path = training.save_state("final").result(timeout=CLIENT_SECONDS).path
        holder, now = servers.holder(model_id)
    _same(servers, (path, model_id), alone)
    assert holder != edge, "it died, or was asleep"
    assert now > fence
    assert "is executed by another server now" in first.log.read_text()


def test_a_killed_server_leaves_its_runs_to_the_other_one(servers: Cluster) -> None:
    first, second = servers.servers
    alone = {seed: _program(servers, first.url, seed) for seed in (1, 2)}
    before: list[tuple[Any, ...]] = []
    after: list[tuple[Any, ...]] = []

    def kill(model_id: str, step: int) -> None:
        if step == 0:
            before.append(servers.holder(model_id))
            servers.proxy.only = None
        elif step == STEPS // 2:
            first.kill()
        elif step == STEPS:
            after.append(servers.holder(model_id))

    servers.proxy.only = first.port
    with ThreadPoolExecutor(3) as threads:
        mixed = threads.submit(_program, servers, servers.url, 1, kill)
        other = threads.submit(_program, servers, second.url, 2)
        sampled = threads.submit(_samples, servers, servers.url)
        runs = {1: mixed.result(timeout=CLIENT_SECONDS), 2: other.result(timeout=CLIENT_SECONDS)}
        drawn = sampled.result(timeout=CLIENT_SECONDS)
    for seed, run in runs.items():
        _same(servers, run, alone[seed])
    [(edge, fence)], [(holder, now)] = before, after
    assert holder != edge, "it died, or was asleep"
    assert now > fence
    assert len(drawn) == 12
    assert all(tokens == drawn[0] for tokens in drawn)
    assert servers.rows("SELECT count(*) FROM operations WHERE state = 'pending'") == [(0,)]
