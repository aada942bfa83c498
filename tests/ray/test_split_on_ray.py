"""`tinsmith serve --ray --samplers N`: the unmodified SDK trains at one place and samples at others, with the bits of
the one-machine layout; replicas come under load and go after it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tinker import types

from tests.fault.harness import MODEL, sdk, serving
from tests.ray.serve_cluster import RayProcesses, ray_processes
from tests.ray.test_serve_on_ray import Outcome, _patience, work  # noqa: F401 (a fixture)
from tests.support.processes import freeze
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]

PROMPT = types.ModelInput.from_ints([5, 6, 7])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny", context_length=4096)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayProcesses]:
    with ray_processes(cpus=3) as processes, pytest.MonkeyPatch.context() as patch:
        for name, value in processes.environment.items():
            patch.setenv(name, value)
        yield processes


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Outcome:
    """The same work on a server that does everything on one copy of the weights."""
    with serving(tmp_path_factory.mktemp("embedded"), base) as service:
        return work(service)


def samplers(cluster: RayProcesses) -> list[int]:
    """The processes of the sampling replicas."""
    return cluster.find("ray::ServeReplica:tinsmith-samplers")


def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for what no event tells of."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.2)


def test_a_replica_draws_what_the_trainer_would_have_drawn(
    tmp_path: Path, base: Path, cluster: RayProcesses, embedded: Outcome
) -> None:
    layout = ("--ray", cluster.address, "--samplers", "1")
    with serving(tmp_path, base, *layout) as service:
        [replica] = samplers(cluster)
        assert work(service) == embedded
        with sdk(service) as client:
            trainer = client.create_lora_training_client(base_model=MODEL, rank=4, seed=3)
            sampler = trainer.save_weights_and_get_sampling_client()
            params = types.SamplingParams(max_tokens=12, seed=5)
            before = sampler.sample(PROMPT, 1, params).result(timeout=400)
            freeze(cluster.worker())  # nothing can be drawn on the trainer's copy now
            try:
                again = sampler.sample(PROMPT, 1, params).result(timeout=120)
            finally:
                os.kill(cluster.worker(), signal.SIGCONT)
            assert again.sequences[0].tokens == before.sequences[0].tokens
            cluster.kill(replica)
            after = sampler.sample(PROMPT, 1, params).result(timeout=400)
            assert after.sequences[0].tokens == before.sequences[0].tokens
        assert samplers(cluster) != [replica]
    until(lambda: cluster.find("ray::ServeReplica:tinsmith") == [], 60)  # the server left no deployment behind


def test_replicas_come_under_load_and_go_after_it_and_with_another_layout(
    tmp_path: Path, base: Path, cluster: RayProcesses
) -> None:
    delays = ("--samplers-up-delay", "1", "--samplers-down-delay", "5")
    layout = ("--ray", cluster.address, "--samplers", "1:2", "--max-sample-rows", "2", *delays)
    with serving(tmp_path, base, *layout) as service:
        assert len(samplers(cluster)) == 1
        with sdk(service) as client:
            sampler = client.create_sampling_client(base_model=MODEL)
            params = [types.SamplingParams(max_tokens=1000, seed=seed, stop=[]) for seed in range(40)]
            answers = [sampler.sample(PROMPT, 1, one) for one in params]
            until(lambda: len(samplers(cluster)) == 2, 300)
            assert not all(answer.done() for answer in answers), "it came after the load"
            drawn = [answer.result(timeout=600).sequences[0].tokens for answer in answers]
            until(lambda: len(samplers(cluster)) == 1, 120)
            alone = sampler.sample(PROMPT, 1, params[-1]).result(timeout=400).sequences[0].tokens
            assert alone == drawn[-1], "which replica draws, and beside what, shows in the tokens"
        [replica] = samplers(cluster)
        service.kill_server()
        service.wait_for_start()
        assert samplers(cluster) == [replica], "the next server goes on with the replicas that are there"
        service.kill_for_good()
    assert samplers(cluster) != []
    with serving(tmp_path / "second", base, "--ray", cluster.address):
        assert samplers(cluster) == [], "replicas that nobody uses were left"
