"""The server is away and all its clients go on trying, each as the SDK does; then it is there again.

They all get through within the longest pause that they make between two tries and the time that their work takes; what
they trained has the bits of an undisturbed client, and every operation was executed and counted once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fault.harness import MODEL, RAW_DATA, Service, serving

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Of the SDK: each pause is twice the one before it, less up to a quarter by chance."""


class Pace:
    """How many steps a client may have done by now: none is through before the last outage, however fast the others
    are while it makes a long pause."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._raised = asyncio.Event()

    async def reach(self, done: int) -> None:
        """Wait until one more may be done."""
        while done >= self.steps:
            await self._raised.wait()

    def allow(self, steps: int) -> None:
        """From now on so many."""
        self.steps = steps
        self._raised.set()
        self._raised = asyncio.Event()


@dataclass
class Client:
    """One of many: an adapter that is trained step by step, each request repeated until it is answered.

    `answered` is when the last answer came (monotonic), and `asked` when the try began that had it; `failed`: how many
    tries had none.
    """

    http: httpx.AsyncClient
    chance: random.Random
    session: str = ""
    model: str = ""
    steps: int = 0
    asked: float = 0.0
    answered: float = 0.0
    failed: int = 0
    done: int = 0
    """Operations whose outcome is here."""
    _numbers: int = field(default=0)

    async def begin(self) -> None:
        """A session and an adapter; all of them begin alike."""
        self.session = (await self._call("create_session", sdk_version="test"))["session_id"]
        lora = {"rank": 1, "seed": 5}
        made = await self._do(
            "create_model", session_id=self.session, model_seq_id=0, base_model=MODEL, lora_config=lora
        )
        self.model = made["model_id"]

    async def train(self, steps: int, pace: Pace | None = None) -> None:
        """Go on until so many steps are done in all."""
        while self.steps < steps:
            if pace is not None:
                await pace.reach(self.steps)
            await self._do("forward_backward", **self._next(data=RAW_DATA, loss_fn="cross_entropy"))
            await self._do("optim_step", **self._next(adam_params={"learning_rate": 0.01}))
            self.steps += 1

    async def save(self) -> str:
        """The path of a checkpoint."""
        return str((await self._do("save_weights", **self._next(path="end")))["path"])

    def _next(self, **body: Any) -> dict[str, Any]:
        self._numbers += 1
        return {"model_id": self.model, "seq_id": self._numbers, **body}

    async def _do(self, route: str, **body: Any) -> dict[str, Any]:
        request_id = (await self._call(route, **body))["request_id"]
        outcome = await self._call("retrieve_future", request_id=request_id)
        assert "error" not in outcome, outcome
        self.done += 1
        return outcome

    async def _call(self, route: str, **body: Any) -> dict[str, Any]:
        tries = 0
        while True:
            pause = min(FIRST_PAUSE * 2**tries, LONGEST_PAUSE) * (1 - 0.25 * self.chance.random())
            began = time.monotonic()
            try:
                answer = await self.http.post(route, json=body)
            except httpx.TransportError:
                self.failed += 1
            else:
                self.asked, self.answered = began, time.monotonic()
                if answer.status_code == 200:
                    return dict(answer.json())
                if answer.status_code == 408:  # a poll that goes on
                    tries = 0
                    continue
                assert answer.status_code == 503, answer.text
                pause = float(answer.headers.get("retry-after", pause))
            tries += 1
            await asyncio.sleep(pause)


@asynccontextmanager
async def _clients(service: Service, count: int) -> AsyncIterator[list[Client]]:
    limits = httpx.Limits(max_connections=None)
    options: dict[str, Any] = {"headers": {"X-API-Key": service.key}, "timeout": 60, "limits": limits}
    async with httpx.AsyncClient(base_url=f"{service.direct}/api/v1/", **options) as http:
        yield [Client(http, random.Random(number)) for number in range(count)]


async def _storm(service: Service, count: int, outages: list[float], steps: int, bound: float) -> None:
    """Train `steps` before each outage and after it; `bound`: seconds from being ready to the last client's answer."""
    async with _clients(service, count + 1) as (alone, *crowd):
        await alone.begin()
        await alone.train(steps * (len(outages) + 1))
        expected = service.saved(await alone.save())
        await asyncio.gather(*(each.begin() for each in crowd))
        pace = Pace(0)
        everything = asyncio.gather(*(each.train(alone.steps, pace) for each in crowd))
        for number, seconds in enumerate(outages, 1):
            pace.allow((number + 1) * steps)
            while sum(each.steps for each in crowd) < number * steps * count:
                assert not everything.done() or not everything.exception()
                await asyncio.sleep(0.01)
            service.take_down()
            before = [each.failed for each in crowd]
            await asyncio.sleep(seconds)
            tried = sum(each.failed for each in crowd) - sum(before)
            assert tried >= count / 4, "some are at their last step, or in a long pause, but the crowd has tried"
            await _served_again(service, crowd, pace.steps, seconds, bound)
        await everything
        saved = await asyncio.gather(*(each.save() for each in crowd))
        assert all(service.saved(path) == expected for path in saved)
        for each in crowd:
            assert service.outcomes(each.model) == service.outcomes(alone.model)
            assert service.tokens(each.session) == service.tokens(alone.session) != []
        assert service.rows("SELECT COUNT(*) FROM checkpoints") == [(count + 1,)]
        assert service.rows("SELECT COUNT(*) FROM runs") == [(count + 1,)]


async def _served_again(service: Service, crowd: list[Client], steps: int, seconds: float, bound: float) -> None:
    """Bring the server up, and wait until every client has got on: has the outcome of what it asked for."""
    before = {each.model: each.done for each in crowd}
    start = await asyncio.to_thread(service.bring_up)
    asked: dict[str, float] = {}
    while waiting := [each for each in crowd if each.done == before[each.model] and each.steps < steps]:
        assert time.monotonic() - start.ready < bound, f"{len(waiting)} are not served after {bound} s"
        asked |= {each.model: each.asked for each in crowd if each.model not in asked and each.asked > start.spawned}
        await asyncio.sleep(0.02)
    logger.info(
        "%d clients, server away for %.1f s; after %.1f s it listened, after %.1f s it answered, after %.1f s the base "
        "model was loaded; after %.1f s the last client had been heard, after %.1f s all had got on",
        len(crowd),
        seconds,
        *(moment - start.spawned for moment in (start.listening, start.answering, start.ready)),
        max(asked.values(), default=start.ready) - start.spawned,
        time.monotonic() - start.spawned,
    )


@pytest.mark.slow
async def test_a_dozen_clients_come_through_an_outage(tmp_path: Path, base: Path) -> None:
    with serving(tmp_path, base) as service:
        await _storm(service, 12, [1.5], 2, LONGEST_PAUSE + 50)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
async def test_a_hundred_clients_come_through_outages_short_and_long(tmp_path: Path, base: Path) -> None:
    with serving(tmp_path, base) as service:
        await _storm(service, 100, [2.0, 20.0, 1.0], 3, LONGEST_PAUSE + 110)
