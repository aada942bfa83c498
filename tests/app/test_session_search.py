"""Searching sessions: every condition, pages that lose nothing, nothing of other projects."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession

from store.sessions import expire_session, get_session, search_sessions
from tests.app.conftest import Edge
from tests.support.api import Api


async def found(client: Any, **body: Any) -> list[str]:
    """Ids of the sessions that a search finds."""
    answer = await client.post("sessions/search", json=body)
    assert answer.status_code == 200, answer.text
    return [session["session_id"] for session in answer.json()["sessions"]]


async def project_of(edge: Edge) -> str:
    return str((await edge.app.state.authenticator.principal(edge.app.state.dev_key)).project_id)


async def finish(edge: Edge, session_id: str, reason: str, detail: str | None = None) -> None:
    body = {"reason": {"type": reason}, "detail": detail}
    assert (await edge.client.post(f"sessions/{session_id}/finish", json=body)).status_code == 200


async def test_a_session_is_shown_in_the_shape_of_the_sdk(edge: Edge) -> None:
    session_id = await edge.new_session(display_name="Run A", user_metadata={"k": "v"})
    answer = (await edge.client.post("sessions/search", json={})).json()
    [session] = answer["sessions"]
    assert session.pop("created_at").endswith("Z")
    project_id = await project_of(edge)
    assert session == {
        "session_id": session_id,
        "owner": f"tml:user:{project_id}",
        "project_id": project_id,
        "status": {"type": "active"},
        "checkpoints_count": 0,
        "checkpoint_storage_bytes": 0,
        "display_name": "Run A",
        "user_metadata": {"k": "v"},
    }
    assert "next_cursor" not in answer


async def test_pages_meet_without_overlap_newest_first(edge: Edge) -> None:
    made = [await edge.new_session() for _ in range(7)]
    seen: list[str] = []
    cursor = None
    sizes = []
    while True:
        answer = (await edge.client.post("sessions/search", json={"limit": 3, "cursor": cursor})).json()
        sizes.append(len(answer["sessions"]))
        seen += [session["session_id"] for session in answer["sessions"]]
        times = [session["created_at"] for session in answer["sessions"]]
        assert times == sorted(times, reverse=True)
        cursor = answer.get("next_cursor")
        if cursor is None:
            break
    assert sizes == [3, 3, 1]
    assert seen == made[::-1]
    exact = (await edge.client.post("sessions/search", json={"limit": 7})).json()
    assert "next_cursor" not in exact


async def test_names_match_word_by_word_in_either_case(edge: Edge) -> None:
    first = await edge.new_session(display_name="Poems 50% of them")
    second = await edge.new_session(display_name="poems_x")
    await edge.new_session()
    client = edge.client
    assert await found(client, display_name="POEMS") == [second, first]
    assert await found(client, display_name="them poem") == [first]
    assert await found(client, display_name="0% of") == [first]
    assert await found(client, display_name="s_x") == [second]
    assert await found(client, display_name="%") == [first]
    assert await found(client, display_name="_") == [second]
    assert await found(client, display_name="' OR 1=1 --") == []


async def test_an_id_or_a_name(edge: Edge) -> None:
    named = await edge.new_session(display_name="findable")
    other = await edge.new_session(display_name="something else")
    assert await found(edge.client, session_id=other) == [other]
    assert await found(edge.client, session_id=other, display_name="findable") == [other, named]
    assert await found(edge.client, session_id="nobody") == []


async def test_every_pair_of_metadata_must_hold(edge: Edge) -> None:
    both = await edge.new_session(user_metadata={"a": "1", 'quo"te.$[0]': "é"})
    one = await edge.new_session(user_metadata={"a": "1"})
    await edge.new_session(user_metadata={"a": "2"})
    assert await found(edge.client, user_metadata={"a": "1"}) == [one, both]
    assert await found(edge.client, user_metadata={"a": "1", 'quo"te.$[0]': "é"}) == [both]
    assert await found(edge.client, user_metadata={"b": "1"}) == []
    assert await found(edge.client, user_metadata={"a": "1", "b": "1"}) == []


async def test_statuses(edge: Edge) -> None:
    active = await edge.new_session()
    well, badly, silent = [await edge.new_session() for _ in range(3)]
    await finish(edge, well, "success")
    await finish(edge, badly, "errored", "it broke")
    store, project_id = edge.app.state.store, await project_of(edge)
    record = await store.read(lambda db: get_session(db, project_id, silent))
    assert await store.write(lambda db: expire_session(db, silent, record.created_at))
    client = edge.client
    assert await found(client, statuses=[{"type": "active"}]) == [active]
    assert await found(client, statuses=[{"type": "client_finished"}]) == [badly, well]
    assert await found(client, statuses=[{"type": "client_finished", "reasons": ["success", "interrupted"]}]) == [well]
    assert await found(client, statuses=[{"type": "active"}, {"type": "client_finished"}]) == [badly, well, active]
    assert await found(client, statuses=[{"type": "failed"}, {"type": "cancelled"}]) == []
    assert await found(client) == [silent, badly, well, active]
    shown = (await client.post("sessions/search", json={})).json()["sessions"]
    assert "status" not in shown[0]
    assert shown[1]["status"] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "it broke"}
    assert shown[2]["status"] == {"type": "client_finished", "reason": {"type": "success"}}


async def test_owners_and_projects(edge: Edge) -> None:
    mine = await edge.new_session()
    stranger = await edge.other_project()
    project_id, client = await project_of(edge), edge.client
    urn = f"tml:user:{project_id}"
    for owner in ({"type": "own"}, {"type": "accessible"}, {"type": "user", "owner_urns": ["tml:user:x", urn]}):
        assert await found(client, owner=owner) == [mine]
        assert await found(stranger, owner=owner) == []
    assert await found(client, owner={"type": "user", "owner_urns": ["tml:user:x"]}) == []
    assert await found(client, project_ids=[project_id]) == [mine]
    assert await found(client, project_ids=[]) == []
    assert await found(stranger, session_id=mine) == []
    foreign = await stranger.post("sessions/search", json={"project_ids": [project_id]})
    assert (foreign.status_code, foreign.json()["error"]["field"]) == (404, "project_ids")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"limit": "5"}, "limit"),
        ({"display_name": ""}, "display_name"),
        ({"statuses": []}, "statuses"),
        ({"statuses": [{"type": "expired"}]}, "statuses[0]"),
        ({"statuses": [{"type": "active", "reasons": ["success"]}]}, "statuses[0].active.reasons"),
        ({"statuses": [{"type": "client_finished", "reasons": []}]}, "statuses[0].client_finished.reasons"),
        ({"owner": {"type": "user"}}, "owner.user.owner_urns"),
        ({"owner": {"type": "user", "owner_urns": []}}, "owner.user.owner_urns"),
        ({"owner": {"type": "user", "owner_urns": ["x"] * 11}}, "owner.user.owner_urns"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "x"}}, "cursor.last_created_at"),
        (
            {"cursor": {"last_created_at": "0001-01-01T00:00:00+14:00", "last_session_id": "x"}},
            "cursor.last_created_at",
        ),
        (
            {"cursor": {"last_created_at": "9999-12-31T23:59:59-14:00", "last_session_id": "x"}},
            "cursor.last_created_at",
        ),
        ({"cursor": {"last_session_id": "x"}}, "cursor.last_created_at"),
        ({"query": "x"}, "query"),
    ],
)
async def test_what_is_not_understood_is_named(edge: Edge, body: dict[str, Any], field: str) -> None:
    answer = await edge.client.post("sessions/search", json=body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field), answer.text


async def test_checkpoints_are_counted(api: Api) -> None:
    session_id = await api.session()
    model_id = await api.model(session_id)
    saved = await api.do("save_weights", model_id=model_id, path="one")
    await api.do("save_weights_for_sampler", model_id=model_id, path="two")
    await api.do("save_weights_for_sampler", model_id=model_id, sampling_session_seq_id=0)  # has no name
    empty = await api.session()
    answer = (await api.post("sessions/search")).json()["sessions"]
    assert [each["session_id"] for each in answer] == [empty, session_id]
    listed = (await api.client.get("checkpoints")).json()["checkpoints"]
    assert saved["path"] in {each["tinker_path"] for each in listed}
    assert answer[1]["checkpoints_count"] == len(listed) == 2
    assert answer[1]["checkpoint_storage_bytes"] == sum(each["size_bytes"] for each in listed) > 0
    assert (answer[0]["checkpoints_count"], answer[0]["checkpoint_storage_bytes"]) == (0, 0)


async def test_a_session_is_put_into_the_project_of_the_key_and_no_other(edge: Edge) -> None:
    session_id = await edge.new_session()
    mine, stranger = await project_of(edge), await edge.other_project()
    theirs = (await stranger.post("sessions/search", json={})).json()
    assert theirs["sessions"] == []
    other_id = (await edge.app.state.authenticator.principal(stranger.headers["X-API-Key"])).project_id
    path = f"sessions/{session_id}/project"
    assert (await edge.client.put(path, json={"project_id": mine})).status_code == 204
    for refused in (
        await edge.client.put(path, json={"project_id": other_id}),
        await edge.client.put(path, json={"project_id": "nobody"}),
        await stranger.put(path, json={"project_id": other_id}),
        await stranger.put(path, json={"project_id": mine}),
        await edge.client.put("sessions/nobody/project", json={"project_id": mine}),
    ):
        assert refused.status_code == 404
    assert (await edge.client.put(path, json={"project_id": None})).status_code == 400
    assert await found(edge.client) == [session_id]


async def test_sessions_that_only_seem_to_match_cost_no_page_each(edge: Edge) -> None:
    """A name that ends as the wanted pair is written gets past the database; such sessions are looked at together."""
    wanted = await edge.new_session(user_metadata={"a": "b"})
    for number in range(30):
        await edge.new_session(user_metadata={f'{number}"a': "b"})
    asked: list[str] = []
    project = await project_of(edge)

    async def search(db: AsyncSession) -> list[str]:
        engine = db.get_bind().engine
        event.listen(engine, "before_cursor_execute", lambda *told: asked.append(told[2]))
        rows = await search_sessions(db, project, user_metadata={"a": "b"}, limit=1)
        return [row.session.session_id for row in rows]

    assert await edge.app.state.store.read(search) == [wanted]
    assert 0 < len([each for each in asked if "LIKE" in each]) <= 2
