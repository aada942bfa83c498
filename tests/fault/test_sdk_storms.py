"""Two dozen official clients while the server is away and connections to it are refused: as they come, with their own
pauses and repeats.

All of them end with the numbers of an undisturbed client, and every operation was executed and counted once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from tests.fault.harness import CLIENT_SECONDS, MODEL, Service, example, serving

logger = logging.getLogger(__name__)

KINDS = 3
"""Clients of one kind do the same, and must get the same."""
PROMPT = [5, 6, 7, 8]
DRAWN = 6
CLOSE_SECONDS = 30.0
"""The SDK waits for its heartbeat when it closes; now and then the cancellation is lost, and it would wait for ever."""


@dataclass
class Outcome:
    """What a client has in the end."""

    losses: list[float] = field(default_factory=list)
    drawn: list[list[int]] = field(default_factory=list)
    path: str = ""

    @property
    def model_id(self) -> str:
        """Of its adapter."""
        return self.path.removeprefix("tinker://").split("/")[0]

    @property
    def session_id(self) -> str:
        """Of all that it did."""
        return self.model_id.split(":")[0]


class Steps:
    """How many steps all clients have done, and where they wait for the next outage to have begun."""

    def __init__(self) -> None:
        self.done = 0
        self._lock = threading.Lock()

    def note(self) -> None:
        """One more."""
        with self._lock:
            self.done += 1


def _program(service: Service, kind: int, steps: int, progress: Steps) -> Outcome:
    """Train with samples of the base model between the steps; save; sample what was trained."""
    found = Outcome()
    client = tinker.ServiceClient(base_url=service.direct, api_key=service.key)
    training = client.create_lora_training_client(base_model=MODEL, rank=2, seed=kind).result()
    base = client.create_sampling_client(base_model=MODEL).result()
    for step in range(steps):
        batch = training.forward_backward([example(100 * kind + step)], "cross_entropy")
        applied = training.optim_step(types.AdamParams(learning_rate=1e-2))
        found.drawn.append(_draw(base, kind + step))
        found.losses.append(batch.result(timeout=CLIENT_SECONDS).metrics["loss:sum"])
        applied.result(timeout=CLIENT_SECONDS)
        progress.note()
    found.path = training.save_state("end").result(timeout=CLIENT_SECONDS).path
    found.drawn.append(_draw(training.save_weights_and_get_sampling_client().result(), kind))
    with suppress(TimeoutError):
        client.close("success").result(timeout=CLOSE_SECONDS)
    return found


def _draw(sampler: Any, seed: int) -> list[int]:
    params = types.SamplingParams(max_tokens=DRAWN, seed=seed, stop=[])
    drawn = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result(timeout=CLIENT_SECONDS)
    return list(drawn.sequences[0].tokens)


def _storm(service: Service, count: int, steps: int, outages: list[float]) -> None:
    """Outages are spread over the steps of all clients."""
    expected = [_program(service, kind, steps, Steps()) for kind in range(KINDS)]
    progress = Steps()
    with ThreadPoolExecutor(count) as threads:
        running = [threads.submit(_program, service, number % KINDS, steps, progress) for number in range(count)]
        for number, seconds in enumerate(outages, 1):
            _wait_for_steps(progress, running, number * steps * count // (len(outages) + 1))
            service.take_down()
            time.sleep(seconds)
            start, before = service.bring_up(), progress.done
            _wait_for_steps(progress, running, min(before + count, steps * count))
            took = time.monotonic() - start.ready
            logger.info("server away for %.1f s; %.1f s after its start %d more steps were done", seconds, took, count)
        found = [each.result(timeout=2 * CLIENT_SECONDS) for each in running]
    asked_anew = 0
    for number, one in enumerate(found):
        same = expected[number % KINDS]
        assert (one.losses, one.drawn) == (same.losses, same.drawn)
        assert service.saved(one.path) == service.saved(same.path)
        assert service.outcomes(one.model_id) == service.outcomes(same.model_id)
        asked_anew += _counted(service, one.session_id, same.session_id)
    logger.info("%d clients; %d samples were asked for anew, as their acceptance was never heard of", count, asked_anew)
    assert asked_anew <= count * len(outages)


def _counted(service: Service, session_id: str, same_session_id: str) -> int:
    """Usage is that of the undisturbed client, and every sample of the log counts once. Returns how many more there
    are: the SDK sends a sample under a new number when it has not heard that the server took it."""
    more = _samples(service, session_id) - _samples(service, same_session_id)
    assert more >= 0
    used, same = (_by_work(service.tokens(each)) for each in (session_id, same_session_id))
    assert used["training"] == same["training"] > 0
    assert used["drawn"] == same["drawn"] + more * DRAWN
    assert used["prompts"] == same["prompts"] + more * len(PROMPT)
    return more


def _by_work(tokens: list[tuple[str, int]]) -> dict[str, int]:
    """Whether a prompt was in the cache is chance."""
    found = dict(tokens)
    prompts = found.get("sampling_prefill", 0) + found.get("sampling_prefill_cached", 0)
    return {"training": found["training"], "drawn": found["sampling_sample"], "prompts": prompts}


def _samples(service: Service, session_id: str) -> int:
    query = "SELECT seq_id, scope FROM operations WHERE kind = 'sample' AND scope LIKE ?"
    found = service.rows(query, f"sampler:{session_id}:%")
    assert max(Counter(found).values()) == 1
    return len(found)


def _wait_for_steps(progress: Steps, running: list[Future[Outcome]], steps: int) -> None:
    deadline = time.monotonic() + CLIENT_SECONDS
    while progress.done < steps:
        for each in running:
            if each.done():
                each.result()
        assert time.monotonic() < deadline, f"{progress.done} of {steps} steps"
        time.sleep(0.02)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_two_dozen_official_clients_come_through_two_outages(tmp_path: Path, base: Path) -> None:
    with serving(tmp_path, base, "--log-level", "warning") as service:
        _storm(service, 24, 6, [3.0, 8.0])
