"""A crowd of plain HTTP clients, none of which ever waits longer than the SDK would, nor takes any other answer.

Every client has connections of its own and is in a closed loop: the next request leaves when the one before it is
answered. What is random is seeded, so that each kind of client has numbers to be compared with.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.fault.harness import MODEL

KINDS = 6
"""Of training clients: those of one kind send the same, and must get the same."""
DRAWS = 12
"""Different samples, each of which has one right answer for the same weights."""
LENGTH = 16
"""Tokens of a datum."""
PROMPT, DRAWN = 8, 12
RATE = 1e-2
_SECONDS = {"retrieve_future": 45.0, "session_heartbeat": 10.0}
"""How long the SDK waits for an answer, by route; for others:"""
_USUAL, _CONNECT = 60.0, 5.0
_TLS = ssl.create_default_context()
"""Shared: making one takes longer than a request."""


@dataclass
class Project:
    """What the clients of one project saw: tokens of what was answered, and the seconds of the longest answers."""

    name: str
    key: str
    training: int = 0
    sampling: int = 0
    refused: int = 0
    """Samples that were told to come again later, each time."""
    accepted: int = 0
    """Samples that are accepted and have no result yet."""
    slowest: dict[str, float] = field(default_factory=dict)
    sessions: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)
    drawn: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(place in `samplers`, number of the sample) -> its tokens, the same each time."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def next_sample(self) -> int:
        """A `seq_id` that no sample of the project has had."""
        return next(self._numbers)


class Client:
    """One client's connections, and its requests.

    Raises:
        httpx.TransportError: of any request: a timeout, a connection that is refused or cut.
        AssertionError: for an answer that is neither a result, "not yet" nor "later", each in its form.
    """

    def __init__(self, url: str, project: Project) -> None:
        limits = httpx.Limits(max_connections=4, keepalive_expiry=60)
        self._http = httpx.AsyncClient(
            base_url=f"{url}/api/v1/",
            headers={"X-API-Key": project.key},
            transport=httpx.AsyncHTTPTransport(verify=_TLS, limits=limits),
            trust_env=False,
        )
        self.project = project

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def post(self, route: str, **body: Any) -> dict[str, Any]:
        """The JSON of a success. A sample that is to come later is sent again, as often as it takes."""
        while True:
            answer = await self._send(route, body)
            if answer.status_code in (200, 204):
                return dict(answer.json()) if answer.content else {}
            assert (route, answer.status_code) == ("asample", 429), f"{route}: {answer.status_code} {answer.text}"
            assert answer.json()["error"]["code"] == "too_many_requests", answer.text
            self.project.refused += 1
            await asyncio.sleep(float(answer.headers["retry-after"]))

    async def result(self, request_id: str) -> dict[str, Any]:
        """Poll until there is one."""
        while True:
            answer = await self._send("retrieve_future", {"request_id": request_id})
            found: dict[str, Any] = answer.json()
            if answer.status_code == 200:
                assert "error" not in found, found
                return found
            assert answer.status_code == 408, f"{answer.status_code} {answer.text}"
            assert found["type"] == "try_again", found
            assert found["queue_state"] == "active", found
            assert found["queue_state_reason"], found

    async def do(self, route: str, **body: Any) -> dict[str, Any]:
        """The result of an operation."""
        return await self.result((await self.post(route, **body))["request_id"])

    async def _send(self, route: str, body: dict[str, Any]) -> httpx.Response:
        began = time.monotonic()
        timeout = httpx.Timeout(_SECONDS.get(route, _USUAL), connect=_CONNECT)
        answer = await self._http.post(route, json=body, timeout=timeout)
        slowest = self.project.slowest
        slowest[route] = max(slowest.get(route, 0.0), time.monotonic() - began)
        return answer


@dataclass
class Trainer:
    """An adapter of its own, trained step by step; `losses` has one for each step."""

    client: Client
    kind: int
    model: str = ""
    losses: list[float] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def begin(self, session: str, number: int) -> None:
        """The adapter: `number` of its session."""
        body = {"session_id": session, "model_seq_id": number, "base_model": MODEL}
        made = await self.client.do("create_model", **body, lora_config={"rank": 2, "seed": self.kind})
        self.model = made["model_id"]

    async def step(self) -> None:
        """A batch and a step, both sent before either is waited for."""
        batch = await self._send("forward_backward", data=[datum(self.kind)], loss_fn="cross_entropy")
        step = await self._send("optim_step", adam_params={"learning_rate": RATE})
        self.losses.append((await self.client.result(batch))["metrics"]["loss:sum"])
        self.client.project.training += LENGTH
        await self.client.result(step)

    async def save(self) -> str:
        """The path of a checkpoint."""
        return str((await self.client.result(await self._send("save_weights", path="end")))["path"])

    async def save_for_sampler(self, name: str) -> str:
        """The path of a checkpoint that can be sampled."""
        return str((await self.client.result(await self._send("save_weights_for_sampler", path=name)))["path"])

    async def _send(self, route: str, **body: Any) -> str:
        answer = await self.client.post(route, model_id=self.model, seq_id=next(self._numbers), **body)
        return str(answer["request_id"])


def datum(kind: int) -> dict[str, Any]:
    """One of a kind: tokens that each predict the next."""
    tokens = [3 + (kind * 37 + place * place * 11) % 250 for place in range(LENGTH + 1)]
    return {"model_input": tokens[:-1], "loss_fn_inputs": {"target_tokens": tokens[1:], "weights": [1.0] * LENGTH}}


async def draw(client: Client, place: int, number: int) -> list[int]:
    """One sample, with the sampler at this place of the project's. Raises AssertionError if it was another before."""
    project = client.project
    body = {
        "sampling_session_id": project.samplers[place],
        "seq_id": project.next_sample,
        "prompt": [3 + (number * 17 + position) % 250 for position in range(PROMPT)],
        "sampling_params": {"max_tokens": DRAWN, "seed": number, "stop": []},
    }
    request_id = (await client.post("asample", **body))["request_id"]
    project.accepted += 1
    result = await client.result(request_id)
    project.accepted -= 1
    project.sampling += PROMPT + DRAWN
    tokens = list(result["sequences"][0]["tokens"])
    assert len(tokens) == DRAWN
    assert project.drawn.setdefault((place, number), tokens) == tokens
    return tokens


async def open_sampler(client: Client, session: str, number: int, **weights: str) -> None:
    """One more sampler of the project: of a base model or of a checkpoint."""
    body = {"session_id": session, "sampling_session_seq_id": number, **weights}
    client.project.samplers.append((await client.post("create_sampling_session", **body))["sampling_session_id"])


async def open_session(client: Client) -> str:
    """A session, which the project remembers."""
    session = str((await client.post("create_session", sdk_version="test"))["session_id"])
    client.project.sessions.append(session)
    return session


@asynccontextmanager
async def clients(url: str, project: Project, count: int) -> AsyncIterator[list[Client]]:
    """So many clients of a project, closed at the end."""
    made = [Client(url, project) for _ in range(count)]
    try:
        yield made
    finally:
        for each in made:
            await each.close()


def shares(tokens: Sequence[int]) -> list[float]:
    """Of each project, in even shares of what all of them got."""
    return [len(tokens) * one / sum(tokens) for one in tokens]
