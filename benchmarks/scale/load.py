"""The clients: R training runs of plain HTTP, each with operations on their way, every one of them waited for."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.scale.server import MODEL

DATA = [{"model_input": [5, 6, 7, 8], "loss_fn_inputs": {"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4}}]
SENDING = 64
"""Requests that are being sent at once; polls are held beside them, all at once."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds."""

    median: float
    p95: float
    worst: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        ordered = sorted(1000 * value for value in seconds)
        return cls(statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))], ordered[-1])


@dataclass(slots=True)
class Found:
    """What the clients saw. `waiting` is the number of futures that were polled for at once."""

    runs: int
    waiting: int
    created: float = 0.0
    accepting: float = 0.0
    finishing: float = 0.0
    accepts: list[float] = field(default_factory=list)
    heartbeats: list[float] = field(default_factory=list)
    polls: int = 0


class Clients:
    """All of them, in one event loop."""

    def __init__(self, http: aiohttp.ClientSession, runs: int, ahead: int) -> None:
        self._http = http
        self._found = Found(runs, runs * ahead)
        self._ahead = ahead
        self._sending = asyncio.Semaphore(SENDING)

    async def run(self, before: Callable[[], None], after: Callable[[], None]) -> Found:
        """Make the runs; then send all operations and wait for all of them. `before`, `after`: around the latter."""
        found = self._found
        began = time.monotonic()
        sessions = await self._each(range(max(1, found.runs // 10)), self._session)
        models = await self._each(range(found.runs), lambda number: self._model(sessions, number))
        found.created = time.monotonic() - began
        before()
        heartbeat = asyncio.create_task(self._heartbeats(sessions[0]))
        began = time.monotonic()
        waiting = [asyncio.create_task(self._train(model, number)) for model in models for number in range(self._ahead)]
        accepted = await asyncio.gather(*(asyncio.shield(task) for task in waiting))
        found.accepting = time.monotonic() - began
        await asyncio.gather(*(self._outcome(request_id) for request_id in accepted))
        found.finishing = time.monotonic() - began
        heartbeat.cancel()
        after()
        return found

    async def _each(self, numbers: Sequence[int], work: Callable[[int], Awaitable[str]]) -> list[str]:
        async def one(number: int) -> str:
            async with self._sending:
                return await work(number)

        return list(await asyncio.gather(*(one(number) for number in numbers)))

    async def _session(self, number: int) -> str:
        body = {"sdk_version": "0", "tags": []}
        return str((await self._post("create_session", body))["session_id"])

    async def _model(self, sessions: Sequence[str], number: int) -> str:
        session, place = sessions[number % len(sessions)], number // len(sessions)
        lora = {"rank": 1, "seed": number}
        body = {"session_id": session, "model_seq_id": place, "base_model": MODEL, "lora_config": lora}
        request = await self._post("create_model", body)
        return str((await self._outcome(request["request_id"]))["model_id"])

    async def _train(self, model: str, number: int) -> str:
        """A step is half forward_backward, half optim_step."""
        async with self._sending:
            began = time.monotonic()
            if number % 2 == 0:
                route, body = "forward_backward", {"forward_backward_input": {"data": DATA, "loss_fn": "cross_entropy"}}
            else:
                route, body = "optim_step", {"adam_params": {"learning_rate": 1e-4}}
            answer = await self._post(route, {"model_id": model, "seq_id": number + 1, **body})
            self._found.accepts.append(time.monotonic() - began)
            return str(answer["request_id"])

    async def _outcome(self, request_id: str) -> dict[str, Any]:
        while True:
            self._found.polls += 1
            async with self._http.post("retrieve_future", json={"request_id": request_id}) as answer:
                if answer.status == 408:
                    continue
                answer.raise_for_status()
                outcome: dict[str, Any] = await answer.json()
            if "error" in outcome:
                raise RuntimeError(f"an operation failed: {outcome['error']}")
            return outcome

    async def _heartbeats(self, session: str) -> None:
        while True:
            began = time.monotonic()
            await self._post("session_heartbeat", {"session_id": session})
            self._found.heartbeats.append(time.monotonic() - began)
            await asyncio.sleep(0.1)

    async def _post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http.post(route, json=body) as answer:
            answer.raise_for_status()
            found: dict[str, Any] = await answer.json()
            return found


async def load(
    url: str, key: str, runs: int, ahead: int, before: Callable[[], None], after: Callable[[], None]
) -> Found:
    """Put the load on the server at `url`."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    headers = {"X-API-Key": key}
    async with aiohttp.ClientSession(f"{url}/api/v1/", connector=connector, timeout=timeout, headers=headers) as http:
        return await Clients(http, runs, ahead).run(before, after)
