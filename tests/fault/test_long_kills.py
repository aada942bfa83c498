"""Four clients train 200 steps while the server, its worker or both die every few seconds; what they have differs in
no bit."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fault.harness import MODEL, Service, sdk, serving, train

CLIENTS = 4
STEPS = 50
"""Of each client."""
STEPS_BETWEEN = (6, 18)
"""How many steps, of all clients together, are begun before the next process is killed: what is slower is not killed
more often, and everybody comes forward in between."""
CLIENT_SECONDS = 800.0
LEAST_KILLS = 8


def _program(service: Service, seed: int, at_step: Callable[[int], None] = lambda step: None) -> tuple[str, str]:
    """Train a model and save it; returns the checkpoint's path and the model's id."""

    with sdk(service) as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=4, seed=seed).result()
        train(training, STEPS, at_step=at_step)
        path = training.save_state("final").result(timeout=CLIENT_SECONDS).path
        return path, path.removeprefix("tinker://").split("/")[0]


class Killer(threading.Thread):
    """Kills one or all of a service's processes at random moments until it is told to stop.

    Every fourth time the next kill follows at once, so that some processes die while they start or bring models back.
    """

    def __init__(self, service: Service, steps: Counter[int], seed: int) -> None:
        super().__init__(name="killer", daemon=True)
        self._service = service
        self._steps = steps
        self._chance = random.Random(seed)
        self._over = threading.Event()
        self._deck: list[str] = []
        self._wanted = 0
        self.kills: list[tuple[str, float]] = []
        """Who died, and when (seconds since the beginning)."""

    def run(self) -> None:
        began = time.monotonic()
        while self._wait_for_steps():
            for _ in range(1 + (self._chance.random() < 0.25)):
                if self._over.wait(self._chance.random() * 0.3):
                    return
                victim = self._next_victim()
                if self._kill(victim):
                    self.kills.append((victim, round(time.monotonic() - began, 1)))
                self._over.wait(self._chance.random() * 2)

    def keep_up(self) -> None:
        """A client waits when the clients are far ahead: a fast machine would be done after a few kills."""
        deadline = time.monotonic() + CLIENT_SECONDS
        while sum(self._steps.values()) > self._wanted + STEPS_BETWEEN[1] and not self._over.wait(0.02):
            assert time.monotonic() < deadline, "nobody is killed any more"

    def stop(self) -> None:
        """No further kills."""
        self._over.set()
        self.join()

    def _wait_for_steps(self) -> bool:
        """Until enough steps were begun since the last kill; False when it is told to stop."""
        self._wanted = sum(self._steps.values()) + self._chance.randint(*STEPS_BETWEEN)
        while sum(self._steps.values()) < self._wanted:
            if self._over.wait(0.02):
                return False
        return True

    def _next_victim(self) -> str:
        """In random order, each as often as the others."""
        if not self._deck:
            self._deck = self._chance.sample(("worker", "server", "tree"), 3)
        return self._deck.pop()

    def _kill(self, victim: str) -> bool:
        if victim == "worker":
            return self._service.kill_worker()
        return self._service.kill_server() if victim == "server" else self._service.kill_tree()


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_two_hundred_steps_under_a_killer_end_with_the_same_bits(
    tmp_path: Path, base: Path, record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = range(1, CLIENTS + 1)
    with serving(tmp_path, base, "--snapshot-operations", "8", "--snapshot-share", "1") as service:
        with ThreadPoolExecutor(CLIENTS) as threads:
            undisturbed = dict(zip(seeds, threads.map(lambda seed: _program(service, seed), seeds), strict=True))
            steps: Counter[int] = Counter()
            killer = Killer(service, steps, 11)

            def counted(seed: int) -> Callable[[int], None]:
                def at_step(step: int) -> None:
                    steps[seed] = step + 1
                    killer.keep_up()

                return at_step

            running = {seed: threads.submit(_program, service, seed, counted(seed)) for seed in seeds}
            killer.start()
            try:
                disturbed = {seed: future.result(timeout=CLIENT_SECONDS) for seed, future in running.items()}
            finally:
                killer.stop()
        for seed, (path, model_id) in disturbed.items():
            expected_path, expected_id = undisturbed[seed]
            assert service.saved(path) == service.saved(expected_path)
            outcomes = service.outcomes(model_id)
            assert outcomes == service.outcomes(expected_id)
            assert [seq for seq, _, _ in outcomes] == list(range(1, 2 * STEPS + 2))
            assert all(state == "done" for _, _, state in outcomes)
            assert service.tokens(model_id.split(":")[0]) == service.tokens(expected_id.split(":")[0])
    counts = Counter(victim for victim, _ in killer.kills)
    record_property("kills", len(killer.kills))
    with capsys.disabled():
        sys.stdout.write(f"\n{CLIENTS} clients, {CLIENTS * STEPS} steps, {len(killer.kills)} kills: {killer.kills}\n")
    assert len(killer.kills) >= LEAST_KILLS
    assert set(counts) == {"worker", "server", "tree"}
