"""One poll for all samples of a client: order, cursor, waking, what survives, what is dropped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from app.routes import sessions
from app.settings import Settings
from tests.app.conftest import MODEL
from tests.support.api import Api, serving

BILLION = 10**9
SHORT = {"max_tokens": 2, "seed": 1, "stop": []}
LONG = {"max_tokens": 250, "seed": 1, "stop": []}


@pytest.fixture
async def patient(tiny_settings: Callable[..., Settings]) -> AsyncIterator[Api]:
    """An application that holds a poll as long as it can be."""
    async with serving(tiny_settings(poll_hold=40.0)) as api:
        yield api


async def _sampler(api: Api) -> str:
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0, "base_model": MODEL}
    return str((await api.post("create_sampling_session", **body)).json()["sampling_session_id"])


async def _sample(api: Api, sampler: str, seq_id: int, params: dict[str, Any] | None = None, **more: Any) -> str:
    body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": [5, 6], "sampling_params": params or SHORT}
    return await api.submit("asample", **{**body, **more})


async def _poll(api: Api, sampler: str, cursor: int = 0, clone: int = 0, **more: Any) -> tuple[list[Any], int]:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    answer = await api.post("retrieve_futures", target=target, prev_cursor=cursor, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["completions"], answer.json()["cursor"]


async def _all(api: Api, sampler: str, count: int, clone: int = 0) -> tuple[list[Any], int]:
    """Poll until `count` completions have come."""
    found: list[Any] = []
    cursor = 0
    async with asyncio.timeout(60):
        while len(found) < count:
            more, cursor = await _poll(api, sampler, cursor, clone)
            found += more
    return found, cursor


async def test_every_completion_comes_once_with_its_size(api: Api) -> None:
    sampler = await _sampler(api)
    promises = [await _sample(api, sampler, number) for number in range(12)]
    found, cursor = await _all(api, sampler, 12)
    assert sorted(each["request_id"] for each in found) == sorted(promises)
    for each in found:
        assert each["state"] == "finished"
        answer = await api.client.post(
            "retrieve_future",
            json={"request_id": each["request_id"], "allow_metadata_only": False},
            headers={"Accept": "application/x-protobuf"},
        )
        assert len(answer.content) == each["response_payload_uncompressed_size"]
    assert await _poll(api, sampler, cursor, timeout=0) == ([], cursor)
    again, _ = await _poll(api, sampler, cursor=0)
    assert again == found, "an answer that got lost can be had again"


async def test_a_poll_waits_and_is_woken_and_others_of_the_session_do_not_end_it(patient: Api) -> None:
    api = patient
    sampler = await _sampler(api)
    first = asyncio.create_task(_poll(api, sampler))
    clone = asyncio.create_task(_poll(api, sampler, clone=7))
    await asyncio.sleep(0.2)
    assert not first.done()
    promise = await _sample(api, sampler, 0)
    began = time.monotonic()
    found, _ = await first
    assert [each["request_id"] for each in found] == [promise]
    assert time.monotonic() - began < 30, "woken, not timed out: a poll is held for 40 seconds"
    await asyncio.sleep(0.2)
    assert not clone.done()
    await _sample(api, sampler, 7 * BILLION)
    assert len((await clone)[0]) == 1
    assert api.edge.app.state.services.completions._waiters.empty


async def test_a_timeout_of_the_client_is_kept(api: Api) -> None:
    sampler = await _sampler(api)
    for timeout, least in ((0, 0.0), (0.3, 0.3)):
        began = time.monotonic()
        assert await _poll(api, sampler, timeout=timeout) == ([], 0)
        assert least <= time.monotonic() - began < least + 2


async def test_failures_are_listed_and_fetched_like_results(api: Api) -> None:
    sampler = await _sampler(api)
    promise = await _sample(api, sampler, 0, LONG, num_samples=8)
    assert (await api.post("cancel_future", request_id=promise)).status_code == 204
    found, _ = await _all(api, sampler, 1)
    assert found == [{"state": "failed", "request_id": promise}]
    failure = await api.result(promise)
    assert (failure["code"], failure["category"], failure["error"]) == ("cancelled", "user", "the sample was cancelled")


async def test_what_a_client_has_is_dropped_and_what_others_have_is_not(api: Api) -> None:
    sampler = await _sampler(api)
    mine, other = await _sample(api, sampler, 0), await _sample(api, sampler, BILLION)
    large = await _sample(api, sampler, 1, {"max_tokens": 1}, topk_prompt_logprobs=100, prompt=[5] * 200)
    await _all(api, sampler, 2)
    await _all(api, sampler, 1, clone=1)
    assert any((api.edge.settings.data_dir / "bodies").iterdir())
    _, cursor = await _poll(api, sampler, timeout=0, retrieved_request_ids=[mine, other, large, "unknown"])
    assert not any((api.edge.settings.data_dir / "bodies").iterdir())
    for promise, status in ((mine, 410), (large, 410), (other, 200)):
        assert (await api.post("retrieve_future", request_id=promise)).status_code == status
    assert await _sample(api, sampler, 0) == mine, "a late repeat is still recognised"
    assert (await _poll(api, sampler, cursor, timeout=0))[0] == []


async def test_nothing_is_lost_in_a_restart(tiny_settings: Callable[..., Settings]) -> None:
    settings = tiny_settings()
    async with serving(settings) as api:
        sampler = await _sampler(api)
        done = await _sample(api, sampler, 0)
        _, cursor = await _all(api, sampler, 1)
        seen_late = await _sample(api, sampler, 1)
        await api.result(seen_late)
        cut = await _sample(api, sampler, 2, LONG)
        api.edge.app.state.services.operations.settling.settle = _nothing  # the process is gone before it could end
    async with serving(settings) as api:
        found, last = [], cursor
        async with asyncio.timeout(60):
            while len(found) < 2:
                more, last = await _poll(api, sampler, last)
                found += [each["request_id"] for each in more]
        assert found == [seen_late, cut]
        assert last > cursor
        assert [each["request_id"] for each in (await _all(api, sampler, 3))[0]] == [done, seen_late, cut]


async def test_polls_end_when_the_server_stops(api: Api) -> None:
    sampler = await _sampler(api)
    poll = asyncio.create_task(_poll(api, sampler))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    api.edge.app.state.services.completions.close()
    assert await poll == ([], 0)
    assert await _poll(api, sampler) == ([], 0)
    assert time.monotonic() - began < 2


async def test_strangers_get_404_and_malformed_bodies_400(api: Api) -> None:
    sampler = await _sampler(api)
    target = {"type": "sampling_session", "sampling_session_id": sampler}
    other = await api.other()
    assert (await other.post("retrieve_futures", target=target)).status_code == 404
    unknown = {**target, "sampling_session_id": "nobody:sample:0"}
    assert (await api.post("retrieve_futures", target=unknown)).status_code == 404
    for wrong in (
        {},
        {"target": {**target, "type": "model"}},
        {"target": {**target, "cloned_sampler_id": -1}},
        {"target": {**target, "cloned_sampler_id": 2**63}},
        {"target": target, "prev_cursor": -1},
        {"target": target, "prev_cursor": 2**63},
        {"target": target, "timeout": -1},
        {"target": target, "retrieved_request_ids": "x"},
        {"target": target, "more": 1},
    ):
        assert (await api.post("retrieve_futures", **wrong)).status_code == 400, wrong


async def test_a_cancelled_sample_stops_within_a_slice_and_others_go_on(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = await _sampler(api)
    group = api.groups.made[0]
    cancelled = await _sample(api, sampler, 0, {"max_tokens": 250, "stop": []}, num_samples=4)
    kept = await _sample(api, sampler, 1, {"max_tokens": 250, "stop": []})
    async with asyncio.timeout(20):
        while group.worker.rollout.load.active < 2:  # noqa: ASYNC110 (the worker is asked later)
            await asyncio.sleep(0.001)
    cancel, turns = group.worker.rollout.cancel, list[int]()

    def noted(request_id: str) -> None:
        turns.append(group.calls[at:].count("sample_turn"))
        cancel(request_id)

    monkeypatch.setattr(group.worker.rollout, "cancel", noted)
    at = len(group.calls)
    assert (await api.post("cancel_future", request_id=cancelled)).status_code == 204
    accepted = group.calls[at:].count("sample_turn")
    async with asyncio.timeout(20):
        while not turns:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert turns[0] <= accepted + 1, "the turn after the one that was running drops it"
    assert (await api.result(cancelled))["code"] == "cancelled"
    assert len((await api.result(kept))["sequences"][0]["tokens"]) == 250
    assert (await api.post("cancel_future", request_id=kept)).status_code == 204
    assert "sequences" in await api.result(kept), "one that is finished stays as it is"


async def test_a_lone_sample_that_is_cancelled_leaves_the_worker_idle(api: Api) -> None:
    sampler = await _sampler(api)
    group = api.groups.made[0]
    promise = await _sample(api, sampler, 0, LONG, num_samples=8)
    async with asyncio.timeout(20):
        while "sample_turn" not in group.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await api.post("cancel_future", request_id=promise)
    async with asyncio.timeout(20):
        while group.worker.rollout.load.active:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    calls = len(group.calls)
    await asyncio.sleep(0.1)
    assert len(group.calls) == calls
    assert group.calls.count("sample_turn") < 250 / 8


@pytest.mark.parametrize("on", [True, False])
async def test_flags_are_settings(tiny_settings: Callable[..., Settings], on: bool) -> None:
    flags = {
        "sample_use_retrieve_futures": on,
        "sample_join_sampling_session": on,
        "sample_cancel_enabled": on,
    }
    async with serving(tiny_settings(**flags), ready=False) as api:
        told = {**(await api.post("client/config")).json(), **(await api.post("client/dynamic_config")).json()}
        assert {name: told[name] for name in flags} == flags


async def _nothing(*_: object) -> None:
    """In place of writing an outcome."""


async def test_the_end_of_a_session_waits_for_the_last_poll(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK cancels its poll when the session has ended, and must not do so just as the answer comes."""
    assert sessions.SECONDS_FOR_LAST_POLLS > 0
    monkeypatch.setattr(sessions, "SECONDS_FOR_LAST_POLLS", 2.0)  # more than a busy machine needs for a poll
    session = await api.session()
    opened = await api.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
    sampler = str(opened.json()["sampling_session_id"])
    done = await _sample(api, sampler, 0)
    _, cursor = await _all(api, sampler, 1)
    ending = asyncio.create_task(api.client.post(f"sessions/{session}/finish", json={}))
    last, _ = await _poll(api, sampler, cursor, timeout=0, retrieved_request_ids=[done])
    assert last == []
    assert not ending.done(), "the session ended before the last poll was answered"
    assert (await ending).status_code == 200
