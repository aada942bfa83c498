"""A client that keeps its own count of the tokens it sends and receives, to be compared with what the server counts.

It asks for random operations of every kind that uses tokens, some of them twice, some that are refused, fail or are
cancelled. It knows nothing of how the server counts: only what it sent, and what came back. Of a cancelled sample it
knows only the most that it may have taken.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

HUGE = 3e38
Send = Callable[[str, str, dict[str, Any]], Awaitable[httpx.Response]]
"""(method, route, body or query) -> the answer."""


async def send_once(client: httpx.AsyncClient, method: str, route: str, body: dict[str, Any]) -> httpx.Response:
    """A request as it is."""
    given: dict[str, Any] = {"params": body} if method == "GET" else {"json": body}
    return await client.request(method, route, **given)


async def send_until_answered(
    client: httpx.AsyncClient, method: str, route: str, body: dict[str, Any], seconds: float = 300
) -> httpx.Response:
    """A request that is repeated while the server is away, as the SDK does."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                answer = await send_once(client, method, route, body)
            except httpx.TransportError:
                await asyncio.sleep(0.2)
                continue
            if answer.status_code not in (429, 503):
                return answer
            await asyncio.sleep(0.2)


@dataclass
class Ledger:
    """One project's client, and its count."""

    send: Send
    model_name: str
    chance: random.Random
    vocabulary: int
    training: int = 0
    prompts: int = 0
    drawn: int = 0
    cut_prompts: int = 0
    """The most that prompts of cancelled samples may count; `cut_drawn`: that they may have drawn."""
    cut_drawn: int = 0
    waiting: list[Awaitable[None]] = field(default_factory=list)
    session: str = ""
    model: str = ""
    sampler: str = ""
    _seq: int = 0
    _samples: int = 0

    async def post(self, route: str, **body: Any) -> dict[str, Any]:
        """The JSON of an answer that is a success."""
        answer = await self.send("POST", route, body)
        assert answer.status_code in (200, 204), answer.text
        return dict(answer.json()) if answer.content else {}

    async def begin(self) -> None:
        """A session with a model and a sampler of the base model."""
        self.session = (await self.post("create_session", sdk_version="test"))["session_id"]
        lora = {"rank": 4, "seed": self.chance.randrange(1000)}
        created = await self.post(
            "create_model", session_id=self.session, model_seq_id=0, base_model=self.model_name, lora_config=lora
        )
        self.model = (await self.outcome(created["request_id"]))["model_id"]
        opened = await self.post(
            "create_sampling_session", session_id=self.session, sampling_session_seq_id=0, base_model=self.model_name
        )
        self.sampler = opened["sampling_session_id"]

    async def work(self, operations: int, ahead: int = 6) -> None:
        """So many random operations, a few of them on their way at once."""
        kinds = (self._batch, self._batch, self._sample, self._sample, self._step, self._refused, self._hopeless)
        for _ in range(operations):
            await self.chance.choice(kinds)()
            if len(self.waiting) >= ahead:
                await self.settle()
        await self.settle()

    async def settle(self) -> None:
        """Wait for the outcome of all that is on its way."""
        waiting, self.waiting = self.waiting, []
        await asyncio.gather(*waiting)

    async def counted(self) -> dict[str, int]:
        """What the server says that this project used."""
        hour = timedelta(hours=1)
        end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + hour
        window = {"starting_on": (end - 3 * hour).isoformat(), "ending_before": end.isoformat()}
        answer = await self.send("GET", "billing/usage/events", window)
        found = {"training": 0, "prompts": 0, "drawn": 0}
        names = {"training": "training", "sampling_prefill": "prompts", "sampling_sample": "drawn"}
        for row in answer.json()["data"]:
            if (kind := row["event_info"]["type"]) in names:
                found[names[kind]] += row["event_info"]["token_count"]
        return found

    async def budgets(self) -> dict[str, float]:
        """What the server says is used of the budgets, with what is still reserved."""
        answer = await self.send("GET", "limits", {})
        return {item["name"]: item["used"] for item in answer.json()["limits"] if item["name"].endswith("_budget")}

    @property
    def own(self) -> dict[str, int]:
        """The client's own count."""
        return {"training": self.training, "prompts": self.prompts, "drawn": self.drawn}

    def check(self, counted: dict[str, int], budgets: dict[str, float]) -> None:
        """Compare what the server says with the client's own count."""
        cut = {"training": 0, "prompts": self.cut_prompts, "drawn": self.cut_drawn}
        for kind, own in self.own.items():
            assert own <= counted[kind] <= own + cut[kind], (kind, own, counted[kind], cut[kind])
        assert budgets == {
            "training_token_budget": counted["training"],
            "sampling_token_budget": counted["prompts"] + counted["drawn"],
        }

    async def outcome(self, request_id: str) -> dict[str, Any]:
        """Poll until there is one."""
        while True:
            answer = await self.send("POST", "retrieve_future", {"request_id": request_id})
            if answer.status_code != 408:
                assert answer.status_code == 200, answer.text
                return dict(answer.json())

    def _tokens(self, most: int) -> list[int]:
        return [self.chance.randrange(3, self.vocabulary) for _ in range(self.chance.randint(1, most))]

    def _next(self) -> dict[str, Any]:
        self._seq += 1
        return {"model_id": self.model, "seq_id": self._seq}

    def _data(self, weight: float = 1.0) -> list[dict[str, Any]]:
        data = []
        for _ in range(self.chance.randint(1, 4)):
            inputs = self._tokens(12)
            loss = {"target_tokens": inputs[::-1], "weights": [weight] * len(inputs)}
            data.append({"model_input": inputs, "loss_fn_inputs": loss})
        return data

    async def _submit(self, route: str, body: dict[str, Any], settle: Callable[[dict[str, Any]], None]) -> str:
        """Send a request, sometimes more than once, and look at its outcome later, sometimes more than once."""
        again = self.chance.choice((0, 0, 1, 2))
        ids = {(await self.post(route, **body))["request_id"] for _ in range(1 + again)}
        assert len(ids) == 1, "a repeat is the same request"
        request_id = str(ids.pop())

        async def wait() -> None:
            outcome = await self.outcome(request_id)
            if again:
                assert await self.outcome(request_id) == outcome
            settle(outcome)

        self.waiting.append(asyncio.ensure_future(wait()))
        return request_id

    async def _batch(self, weight: float = 1.0) -> None:
        data = self._data(weight)
        sent = sum(len(datum["model_input"]) for datum in data)

        def settle(outcome: dict[str, Any]) -> None:
            if "error" not in outcome:
                self.training += sent

        route = self.chance.choice(("forward", "forward_backward"))
        await self._submit(route, {**self._next(), "data": data, "loss_fn": "cross_entropy"}, settle)

    async def _step(self) -> None:
        await self._submit("optim_step", {**self._next(), "adam_params": {"learning_rate": 1e-3}}, lambda _: None)

    async def _refused(self) -> None:
        body = {**self._next(), "data": self._data(), "loss_fn": "no_such_loss"}
        answer = await self.send("POST", "forward_backward", body)
        assert answer.status_code == 400, answer.text

    async def _hopeless(self) -> None:
        """A gradient that is not finite: the step after it fails, and perhaps the batch."""
        await self._batch(HUGE)
        await self._step()

    async def _sample(self) -> None:
        prompt, number = self._tokens(10), self._samples
        self._samples += 1
        stop = self.chance.choice(([], None, [self.chance.randrange(3, self.vocabulary) for _ in range(40)]))
        params = {"max_tokens": self.chance.randint(1, 8), "seed": self.chance.randrange(10_000)}
        rows = self.chance.randint(1, 3)
        body = {
            "sampling_session_id": self.sampler,
            "seq_id": number,
            "prompt": prompt,
            "num_samples": rows,
            "sampling_params": params if stop is None else {**params, "stop": stop},
        }

        def settle(outcome: dict[str, Any]) -> None:
            if "error" not in outcome:
                self.prompts += len(prompt)
                self.drawn += sum(len(sequence["tokens"]) for sequence in outcome["sequences"])
            elif outcome["code"] == "cancelled":
                self.cut_prompts += len(prompt)
                self.cut_drawn += rows * params["max_tokens"]

        request_id = await self._submit("asample", body, settle)
        if self.chance.random() < 0.15:
            await self.send("POST", "cancel_future", {"request_id": request_id})
