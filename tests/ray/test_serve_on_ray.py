"""`tinsmith serve --ray`: the unmodified SDK gets the bits of the embedded server, whichever process is killed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.fault import harness
from tests.fault.harness import MODEL, Service, sdk, serving, train
from tests.ray.serve_cluster import RayProcesses, ray_processes
from tests.support.server import TINSMITH, environment, wait_until_ready
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

STEPS = 10
START_SECONDS = 400.0


@dataclass(frozen=True)
class Outcome:
    """What a client is left with: the saved adapter and its moments, and what the adapter draws."""

    files: dict[str, bytes]
    drawn: list[list[int]]
    logprobs: list[list[float]]


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """On a busy machine Ray, Serve, a replica and its worker may take minutes to start, one after the other."""

    def wait(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
        wait_until_ready(url, process, log, max(seconds, START_SECONDS))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "wait_until_ready", wait)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayProcesses]:
    with ray_processes() as processes, pytest.MonkeyPatch.context() as patch:
        for name, value in processes.environment.items():
            patch.setenv(name, value)  # for the servers of this module
        yield processes


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Outcome:
    """The same work on a server with worker processes of its own."""
    with serving(tmp_path_factory.mktemp("embedded"), base) as service:
        return work(service)


def work(service: Service, at_step: Callable[[int], None] = lambda step: None) -> Outcome:
    """Train, save, load into a new model, train on, save and sample."""
    with sdk(service) as client:
        first = client.create_lora_training_client(base_model=MODEL, rank=4, seed=3)
        train(first, STEPS // 2, at_step=at_step)
        state = first.save_state("half").result(timeout=400)
        second = client.create_training_client_from_state_with_optimizer(state.path)
        train(second, STEPS // 2, at_step=lambda step: at_step(STEPS // 2 + step))
        saved = second.save_state("whole").result(timeout=400)
        sampler = second.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=12, seed=5, temperature=1.0)
        answer = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 3, params).result(timeout=400)
        return Outcome(
            service.saved(saved.path),
            [list(sequence.tokens) for sequence in answer.sequences],
            [list(sequence.logprobs or []) for sequence in answer.sequences],
        )


def test_killing_each_process_changes_no_bit(
    tmp_path: Path, base: Path, cluster: RayProcesses, embedded: Outcome
) -> None:
    killed = []

    def kill(step: int) -> None:
        def end(name: str, *pids: int) -> None:
            cluster.kill(*pids)
            killed.append(name)

        if step == 1:
            end("worker", cluster.worker())
        elif step == 3:
            end("replica", cluster.replica())
        elif step == 6:
            end("controller", cluster.controller())
        elif step == 8:
            service.kill_server()
            killed.append("edge")

    with serving(tmp_path, base, "--ray", cluster.address) as service:
        replica = cluster.replica()
        outcome = work(service, kill)
        assert service.starts == 2
        assert cluster.replica() != replica
    assert killed == ["worker", "replica", "controller", "edge"]
    assert outcome == embedded
    assert cluster.find("ray::ServeReplica:tinsmith") == [], "the server left its deployment behind"


def test_base_models_come_and_go_and_a_hopeless_one_leaves_nothing(
    tmp_path: Path, base: Path, cluster: RayProcesses
) -> None:
    import shutil

    second, broken = tmp_path / "second", tmp_path / "broken"
    shutil.copytree(base, second)
    shutil.copytree(base, broken)
    (broken / "config.json").write_text("{}")
    with serving(tmp_path, base, "--ray", cluster.address, "--worker-start-timeout", "60") as service:

        def models(*arguments: Any) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [
                    *(TINSMITH, "models", *map(str, arguments)),
                    *("--url", service.url, "--data-dir", service.data_dir),
                ],
                capture_output=True,
                text=True,
                timeout=300,
                env=environment(),
            )

        hopeless = models("add", f"acme/third={broken}")
        assert hopeless.returncode == 1
        assert "base model 'acme/third' cannot be served" in hopeless.stderr
        assert models("add", f"acme/second={second}").returncode == 0
        assert len(cluster.find("ray::ServeReplica:tinsmith")) == 2
        shown = models("list").stdout
        assert "acme/second  ready  added" in shown
        assert "acme/third" not in shown
        assert models("remove", "acme/second").returncode == 0
        assert len(cluster.find("ray::ServeReplica:tinsmith")) == 1


def test_an_address_without_a_cluster_is_said_in_one_line(tmp_path: Path, base: Path) -> None:
    command = [TINSMITH, "serve", "--ray", "127.0.0.1:1", "--data-dir", tmp_path / "data", "--port", "0"]
    done = subprocess.run(
        [*command, "--base-model", f"{MODEL}={base}"], capture_output=True, text=True, timeout=240, env=environment()
    )
    assert done.returncode == 1
    assert "no Ray cluster can be used at 127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
