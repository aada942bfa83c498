"""Floods of requests get their neighbours no more than their share: no project under half of an even one, nor one that
waits for each answer before it asks again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select

from app.fair_requests import ABREAST
from app.settings import Settings
from schemas.errors import TinsmithError
from schemas.operations import DatumRange, TrainResult
from store.tables import Operation
from tests.app.conftest import Edge, running
from tests.app.test_limits import Engine, tenant, toy_edge
from tests.support.inline_group import InlineWorkerGroup
from tests.support.toy_worker import INFO, ToySampler
from workers.tinker import TinkerActorRolloutRefWorker

PROJECTS = 8
PROMISE = 0.5
TURN = 64
"""Tokens of a turn: fewer than one batch of each project."""
SHORT_TURN = 12
"""Fewer than one batch of two projects, so that a project that has one batch at a time needs no more than its share."""
DATUMS, DRAWN = 6, 20
FLOOD = 40
"""Requests of each neighbour that arrive at once."""
STEPS = 4


class Halting(Engine):
    """Stops when a batch of one model has ended: nothing is computed until its client has asked again."""

    model = ""

    def compute(self, ranges: Sequence[DatumRange]) -> Mapping[str, TrainResult | TinsmithError]:
        self.gate.wait(60)
        asked = {name for name, batch in self._operations.items() if batch.adapter_id == self.model}
        ended = super().compute(ranges)
        if asked & set(ended):
            self.gate.clear()
        return ended


def _edge(settings: Settings, engine: Engine, turn: int) -> Any:
    """The application on a worker whose turns have so many tokens."""
    info = replace(INFO, micro_batch_tokens=turn)

    def group(name: str, source: str | None) -> InlineWorkerGroup:
        return InlineWorkerGroup(lambda progress: TinkerActorRolloutRefWorker(engine, ToySampler(), info))

    return running(settings, group)


async def test_no_project_gets_less_than_half_of_an_even_share(make_settings: Callable[..., Settings]) -> None:
    """The modest project asks for a third of what each neighbour asks for, and last, before anything runs."""
    engine = Engine()
    async with _edge(make_settings(poll_hold=5.0, max_sample_rows=2), engine, TURN) as edge:
        tenants = [await tenant(edge, f"project {number}") for number in range(PROJECTS)]
        runs = [[await one.model() for _ in range(1 if number == 0 else 2)] for number, one in enumerate(tenants)]
        engine.gate.clear()
        for number, (one, models) in enumerate(reversed(list(zip(tenants, runs, strict=True)))):
            modest = number == PROJECTS - 1
            for model in models:
                for _ in range(3 if modest else 5):
                    assert (await one.train(model, datums=DATUMS)).status_code == 200
            for _ in range(2 if modest else 6):
                assert (await one.sample(tokens=DRAWN)).status_code == 200
        engine.gate.set()
        for kind, each in (("forward_backward", 10), ("sample", 6)):
            expected = (3 if kind == "forward_backward" else 2) + (PROJECTS - 1) * each
            done = await _settled(edge, kind, expected)
            modest = tenants[0].project_id
            shares = _shares(done[: _last(done, modest) + 1], PROJECTS)
            assert shares[modest] >= PROMISE, (kind, "while the modest project had work", shares)
            greedy = [project_id for project_id in done if project_id != modest]
            first = min(_last(greedy, project_id) for project_id in set(greedy))
            shares = _shares(greedy[: first + 1], PROJECTS - 1)
            assert min(shares.values()) >= PROMISE, (kind, "while all neighbours had work", shares)


async def test_one_request_among_floods_is_not_behind_them(make_settings: Callable[..., Settings]) -> None:
    """It arrives last, and is accepted when those that were being handled are done and each neighbour has had one more
    turn. Half of an even share would be twice as many of theirs."""
    most = ABREAST + 2 * PROJECTS
    async with toy_edge(make_settings(poll_hold=5.0), Engine()) as edge:
        modest, *neighbours = [await tenant(edge, f"project {number}") for number in range(PROJECTS)]
        flood = [asyncio.create_task(one.sample(tokens=1)) for _ in range(FLOOD) for one in neighbours]
        arriving = asyncio.create_task(modest.sample(tokens=1))  # behind all of them
        answers = [await each for each in flood]
        mine = await arriving
        assert {each.status_code for each in (mine, *answers)} == {200}
        accepted = await _projects(edge, Operation.kind == "sample", Operation.created_at)
        assert len(accepted) == 1 + FLOOD * len(neighbours)
        assert accepted.index(modest.project_id) <= most


async def test_who_waits_for_each_answer_gets_half_of_an_even_share(make_settings: Callable[..., Settings]) -> None:
    """The neighbours have more batches in line than are computed here; the modest project has one at a time. Nothing is
    computed while it asks, so what it waits for is turns."""
    engine = Halting()
    async with _edge(make_settings(poll_hold=5.0), engine, SHORT_TURN) as edge:
        modest, *neighbours = [await tenant(edge, f"project {number}") for number in range(PROJECTS)]
        mine, theirs = await modest.model(), [(one, [await one.model() for _ in range(2)]) for one in neighbours]
        engine.gate.clear()
        for one, models in theirs:
            for model in models:
                for _ in range(2 * STEPS):
                    assert (await one.train(model, datums=DATUMS)).status_code == 200
        engine.model = mine
        for _ in range(STEPS):
            answer = await modest.train(mine, datums=DATUMS)
            engine.gate.set()
            await modest.outcome(answer)
        engine.gate.set()
        done = await _settled(edge, "forward_backward", STEPS + 4 * STEPS * len(neighbours))
        while_it_worked = done[: _last(done, modest.project_id) + 1]
        assert _shares(while_it_worked, PROJECTS)[modest.project_id] >= PROMISE, while_it_worked


async def _settled(edge: Edge, kind: str, expected: int) -> list[str]:
    """Whose operations of one kind ended, in the order in which they did."""

    done = (Operation.kind == kind) & (Operation.state == "done")
    async with asyncio.timeout(60):
        while len(found := await _projects(edge, done, Operation.finished_at)) < expected:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return found


async def _projects(edge: Edge, which: Any, order: Any) -> list[str]:
    """Whose operations these are."""

    async def read(db: Any) -> list[str]:
        return list(await db.scalars(select(Operation.project_id).where(which).order_by(order)))

    found: list[str] = await edge.app.state.store.read(read)
    return found


def _last(done: list[str], project_id: str) -> int:
    return max(place for place, name in enumerate(done) if name == project_id)


def _shares(done: list[str], projects: int) -> dict[str, float]:
    """What each project got, in even shares: all operations of one kind are of one size."""
    even = len(done) / projects
    return {project_id: count / even for project_id, count in Counter(done).items()}
