"""Workers and servers are killed at random moments under training clients, who notice nothing but time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fault.harness import CLIENT_SECONDS, MODEL, Service, sdk, serving, train

STEPS = 12


def _program(service: Service, seed: int, at_step: Callable[[int], None] = lambda step: None) -> tuple[str, str]:
    """Train a model and save it; returns the checkpoint's path and the model's id."""
    with sdk(service) as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=seed).result()
        train(training, STEPS, at_step=at_step)
        path = training.save_state("final").result(timeout=CLIENT_SECONDS).path
        return path, path.removeprefix("tinker://").split("/")[0]


def _session(model_id: str) -> str:
    return model_id.split(":")[0]


class Killer:
    """Kills what it is told to a random moment after it is told, whenever there is something to kill."""

    def __init__(self, service: Service, seed: int) -> None:
        self._service = service
        self._chance = random.Random(seed)
        self._one_at_a_time = threading.Lock()
        self._threads = ThreadPoolExecutor(8)
        self._kills: list[Future[None]] = []

    def send(self, victim: str) -> None:
        """Returns at once."""
        self._kills.append(self._threads.submit(self._kill, victim, self._chance.random() * 0.1))

    def wait(self) -> None:
        """Until everybody died that is to die."""
        for kill in list(self._kills):
            kill.result(timeout=CLIENT_SECONDS)

    def finish(self) -> int:
        """How many were killed."""
        for kill in self._kills:
            kill.result(timeout=CLIENT_SECONDS)
        self._threads.shutdown()
        return len(self._kills)

    def _kill(self, victim: str, pause: float) -> None:
        with self._one_at_a_time:
            self._service.wait_until_ready()
            time.sleep(pause)
            if victim == "server":
                self._service.kill_server()
            while victim == "worker" and not self._service.kill_worker():
                time.sleep(0.05)
            time.sleep(0.5)


@pytest.mark.exhaustive
def test_killed_workers_and_servers_leave_no_trace_in_what_two_clients_trained(tmp_path: Path, base: Path) -> None:
    victims = {(1, 2): "worker", (2, 4): "server", (1, 6): "worker", (2, 8): "worker", (1, 9): "server"}
    with serving(tmp_path, base, "--snapshot-operations", "5", "--snapshot-share", "1") as service:
        undisturbed = {seed: _program(service, seed) for seed in (1, 2)}
        killer = Killer(service, 7)

        def deadly(seed: int) -> Callable[[int], None]:
            def at_step(step: int) -> None:
                killer.wait()  # on a fast machine a client would be done before anybody dies
                if (seed, step) in victims:
                    killer.send(victims[seed, step])

            return at_step

        with ThreadPoolExecutor(2) as threads:
            running = {seed: threads.submit(_program, service, seed, deadly(seed)) for seed in (1, 2)}
            disturbed = {seed: future.result(timeout=CLIENT_SECONDS) for seed, future in running.items()}
        assert killer.finish() == len(victims)
        for seed, (path, model_id) in disturbed.items():
            expected_path, expected_id = undisturbed[seed]
            assert service.saved(path) == service.saved(expected_path)
            assert service.outcomes(model_id) == service.outcomes(expected_id)
            assert service.tokens(_session(model_id)) == service.tokens(_session(expected_id))
            assert all(state == "done" for _, _, state in service.outcomes(model_id))
        text = service.log.read_text()
        assert "are executed again" in text
        assert "come back" in text
