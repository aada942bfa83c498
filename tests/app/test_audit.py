"""The audit log: every event once, by whom, on its day, for its own project, without secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.services.audit import Audit
from app.settings import Settings
from store.events import add_event
from store.keys import create_key, ensure_project, revoke_key
from store.sessions import expire_session
from tests.app.conftest import Edge, running
from tests.support.api import Api


async def entries(client: Any, **params: str) -> list[dict[str, Any]]:
    """The events of today, unless `day` is given."""
    answer = await client.get("audit", params=params)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["entries"])


async def names(client: Any, **params: str) -> list[str]:
    return [entry["event"] for entry in await entries(client, **params)]


async def test_the_life_of_a_project_its_keys_and_sessions(edge: Edge) -> None:
    assert await names(edge.client) == ["project_created", "key_created"]
    session_id = await edge.new_session(display_name="mine")
    body = {"reason": {"type": "errored"}, "detail": "x"}
    for _ in range(2):
        await edge.client.post(f"sessions/{session_id}/finish", json=body)
    silent = await edge.new_session()
    store = edge.app.state.store
    assert await store.write(lambda db: expire_session(db, silent, datetime.now(UTC)))
    assert not await store.write(lambda db: expire_session(db, silent, datetime.now(UTC)))
    found = await entries(edge.client)
    assert [entry["event"] for entry in found] == [
        "project_created",
        "key_created",
        "session_created",
        "session_finished",
        "session_created",
        "session_expired",
    ]
    key_id = (await edge.app.state.authenticator.principal(edge.app.state.dev_key)).key_id
    assert found[2]["event_details"] == {"session_id": session_id, "display_name": "mine", "key_id": key_id}
    assert found[3]["event_details"] == {"session_id": session_id, "reason": "errored", "key_id": key_id}
    assert found[5]["event_details"] == {"session_id": silent}
    times = [entry["timestamp"] for entry in found]
    assert times == sorted(times)
    assert await names(edge.client, event_type="projects") == ["project_created"]
    for none in ("teams", "organizations", "checkpoints"):
        assert await names(edge.client, event_type=none) == []


async def test_a_repeated_creation_is_one_event(edge: Edge) -> None:
    for _ in range(3):
        await edge.client.post("create_session", json={}, headers={"X-Idempotency-Key": "same"})
    assert (await names(edge.client)).count("session_created") == 1


async def test_what_happens_to_a_checkpoint(api: Api) -> None:
    model_id = await api.model()
    await api.do("save_weights", model_id=model_id, path="one")
    await api.do("save_weights", model_id=model_id, path="one", overwrite=True)
    await api.do("save_weights_for_sampler", model_id=model_id, sampling_session_seq_id=0)  # has no name
    failed = await api.post("save_weights", model_id=model_id, path="one")
    assert failed.status_code == 400
    path = f"training_runs/{model_id}/checkpoints/weights/one"
    for ttl in (3600, None):
        assert (await api.client.put(f"{path}/ttl", json={"ttl_seconds": ttl})).status_code == 204
    for method in ("POST", "DELETE"):
        for _ in range(2):
            assert (await api.client.request(method, f"{path}/publish")).status_code in (200, 204)
    assert (await api.client.delete(path)).status_code == 204
    found = await entries(api.client, event_type="checkpoints")
    assert [entry["event"] for entry in found] == [
        "checkpoint_created",
        "checkpoint_deleted",
        "checkpoint_created",
        "checkpoint_ttl_set",
        "checkpoint_ttl_set",
        "checkpoint_published",
        "checkpoint_unpublished",
        "checkpoint_deleted",
    ]
    tinker_path = f"tinker://{model_id}/weights/one"
    for entry in found:
        assert (entry["model_id"], entry["tinker_path"]) == (model_id, tinker_path)
        assert entry["event_details"]["tinker_path"] == tinker_path
    assert found[1]["event_details"]["reason"] == "overwritten"
    assert found[0]["event_details"]["size_bytes"] > 0
    expires = datetime.fromisoformat(found[3]["event_details"]["expires_at"])
    assert abs(expires - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=5)
    assert "expires_at" not in found[4]["event_details"]
    assert found[7]["event_details"]["reason"] == "deleted"
    key_id = (await api.edge.app.state.authenticator.principal(api.edge.app.state.dev_key)).key_id
    assert {entry["event_details"].get("key_id") for entry in found} == {key_id}
    assert await entries((await api.other()).client, event_type="checkpoints") == []


async def test_an_operation_names_the_key_that_asked_and_not_that_of_the_run(api: Api) -> None:
    """Two keys of one project: one makes the run, the other saves it, and both overwrite."""
    keys = [await api.edge.new_key("shared", "member") for _ in range(2)]
    clients = [Api(api.edge, api.groups, api.edge.with_key(key)) for key in keys]
    ids = [(await api.edge.app.state.authenticator.principal(key)).key_id for key in keys]
    model_id = await clients[0].model()
    await clients[1].do("save_weights", model_id=model_id, path="one")
    await clients[0].do("save_weights", model_id=model_id, path="one", overwrite=True)
    await clients[1].do("save_weights_for_sampler", model_id=model_id, path="two")
    await clients[0].do("save_weights_external", model_id=model_id, path="three")
    found = await entries(clients[0].client, event_type="checkpoints")
    assert [(entry["event"], entry["event_details"]["key_id"]) for entry in found] == [
        ("checkpoint_created", ids[1]),
        ("checkpoint_deleted", ids[0]),
        ("checkpoint_created", ids[0]),
        ("checkpoint_created", ids[1]),
        ("checkpoint_created", ids[0]),
    ]


async def test_a_checkpoint_that_expires_is_an_event(tiny_settings: Callable[..., Settings]) -> None:
    from store.checkpoints import set_checkpoint_expiry
    from tests.support.api import serving

    async with serving(tiny_settings()) as api:
        model_id = await api.model()
        await api.do("save_weights", model_id=model_id, path="gone", ttl_seconds=3600)
        services = api.edge.app.state.services
        owner = (await api.edge.app.state.authenticator.principal(api.edge.app.state.dev_key)).project_id
        page, _ = await services.checkpoints.page(owner, None, 1, 0)
        past = datetime.now(UTC) - timedelta(hours=1)
        await services.store.write(lambda db: set_checkpoint_expiry(db, page[0].checkpoint_id, past))
        await services.checkpoints.sweep_expired()
        last = (await entries(api.client))[-1]
        assert (last["event"], last["event_details"]["reason"]) == ("checkpoint_deleted", "expired")


async def test_an_event_lasts_and_a_write_that_fails_leaves_none(make_settings: Callable[..., Settings]) -> None:
    settings = make_settings()
    async with running(settings) as edge:

        async def fails(db: Any) -> None:
            project_id = await ensure_project(db, "never")
            await create_key(db, project_id, "never")
            raise RuntimeError("on purpose")

        with pytest.raises(RuntimeError):
            await edge.app.state.store.write(fails)
        await edge.new_session()
    async with running(settings) as edge:
        assert await names(edge.client) == ["project_created", "key_created", "session_created"]
        client = await edge.other_project("never")
        assert await names(client) == ["project_created", "key_created"]


async def test_keys_are_named_by_id_and_never_shown(edge: Edge) -> None:
    async def make(db: Any) -> tuple[str, str, str]:
        project_id = await ensure_project(db, "keys")
        first = await create_key(db, project_id, "first")
        await create_key(db, project_id, "second")
        for _ in range(2):
            await revoke_key(db, project_id, first[0], datetime.now(UTC), by="the-admin")
        return (project_id, *first)

    project_id, key_id, plaintext = await edge.app.state.store.write(make)
    found = await edge.app.state.services.audit.day(project_id, "all", None)
    assert [entry.event for entry in found] == ["project_created", "key_created", "key_created", "key_revoked"]
    assert found[3].details == {"revoked_key_id": key_id, "name": "first", "key_id": "the-admin"}
    assert plaintext[4:] not in str(found)


async def test_days_are_from_midnight_to_midnight_utc(edge: Edge) -> None:
    store, now = edge.app.state.store, datetime(2026, 3, 2, 23, 59, tzinfo=UTC)
    project_id = await store.write(lambda db: ensure_project(db, "days", now=now - timedelta(days=9)))
    midnight = datetime(2026, 3, 2, tzinfo=UTC)
    micro = timedelta(microseconds=1)
    for at in (midnight - micro, midnight, midnight + timedelta(days=1) - micro, midnight + timedelta(days=1)):
        await store.write(lambda db, t=at: add_event(db, project_id, "session_created", t, {"at": t.isoformat()}))
    audit = Audit(store, lambda: now)
    today = [entry.at for entry in await audit.day(project_id, "all", None)]
    assert today == [midnight, midnight + timedelta(days=1) - micro]
    assert len(await audit.day(project_id, "all", (midnight - micro).date())) == 1
    for extreme in (datetime.min.date(), datetime.max.date()):
        assert await audit.day(project_id, "all", extreme) == []


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"event_type": "sessions"}, "event_type"),
        ({"day": "yesterday"}, "day"),
        ({"day": "2026-02-30"}, "day"),
        ({"day": "20260213"}, "day"),
        ({"day": "1770000000"}, "day"),
        ({"day": "2026-02-13T00:00:00"}, "day"),
    ],
)
async def test_what_is_not_understood_is_named(edge: Edge, params: dict[str, str], field: str) -> None:
    answer = await edge.client.get("audit", params=params)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)


async def test_many_sessions_at_once_are_all_in_the_log(edge: Edge) -> None:
    await asyncio.gather(*(edge.new_session() for _ in range(20)))
    assert (await names(edge.client)).count("session_created") == 20
