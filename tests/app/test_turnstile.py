"""Turns: who is let in next, and that none is lost."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.fair_requests import ABREAST, ABREAST_APART, FairRequests
from app.principal import Principal
from app.services.turnstile import Turnstile, aside, current_place, note_place


class Visitors:
    """Those who want in, by names such as `a1`: the first letter is the project. `entered` is their order."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.turnstile = turnstile
        self.entered: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.leave: dict[str, asyncio.Event] = {}

    async def come(self, *names: str) -> None:
        for name in names:
            self.leave[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._visit(name))
            await _settle()

    async def go(self, *names: str) -> None:
        for name in names:
            self.leave[name].set()
            await _settle()

    async def _visit(self, name: str) -> None:
        async with self.turnstile.turn(name[0]):
            self.entered.append(name)
            await self.leave[name].wait()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_whoever_is_alone_fills_it() -> None:
    visitors = Visitors(Turnstile(3))
    await visitors.come("a1", "a2", "a3", "a4")
    assert visitors.entered == ["a1", "a2", "a3"]
    await visitors.go("a2")
    assert visitors.entered == ["a1", "a2", "a3", "a4"]


async def test_the_project_with_the_fewest_inside_is_next() -> None:
    visitors = Visitors(Turnstile(3))
    await visitors.come("a1", "a2", "a3", "a4", "a5", "b1", "b2", "c1")
    await visitors.go("a1", "a2")
    assert visitors.entered[3:] == ["b1", "c1"]
    await visitors.go("a3")
    assert visitors.entered[5:] == ["a4"]  # a has nobody inside any more, b and c one each


async def test_of_equals_the_one_is_next_whose_last_turn_is_longest_ago() -> None:
    visitors = Visitors(Turnstile(1))
    await visitors.come("a1", "a2", "a3", "b1", "b2", "c1")
    for name in ("a1", "b1", "c1", "a2", "b2"):
        await visitors.go(name)
    assert visitors.entered == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_one_that_stays_is_not_passed_by_those_that_come_and_go() -> None:
    visitors = Visitors(Turnstile(1))
    await visitors.come("a1", "b1", "b2", "c1")
    await visitors.go("a1", "b1")  # b has had a turn and waits for another
    assert visitors.entered == ["a1", "b1", "c1"]
    await visitors.come("d1")
    await visitors.go("c1")
    await visitors.come("c2")
    await visitors.go("b2")
    await visitors.come("a2")
    await visitors.go("d1", "c2")
    assert visitors.entered == ["a1", "b1", "c1", "b2", "d1", "c2", "a2"]


async def test_who_gives_up_takes_nobodys_turn() -> None:
    visitors = Visitors(Turnstile(1))
    await visitors.come("a1", "b1", "b2", "c1")
    visitors.tasks["b1"].cancel()
    await _settle()
    await visitors.go("a1")
    assert visitors.entered == ["a1", "b2"]
    visitors.leave["b2"].set()
    await asyncio.sleep(0)  # b2 leaves, and c1 is let in
    visitors.tasks["c1"].cancel()  # before it knows
    await _settle()
    await visitors.come("d1")
    assert visitors.entered == ["a1", "b2", "d1"]


async def test_who_waits_for_something_else_lets_others_by() -> None:
    turnstile = Turnstile(1)
    visitors = Visitors(turnstile)
    place = turnstile.place("a")
    await place.enter()
    await visitors.come("b1")
    happens: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    note_place(place)
    assert current_place() is place
    waiting = asyncio.create_task(aside(happens))
    await _settle()
    assert visitors.entered == ["b1"]
    happens.set_result("it")
    await _settle()
    assert not waiting.done()  # it wants its turn back
    await visitors.go("b1")
    assert await waiting == "it"
    assert place.leave()
    assert not place.leave()


async def test_a_turn_that_lasts_too_long_counts_no_more() -> None:
    turnstile = Turnstile(1, patience=0.01)
    slow = turnstile.place("a")
    await slow.enter()
    await asyncio.wait_for(turnstile.place("b").enter(), 5)
    assert not slow.leave()
    visitors = Visitors(Turnstile(1))  # without patience it counts until it leaves
    await visitors.come("a1", "b1")
    await asyncio.sleep(0.02)
    assert visitors.entered == ["a1"]


async def test_nothing_is_kept_of_those_who_are_gone() -> None:
    turnstile = Turnstile(2)
    visitors = Visitors(turnstile)
    names = [f"{project}{number}" for project in "abcdef" for number in range(5)]
    await visitors.come(*names)
    for name in names:
        if name.endswith("3"):
            visitors.tasks[name].cancel()
        visitors.leave[name].set()
    done = await asyncio.gather(*visitors.tasks.values(), return_exceptions=True)
    assert sum(isinstance(one, asyncio.CancelledError) for one in done) == 6
    assert sorted(visitors.entered) == [name for name in names if not name.endswith("3")]
    kept = [turnstile._waiting, turnstile._inside, turnstile._last, turnstile._total]
    assert not any(kept)


@pytest.mark.parametrize("fails", [ValueError, asyncio.CancelledError])
async def test_a_failure_inside_ends_the_turn(fails: type[BaseException]) -> None:
    turnstile = Turnstile(1)
    with pytest.raises(fails):
        async with turnstile.turn("a"):
            raise fails
    await asyncio.wait_for(turnstile.place("b").enter(), 5)


async def test_heartbeats_take_turns_with_heartbeats_only() -> None:
    entered: Counter[str] = Counter()
    over = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        entered[scope["path"]] += 1
        await over.wait()

    async def nothing() -> Message:
        return {"type": "http.request"}

    async def ignored(message: Message) -> None:
        """Nobody reads the answers."""

    def ask(path: str) -> asyncio.Task[None]:
        principal = Principal(project_id="a", key_id="k", role="member", permissions=frozenset())
        scope = {"type": "http", "path": path, "state": {"principal": principal}}
        return asyncio.create_task(fair(scope, nothing, ignored))

    fair = FairRequests(app)
    beat, other = "/api/v1/session_heartbeat", "/api/v1/limits"
    asked = [ask(path) for path in (*[other] * (ABREAST + 5), *[beat] * (ABREAST_APART + 5))]
    await _settle()
    assert entered == {other: ABREAST, beat: ABREAST_APART}
    over.set()
    await asyncio.gather(*asked)
    assert entered.total() == len(asked)
