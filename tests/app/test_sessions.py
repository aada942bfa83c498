"""Sessions: begun once, kept alive without the writer, ended for the first reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from app.presence import TRUST_SECONDS, Presence
from app.settings import Settings
from schemas.errors import Gone, NotFound
from store.sessions import expire_session, get_session
from tests.app.conftest import Edge, running

SUCCESS = {"reason": {"type": "success"}, "detail": None}


async def test_what_the_sdk_sends_makes_a_session(edge: Edge) -> None:
    body = {
        "tags": ["a", "b"],
        "user_metadata": {"k": "v"},
        "sdk_version": "0.38.0",
        "display_name": "run 1",
        "type": "create_session",
    }
    answer = await edge.client.post("create_session", json=body)
    assert answer.status_code == 200, answer.text
    session_id = answer.json()["session_id"]
    assert len(session_id) >= 32
    assert "/" not in session_id
    shown = (await edge.client.get(f"sessions/{session_id}")).json()
    assert shown == {
        "training_run_ids": [],
        "sampler_ids": [],
        "user_metadata": {"k": "v"},
        "display_name": "run 1",
    }


async def test_the_same_idempotency_key_gives_the_same_session_of_the_same_project(edge: Edge) -> None:
    headers = {"X-Idempotency-Key": "stainless-python-retry-1"}
    first = (await edge.client.post("create_session", json={}, headers=headers)).json()
    again = (await edge.client.post("create_session", json={}, headers=headers)).json()
    assert first == again
    stranger = await edge.other_project()
    other = (await stranger.post("create_session", json={}, headers=headers)).json()
    assert other["session_id"] != first["session_id"]
    assert await edge.new_session() != await edge.new_session()
    for body in ({"tags": ["x"]}, {"display_name": "x"}, {"user_metadata": {"a": "b"}}, {"sdk_version": "1"}):
        reused = await edge.client.post("create_session", json=body, headers=headers)
        assert (reused.status_code, reused.json()["error"]["code"]) == (400, "seq_id_conflict"), body
        assert reused.json()["error"]["field"] == "X-Idempotency-Key"
    too_long = await edge.client.post("create_session", json={}, headers={"X-Idempotency-Key": "k" * 257})
    assert too_long.status_code == 400


async def test_another_project_is_refused(edge: Edge) -> None:
    answer = await edge.client.post("create_session", json={"project_id": "somebody-elses"})
    assert (answer.status_code, answer.json()["error"]["field"]) == (404, "project_id")


async def test_heartbeats_of_a_life(edge: Edge) -> None:
    session_id = await edge.new_session()
    body = {"session_id": session_id, "type": "session_heartbeat"}
    assert (await edge.client.post("session_heartbeat", json=body)).json() == {"type": "session_heartbeat"}
    assert (await edge.client.post("session_heartbeat", json={"session_id": "nobody"})).status_code == 404
    assert (await edge.client.post(f"sessions/{session_id}/finish", json=SUCCESS)).status_code == 200
    ended = await edge.client.post("session_heartbeat", json=body)
    assert ended.status_code == 410
    assert ended.json()["error"]["code"] == "session_ended"


async def test_the_first_reason_wins_and_repeats_are_200(edge: Edge) -> None:
    session_id = await edge.new_session()
    for reason in ("errored", "success", "interrupted"):
        body = {"reason": {"type": reason}, "detail": f"was {reason}"}
        assert (await edge.client.post(f"sessions/{session_id}/finish", json=body)).status_code == 200
    store = edge.app.state.store
    project_id = (await edge.app.state.authenticator.principal(edge.app.state.dev_key)).project_id
    record = await store.read(lambda db: get_session(db, project_id, session_id))
    assert (record.state, record.finish_reason, record.finish_detail) == ("finished", "errored", "was errored")
    assert (await edge.client.post("sessions/nobody/finish", json=SUCCESS)).status_code == 404
    wrong = await edge.client.post(f"sessions/{session_id}/finish", json={"reason": {"type": "bored"}})
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "reason.type")
    assert "'interrupted'" in wrong.json()["detail"]


async def test_heartbeats_and_telemetry_do_not_wait_for_the_writer(edge: Edge) -> None:
    session_id = await edge.new_session()
    writing, release = asyncio.Event(), asyncio.Event()

    async def slow(db: Any) -> None:
        writing.set()
        await release.wait()

    blocked = asyncio.create_task(edge.app.state.store.write(slow))
    await writing.wait()
    telemetry = {"events": [], "platform": "Linux", "sdk_version": "1", "session_id": "x", "process_uuid": "y"}
    async with asyncio.timeout(30):  # whatever waited for the writer would wait for ever
        for _ in range(20):
            answer = await edge.client.post("session_heartbeat", json={"session_id": session_id})
            assert answer.status_code == 200
            assert (await edge.client.post("telemetry", json=telemetry)).json() == {"status": "accepted"}
    assert not blocked.done()
    release.set()
    await blocked


async def test_telemetry_is_bounded(edge: Edge) -> None:
    event = {"event": "GENERIC_EVENT", "event_data": {"headers": {"x-api-key": "tml-secret"}}}
    body = {"events": [event] * 1001, "platform": "", "sdk_version": "", "session_id": "s", "process_uuid": "p"}
    assert (await edge.client.post("telemetry", json=body)).status_code == 400
    body["events"] = [{"event": "x" * 5_000_000}]
    assert (await edge.client.post("telemetry", json=body)).status_code == 413


async def test_signs_of_life_reach_the_store(make_settings: Callable[..., Settings]) -> None:
    async with running(make_settings(sweep_interval=0.05)) as edge:
        session_id = await edge.new_session()
        store = edge.app.state.store
        project_id = (await edge.app.state.authenticator.principal(edge.app.state.dev_key)).project_id
        before = await store.read(lambda db: get_session(db, project_id, session_id))
        await edge.client.post("session_heartbeat", json={"session_id": session_id})
        for _ in range(100):
            after = await store.read(lambda db: get_session(db, project_id, session_id))
            if after.last_seen_at > before.last_seen_at:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the heartbeat was not written")


async def test_presence_looks_again_after_a_while(edge: Edge) -> None:
    store, now, touched = edge.app.state.store, [0.0], list[str]()
    presence = Presence(store, touched.append, clock=lambda: now[0])
    session_id = await edge.new_session()
    project_id = (await edge.app.state.authenticator.principal(edge.app.state.dev_key)).project_id
    await presence.beat(project_id, session_id)
    with pytest.raises(NotFound):
        await presence.beat("other", session_id)
    record = await store.read(lambda db: get_session(db, project_id, session_id))
    await store.write(lambda db: expire_session(db, session_id, record.created_at))
    await presence.beat(project_id, session_id)  # still trusted
    assert touched == [session_id, session_id]
    now[0] = TRUST_SECONDS + 1
    with pytest.raises(Gone):
        await presence.beat(project_id, session_id)
    assert len(touched) == 2


async def test_lists_are_paged_newest_first(edge: Edge) -> None:
    made = [await edge.new_session() for _ in range(3)]
    page = (await edge.client.get("sessions", params={"limit": 2, "access_scope": "owned"})).json()["sessions"]
    rest = (await edge.client.get("sessions", params={"limit": 2, "offset": 2})).json()["sessions"]
    assert sorted(page + rest) == sorted(made)
    for wrong in ({"limit": 0}, {"limit": "x"}, {"offset": -1}, {"access_scope": "all"}):
        answer = await edge.client.get("sessions", params=wrong)
        assert answer.status_code == 400
        assert answer.json()["error"]["field"] == next(iter(wrong))
