"""How many samples of a project may wait, and what becomes of those that nobody waits for any more."""

from __future__ import annotations

import asyncio
import gc
import re
import tracemalloc
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app.settings import Settings
from store.dev_key import DEV_PROJECT
from store.keys import ensure_project
from tests.app.conftest import MODEL, Edge, running
from tests.support.inline_group import InlineWorkerGroup
from tests.support.toy_worker import INFO, ToyEngine, ToySampler
from workers.runtime import ModelRuntime
from workers.sampling_lane import READY_INSIDE
from workers.tinker import TinkerActorRolloutRefWorker

MOST = 5
INSIDE = 1 + READY_INSIDE
LONG = 3000


@pytest.fixture
async def slow(make_settings: Callable[..., Settings]) -> AsyncIterator[Edge]:
    """The application on a sampler that runs one row at a time, 40 ms a step: two minutes for a sample of `LONG`."""

    info = replace(INFO, context_length=2 * LONG)

    def group(name: str, source: str | None) -> InlineWorkerGroup:
        return InlineWorkerGroup(lambda progress: TinkerActorRolloutRefWorker(ToyEngine(), ToySampler(0.04, 1), info))

    settings = make_settings(max_waiting_samples=MOST, max_sample_rows=1, poll_hold=0.2)
    async with running(settings, group) as edge:
        while runtime(edge).state != "ready":  # noqa: ASYNC110 (a test, not the product)
            await asyncio.sleep(0.005)
        yield edge


def runtime(edge: Edge) -> ModelRuntime:
    found: ModelRuntime = edge.app.state.services.models.runtimes[MODEL]
    return found


async def sampler(client: httpx.AsyncClient) -> tuple[str, str]:
    """A session and a sampler of the base model in it."""
    session = (await client.post("create_session", json={"sdk_version": "test"})).json()["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    answer = await client.post("create_sampling_session", json=body)
    assert answer.status_code == 200, answer.text
    return session, answer.json()["sampling_session_id"]


async def submit(client: httpx.AsyncClient, sampler_id: str, seq_id: int, tokens: int = LONG) -> httpx.Response:
    return await client.post(
        "asample",
        json={
            "sampling_session_id": sampler_id,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": tokens},
        },
    )


async def waiting(edge: Edge) -> int:
    """Samples of the development project that wait."""
    project_id = await edge.app.state.store.write(lambda db: ensure_project(db, DEV_PROJECT))
    return runtime(edge).samples_waiting(project_id)


async def fill(edge: Edge, sampler_id: str) -> list[str]:
    """Submit as many as are taken: what the worker takes in, and then `MOST`. Returns their request ids."""
    taken: list[str] = []
    for seq_id in range(INSIDE + MOST):
        answer = await submit(edge.client, sampler_id, seq_id)
        assert answer.status_code == 200, answer.text
        taken.append(answer.json()["request_id"])
        if seq_id < INSIDE:
            async with asyncio.timeout(20):
                while await waiting(edge):  # noqa: ASYNC110 (a test, not the product)
                    await asyncio.sleep(0.002)
    return taken


async def outcome(client: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            answer = await client.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                found: dict[str, Any] = answer.json()
                return found


async def test_a_full_queue_answers_429_and_takes_the_same_request_later(slow: Edge) -> None:
    _, mine = await sampler(slow.client)
    taken = await fill(slow, mine)
    refused = await submit(slow.client, mine, 100)
    assert refused.status_code == 429
    assert float(refused.headers["Retry-After"]) > 0
    error = refused.json()["error"]
    assert error["code"] == "too_many_requests"
    assert f"at most {MOST}" in refused.json()["detail"]
    again = await submit(slow.client, mine, INSIDE + MOST - 1)
    assert again.json()["request_id"] == taken[-1], "what was taken before is answered"
    for request_id in taken:
        assert (await slow.client.post("cancel_future", json={"request_id": request_id})).status_code == 204
    answer = await submit(slow.client, mine, 100, tokens=2)
    assert answer.status_code == 200
    assert "sequences" in await outcome(slow.client, answer.json()["request_id"])


async def test_another_project_is_not_held_up(slow: Edge) -> None:
    _, mine = await sampler(slow.client)
    await fill(slow, mine)
    assert (await submit(slow.client, mine, 100)).status_code == 429
    other = await slow.other_project()
    _, theirs = await sampler(other)
    assert (await submit(other, theirs, 0)).status_code == 200


async def test_a_burst_cannot_pass_the_bound_while_it_is_being_accepted(slow: Edge) -> None:
    _, mine = await sampler(slow.client)
    answers = await asyncio.gather(*(submit(slow.client, mine, seq_id) for seq_id in range(60)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert await waiting(slow) <= MOST
    assert statuses.count(200) <= INSIDE + MOST


async def test_a_poll_says_how_many_are_ahead(slow: Edge) -> None:
    _, mine = await sampler(slow.client)
    taken = await fill(slow, mine)
    answer = await slow.client.post("retrieve_future", json={"request_id": taken[-1]})
    assert answer.status_code == 408
    found = answer.json()
    assert found["queue_state"] == "active"
    assert re.fullmatch(r"[1-4] samples? of this project ahead", found["queue_state_reason"])


async def test_a_session_that_ends_takes_its_samples_along(slow: Edge) -> None:
    session, mine = await sampler(slow.client)
    taken = await fill(slow, mine)
    answer = await slow.client.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})
    assert answer.status_code == 200, answer.text
    for request_id in taken:
        found = await outcome(slow.client, request_id)
        assert found.get("code") == "cancelled" or "sequences" in found
    assert await waiting(slow) == 0
    engine = slow.app.state.services.models.runtimes[MODEL]._group.worker.rollout
    async with asyncio.timeout(20):
        while engine.load.active:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.slow
async def test_thousands_of_waiting_samples_keep_no_prompts_in_memory(make_settings: Callable[..., Settings]) -> None:
    """Prompts of 9 kB each, as they are stored; more while they are read."""
    info = replace(INFO, context_length=10_000)

    def group(name: str, source: str | None) -> InlineWorkerGroup:
        return InlineWorkerGroup(lambda progress: TinkerActorRolloutRefWorker(ToyEngine(), ToySampler(0.1, 1), info))

    async with running(make_settings(max_sample_rows=1), group) as edge:
        _, mine = await sampler(edge.client)
        body = {
            "sampling_session_id": mine,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [11] * 3000}]},
            "sampling_params": {"max_tokens": 900},
        }
        for seq_id in range(20):
            assert (await edge.client.post("asample", json={**body, "seq_id": seq_id})).status_code == 200
        gc.collect()
        tracemalloc.start()
        try:
            for seq_id in range(20, 80):
                assert (await edge.client.post("asample", json={**body, "seq_id": seq_id})).status_code == 200
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert await waiting(edge) >= 60
    assert kept / 60 < 9_000, f"{kept / 60:.0f} bytes for each waiting sample"
