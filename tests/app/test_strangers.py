"""Whoever floods the server without a good key waits for others like him, and nobody else does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.services.turnstile import Turnstile, leave_turn
from app.strangers import ABREAST, Strangers
from tests.app.conftest import Edge

GOOD = "tml-good"


class _Server:
    """An application that holds every request until `over`, behind the line of strangers. `entered` are the names of
    the requests in the order in which they came through; one with `admitted` was found to have a good key then."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.over = asyncio.Event()
        self._strangers = Strangers(self._app)
        state = SimpleNamespace(authenticator=SimpleNamespace(knows=lambda key: key == GOOD))
        self._fixed = {"type": "http", "app": SimpleNamespace(state=state), "state": {}}

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.entered.append(scope["name"])
        if scope["name"].startswith("admitted"):
            leave_turn()
        await self.over.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def ask(self, name: str, address: str = "a", path: str = "/api/v1/limits", key: str = "") -> asyncio.Task[None]:
        async def nothing() -> Message:
            return {"type": "http.request"}

        async def ignored(message: Message) -> None:
            """Nobody reads the answers."""

        headers = [(b"x-api-key", key.encode())] if key else []
        scope = {**self._fixed, "name": name, "path": path, "client": (address, 1), "headers": headers}
        return asyncio.create_task(self._strangers(scope, nothing, ignored))


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_strangers_wait_and_those_with_a_good_key_do_not() -> None:
    server = _Server()
    asked = [server.ask(f"bad{number}", key="tml-bad") for number in range(ABREAST + 5)]
    await _settle()
    assert server.entered == [f"bad{number}" for number in range(ABREAST)]
    asked += [server.ask(f"good{number}", key=GOOD) for number in range(3)]
    asked.append(server.ask("page", path="/openapi.json", key=GOOD))
    await _settle()
    assert server.entered[ABREAST:] == ["good0", "good1", "good2"], "what needs no key is for strangers, key or not"
    server.over.set()
    await asyncio.wait_for(asyncio.gather(*asked), 30)
    assert len(server.entered) == len(asked)


async def test_addresses_take_turns() -> None:
    server = _Server()
    asked = [server.ask(f"a{number}", "1.1.1.1") for number in range(ABREAST + 9)]
    asked.append(server.ask("b", "2.2.2.2"))
    server.over.set()
    await asyncio.wait_for(asyncio.gather(*asked), 30)
    assert server.entered.index("b") == ABREAST, "after those that had entered before it came"


async def test_a_key_that_turns_out_to_be_good_makes_room_at_once() -> None:
    server = _Server()
    asked = [server.ask(f"admitted{number}", key="tml-new") for number in range(ABREAST + 5)]
    await _settle()
    assert len(server.entered) == ABREAST + 5
    server.over.set()
    await asyncio.gather(*asked)


async def test_a_place_rests_after_its_answer() -> None:
    turnstile = Turnstile(1, patience=0.001)
    first, second = turnstile.place("a"), turnstile.place("b")
    await first.enter()
    first.rest(0.2)
    first.rest(0.0)  # an answer has several parts: the first counts
    waiting = asyncio.create_task(second.enter())
    await first.aside(asyncio.sleep(0.01))
    assert not waiting.done(), "neither its patience nor its waiting ends a rest"
    await asyncio.wait_for(waiting, 30)
    second.leave()
    assert turnstile._total == 0


@pytest.mark.parametrize("path", ["/api/v1/limits", "/openapi.json", "/api/v1/healthz"])
async def test_a_flood_without_a_good_key_keeps_nobody_waiting(edge: Edge, path: str) -> None:
    async with edge.without_key() as nobody:
        assert (await edge.client.get("limits")).status_code == 200
        answered: list[str] = []
        address = edge.client.base_url.join(path)

        async def ask(name: str) -> None:
            good = name == "good"
            answer = await (
                edge.client.get("limits") if good else nobody.get(address, headers={"X-API-Key": "tml-bad"})
            )
            assert answer.status_code == (200 if good or path != "/api/v1/limits" else 401)
            answered.append(name)

        async with asyncio.TaskGroup() as tasks:
            for number in range(60):
                tasks.create_task(ask(f"bad{number}"))
            tasks.create_task(ask("good"))
    assert answered.index("good") < 30, answered
