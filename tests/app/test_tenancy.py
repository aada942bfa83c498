"""Projects, users and keys: made, used, narrowed, rotated, ended, and who may do that."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.auth import Authenticator
from app.permissions import ROUTES, held
from app.settings import Settings
from schemas.roles import PERMISSIONS, ROLES
from store.keys import authenticate, list_keys
from tests.app.conftest import Edge, running
from tests.support.api import Api, serving


class Operator:
    """What the operator of a server does, over HTTP."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.client = edge.client

    async def project(self, name: str) -> str:
        """A new project's id."""
        return str((await ok(self.client.post("admin/projects", json={"name": name})))["project_id"])

    async def user(self, name: str) -> str:
        """A new user's id."""
        return str((await ok(self.client.post("admin/users", json={"name": name})))["user_id"])

    async def member(self, project: str, user: str, role: str, **query: Any) -> httpx.Response:
        """Make a user this in a project."""
        return await self.client.put(f"admin/projects/{project}/members/{user}", json={"role": role}, params=query)

    async def key(self, project: str, **wanted: Any) -> dict[str, Any]:
        """A new key: its text is `key`."""
        return await ok(self.client.post(f"admin/projects/{project}/keys", json={"name": "key", **wanted}))

    async def holder(self, project: str, **wanted: Any) -> httpx.AsyncClient:
        """A client with a new key."""
        return self.edge.with_key((await self.key(project, **wanted))["key"])


async def ok(answer: Any) -> dict[str, Any]:
    """The JSON of an answer that must be a success."""
    answered = await answer
    assert answered.status_code == 200, answered.text
    return dict(answered.json())


async def refused(answer: Any, status: int, *words: str, code: str | None = None) -> None:
    """The answer must be this refusal, and say these words."""
    answered = await answer
    assert answered.status_code == status, answered.text
    for word in words:
        assert word in answered.json()["detail"]
    if code is not None:
        assert answered.json()["error"]["code"] == code


async def events(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Today's audit log of a client's project."""
    return list((await ok(client.get("audit")))["entries"])


@pytest.fixture
def operator(edge: Edge) -> Operator:
    return Operator(edge)


async def test_a_project_its_owner_and_what_the_owner_may(operator: Operator) -> None:
    project = await operator.project("acme")
    owner = await operator.holder(project, role="owner")
    made = await ok(owner.post("keys", json={"name": "robot", "role": "member", "scopes": ["sample", "read"]}))
    assert made["info"]["scopes"] == ["sample", "read"]
    robot = operator.edge.with_key(made["key"])
    assert (await robot.get("sessions")).status_code == 200
    await refused(robot.post("create_model", json={}), 403, "narrowed to the scopes sample and read", code="forbidden")
    listed = (await ok(owner.get("keys")))["keys"]
    assert [key["name"] for key in listed] == ["key", "robot"]
    assert made["key"] not in str(listed)
    assert all(key["project_id"] == project and key["active"] for key in listed)
    assert all(len(key["key_id"]) == 32 and int(key["key_id"], 16) >= 0 for key in listed), "128 bits"
    assert len(project) == 32
    assert (await owner.delete(f"keys/{made['info']['key_id']}")).status_code == 204
    await refused(robot.get("sessions"), 401)
    assert [key["active"] for key in (await ok(owner.get("keys")))["keys"]] == [True, False]
    assert (await owner.delete(f"keys/{made['info']['key_id']}")).status_code == 204  # again


async def test_nobody_gives_what_they_have_not(operator: Operator) -> None:
    project = await operator.project("acme")
    owner = await operator.holder(project, role="owner")
    await refused(owner.post("keys", json={"name": "k", "role": "admin"}), 403, "permission admin")
    await refused(owner.post("keys", json={"name": "k", "role": "admin", "scopes": ["read"]}), 403, "role admin")
    admin = (await operator.key(project, role="admin"))["info"]["key_id"]
    await refused(owner.post(f"keys/{admin}/rotate", json={}), 403, "permission admin")
    await refused(owner.delete(f"keys/{admin}"), 403, "permission admin")
    narrow = await operator.holder(project, role="owner", scopes=["keys", "read"])
    await refused(narrow.post("keys", json={"name": "k", "role": "member"}), 403, "which your own has not")
    assert (await narrow.post("keys", json={"name": "k", "role": "read-only"})).status_code == 200
    ending = await operator.key(project, role="owner", expires_in=600)
    soon = operator.edge.with_key(ending["key"])
    made = await ok(soon.post("keys", json={"name": "k"}))
    assert made["info"]["expires_at"] == ending["info"]["expires_at"]
    await refused(soon.post("keys", json={"name": "k", "expires_in": 700}), 400, "cannot outlive it")
    assert (await soon.post("keys", json={"name": "k", "expires_in": 500})).status_code == 200
    lasting = [key for key in (await ok(owner.get("keys")))["keys"] if key["role"] == "read-only"]
    await refused(soon.post(f"keys/{lasting[0]['key_id']}/rotate", json={}), 400, "cannot outlive it")


async def test_what_no_key_can_be(edge: Edge) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "name", "required"),
        ({"name": ""}, "name", "1 character"),
        ({"name": " x"}, "name", "pattern"),
        ({"name": "a\nb"}, "name", "pattern"),
        ({"name": "k", "role": "boss"}, "role", "'read-only', 'member', 'owner' or 'admin'"),
        ({"name": "k", "scopes": []}, "scopes", "at least 1"),
        ({"name": "k", "scopes": ["fly"]}, "scopes[0]", "'read', 'train'"),
        ({"name": "k", "role": "read-only", "scopes": ["train"]}, "scopes", "does not have the permission train"),
        ({"name": "k", "expires_in": 0}, "expires_in", "greater than or equal to 1"),
        ({"name": "k", "expires_in": "1h"}, "expires_in", "integer"),
        ({"name": "k", "expires_at": "2026-01-01"}, "expires_at", "not a field"),
        ({"name": "k", "user_id": "0" * 32}, "user_id", "no member"),
        ({"name": "dev"}, "name", "development key"),
    ]
    for body, field, words in cases:
        answer = await edge.client.post("keys", json=body)
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["field"] == field
        assert words in answer.json()["detail"]
    assert len((await ok(edge.client.get("keys")))["keys"]) == 1


async def test_a_key_of_a_user_does_no_more_than_the_user_may(operator: Operator) -> None:
    project, user = await operator.project("acme"), await operator.user("ada")
    await refused(operator.client.post("admin/users", json={"name": "ada"}), 400, "already", code="already_exists")
    wanted = {"name": "ada's", "role": "owner", "user_id": user}
    await refused(operator.client.post(f"admin/projects/{project}/keys", json=wanted), 404, "no member")
    assert (await operator.member(project, user, "member")).status_code == 200
    await refused(operator.client.post(f"admin/projects/{project}/keys", json=wanted), 400, "the user is member")
    await operator.member(project, user, "owner")
    ada = await operator.holder(project, role="owner", user_id=user)
    await operator.key(project, role="owner")
    assert (await ada.get("keys")).status_code == 200
    await operator.member(project, user, "read-only")
    assert (await ada.get("sessions")).status_code == 200
    await refused(ada.get("keys"), 403, "its role is read-only")
    await refused(ada.post("create_session", json={}), 403, "its role is read-only")
    [shown] = (await ok(operator.client.get("admin/users")))["users"]
    assert shown["projects"] == [{"project_id": project, "role": "read-only"}]
    [member] = (await ok(operator.client.get(f"admin/projects/{project}/members")))["members"]
    assert (member["name"], member["role"]) == ("ada", "read-only")
    assert (await operator.client.delete(f"admin/projects/{project}/members/{user}")).status_code == 204
    assert (await ada.get("sessions")).status_code == 401
    await refused(operator.client.delete(f"admin/projects/{project}/members/{user}"), 404, "no member")
    await operator.member(project, user, "owner")
    assert (await ada.get("sessions")).status_code == 401, "coming back does not bring old keys back"


async def test_a_deleted_user_has_no_key_left(operator: Operator) -> None:
    projects = [await operator.project(name) for name in ("one", "two")]
    user = await operator.user("bob")
    clients = []
    for project in projects:
        await operator.member(project, user, "member")
        clients.append(await operator.holder(project, user_id=user))
    assert (await operator.client.delete(f"admin/users/{user}")).status_code == 204
    assert [(await client.get("sessions")).status_code for client in clients] == [401, 401]
    assert (await ok(operator.client.get("admin/users")))["users"] == []
    await refused(operator.client.delete(f"admin/users/{user}"), 404, "no user")
    await refused(operator.client.put(f"admin/projects/{projects[0]}/members/{user}", json={"role": "member"}), 404)
    await refused(operator.client.post("admin/users", json={"name": "bob"}), 400, "who was deleted")


async def test_rotation_with_overlap(operator: Operator) -> None:
    project = await operator.project("acme")
    owner = await operator.holder(project, role="owner")
    old = await operator.key(project, role="member", scopes=["read"], expires_in=86400)
    before = datetime.now(UTC)
    new = await ok(owner.post(f"keys/{old['info']['key_id']}/rotate", json={"overlap": 600}))
    rights = ("role", "scopes", "project_id", "name", "expires_at")
    assert [new["info"].get(right) for right in rights] == [old["info"].get(right) for right in rights]
    clients = [operator.edge.with_key(each["key"]) for each in (old, new)]
    assert [(await client.get("sessions")).status_code for client in clients] == [200, 200]
    again = owner.post(f"keys/{old['info']['key_id']}/rotate", json={})
    await refused(again, 400, new["info"]["key_id"], "took its place")
    [shown] = [key for key in (await ok(owner.get("keys")))["keys"] if key["key_id"] == old["info"]["key_id"]]
    ends = datetime.fromisoformat(shown["expires_at"])
    assert timedelta(seconds=600) <= ends - before < timedelta(seconds=1200)
    store = operator.edge.app.state.store
    for each, valid in ((old, False), (new, True)):
        found = await store.read(lambda db, key=each["key"]: authenticate(db, key, now=ends))
        assert (found is not None) == valid
    at_once = await ok(owner.post(f"keys/{new['info']['key_id']}/rotate", json={"overlap": 0, "expires_in": 60}))
    assert (await clients[1].get("sessions")).status_code == 401
    await refused(owner.post(f"keys/{new['info']['key_id']}/rotate", json={}), 400, "is over")
    assert at_once["info"]["expires_at"] < new["info"]["expires_at"]
    for body, field in (({"overlap": -1}, "overlap"), ({"overlap": 10**9}, "overlap"), ({"x": 1}, "x")):
        answer = await owner.post(f"keys/{at_once['info']['key_id']}/rotate", json=body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)
    await refused(operator.client.post(f"keys/{await dev_key_id(operator)}/rotate", json={}), 400, "development key")


async def dev_key_id(operator: Operator) -> str:
    """The id of the development key."""
    [key] = [key for key in (await ok(operator.client.get("keys")))["keys"] if key["name"] == "dev"]
    return str(key["key_id"])


async def test_the_last_key_that_can_manage_stays(operator: Operator) -> None:
    dev = await dev_key_id(operator)
    for how in (f"keys/{dev}", f"keys/{dev}?force=true", "auth/apikey/me", "auth/apikey/me?force=true"):
        await refused(operator.client.delete(how), 400, "last key of role admin", code="last_key")
    project, user = await operator.project("acme"), await operator.user("ada")
    await operator.member(project, user, "owner")
    made = await operator.key(project, role="owner", user_id=user)
    owner = operator.edge.with_key(made["key"])
    for request in (
        owner.delete(f"keys/{made['info']['key_id']}"),
        owner.delete("auth/apikey/me"),
        operator.client.delete(f"admin/projects/{project}/keys/{made['info']['key_id']}"),
        operator.member(project, user, "member"),
        operator.client.delete(f"admin/projects/{project}/members/{user}"),
        operator.client.delete(f"admin/users/{user}"),
    ):
        await refused(request, 400, "last key that may manage the keys of its project", code="last_key")
    assert (await owner.get("keys")).status_code == 200, "nothing of that was done"
    second = await operator.key(project, role="owner")
    assert (await operator.member(project, user, "member")).status_code == 200
    gone = f"admin/projects/{project}/keys/{second['info']['key_id']}"
    await refused(operator.client.delete(gone), 400, code="last_key")
    assert (await operator.client.delete(f"{gone}?force=true")).status_code == 204
    other = await operator.project("others")
    admin = operator.edge.with_key((await operator.key(other, role="admin"))["key"])
    assert (await admin.delete(f"admin/projects/{other}")).status_code == 204, "the development key is left"
    assert (await admin.get("keys")).status_code == 401


async def test_an_archived_project_lets_nobody_in(operator: Operator) -> None:
    project = await operator.project("acme")
    owner = await operator.holder(project, role="owner")
    session = (await ok(owner.post("create_session", json={"sdk_version": "test"})))["session_id"]
    assert (await operator.client.delete(f"admin/projects/{project}")).status_code == 204
    assert (await owner.get("sessions")).status_code == 401
    shown = await ok(operator.client.get(f"admin/projects/{project}"))
    assert shown["archived_at"] is not None
    keys = (await ok(operator.client.get(f"admin/projects/{project}/keys")))["keys"]
    assert [(key["active"], key.get("revoked_at"), key.get("expires_at")) for key in keys] == [(False, None, None)]
    wanted = operator.client.post(f"admin/projects/{project}/keys", json={"name": "k"})
    await refused(wanted, 400, "is archived")
    await refused(operator.client.post("admin/projects", json={"name": "acme"}), 400, "which is archived")
    found = await operator.edge.app.state.services.audit.day(project, "all", None)
    assert [entry.event for entry in found][-2:] == ["project_archived", "session_finished"]
    assert found[-1].details["session_id"] == session
    assert (await operator.client.delete(f"admin/projects/{project}")).status_code == 204  # again
    default = (await ok(operator.client.get("auth/apikey/me")))["details"]["org_details"]["name"]
    listed = (await ok(operator.client.get("admin/projects")))["projects"]
    [own] = [each["project_id"] for each in listed if each["name"] == default]
    await refused(operator.client.delete(f"admin/projects/{own}?force=true"), 400, "development key")
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/keys"), ("POST", "/keys"), ("GET", "/members")):
        body = {"json": {"name": "k"}} if method == "POST" else {}
        await refused(operator.client.request(method, f"admin/projects/{'0' * 32}{path}", **body), 404, "no project")


async def test_live_runs_keep_a_project_from_being_archived(api: Api) -> None:
    other = await api.other()
    model = await other.model()
    listed = (await ok(api.client.get("admin/projects")))["projects"]
    [project] = [each for each in listed if each["name"] == "other"]
    assert project["live_runs"] == 1
    archive = f"admin/projects/{project['project_id']}"
    await refused(api.client.delete(archive), 400, "1 training runs", code="project_in_use")
    await other.train(model)
    assert (await api.client.delete(f"{archive}?force=true")).status_code == 204
    assert (await ok(api.client.get(archive)))["live_runs"] == 0
    assert (await other.post("zero_grad", model_id=model)).status_code == 401


async def test_everything_is_in_the_audit_log_and_no_key_is(operator: Operator) -> None:
    project, user = await operator.project("acme"), await operator.user("ada")
    await operator.member(project, user, "member")
    await operator.member(project, user, "owner")
    key = await operator.key(project, role="owner", user_id=user)
    owner = operator.edge.with_key(key["key"])
    new = await ok(owner.post(f"keys/{key['info']['key_id']}/rotate", json={}))
    await operator.client.delete(f"admin/users/{user}?force=true")
    found = await operator.edge.app.state.services.audit.day(project, "all", None)
    assert [entry.event for entry in found] == [
        "project_created",
        "member_added",
        "member_changed",
        "key_created",
        "key_rotated",
        "key_revoked",
        "key_revoked",
        "member_removed",
    ]
    dev = await dev_key_id(operator)
    askers = [entry.details["key_id"] for entry in found]
    assert askers == [dev, dev, dev, dev, key["info"]["key_id"], dev, dev, dev]
    assert found[2].details["role_before"] == "member"
    own = await events(operator.client)
    assert [entry["event"] for entry in own][-2:] == ["user_created", "user_deleted"]
    for secret in (key["key"], new["key"], operator.edge.app.state.dev_key):
        assert secret[12:] not in str(found) + str(own)


async def test_a_poll_after_the_end_of_its_key_is_refused(tiny_settings: Callable[..., Settings]) -> None:
    async with serving(tiny_settings(poll_hold=0.3)) as api:
        other = await api.other("owner")
        model = await other.model()
        waits = await other.submit("optim_step", model_id=model, seq_id=5, adam_params={})
        poll = asyncio.create_task(other.post("retrieve_future", request_id=waits))
        while api.edge.app.state.services.futures._waiters.empty and not poll.done():  # noqa: ASYNC110 (until it is held)
            await asyncio.sleep(0.002)
        [key] = (await ok(other.client.get("keys")))["keys"]
        assert (await other.client.delete(f"keys/{key['key_id']}?force=true")).status_code == 204
        assert (await poll).status_code == 408, "what was let in ends as it would have"
        assert (await other.post("retrieve_future", request_id=waits)).status_code == 401


async def test_another_server_learns_of_it_within_the_cache_time(operator: Operator) -> None:
    project = await operator.project("acme")
    key, now = (await operator.key(project, role="owner"))["key"], [0.0]
    elsewhere = Authenticator(operator.edge.app.state.store, ttl=2.0, clock=lambda: now[0])
    found = await elsewhere.principal(key)
    assert found is not None
    assert found.role == "owner"
    await operator.client.delete(f"admin/projects/{project}")
    assert await elsewhere.principal(key) is not None
    now[0] = 2.0
    assert await elsewhere.principal(key) is None


async def test_a_key_is_not_remembered_beyond_its_end(operator: Operator) -> None:
    class Counting:
        reads = 0

        async def look_up(self, work: Any) -> Any:
            self.reads += 1
            return await operator.edge.app.state.store.look_up(work)

    project = await operator.project("acme")
    key, now, store = (await operator.key(project, expires_in=3600))["key"], [0.0], Counting()
    authenticator = Authenticator(store, ttl=86400.0, clock=lambda: now[0])  # type: ignore[arg-type]
    for moment, reads in ((0.0, 1), (1800.0, 1), (3600.0, 2)):
        now[0] = moment
        assert await authenticator.principal(key) is not None
        assert store.reads == reads, "it is looked up again when it ends, however long others are remembered"


async def test_last_uses_are_written_with_the_next_sweep(operator: Operator) -> None:
    project = await operator.project("acme")
    made = await operator.key(project, role="owner")
    client = operator.edge.with_key(made["key"])
    assert made["info"].get("last_used_at") is None
    before = datetime.now(UTC)
    await client.get("sessions")
    services = operator.edge.app.state.services
    await services.housekeeping.write_activity()
    [key] = await operator.edge.app.state.store.read(lambda db: list_keys(db, project))
    assert key.last_used_at is not None
    assert before <= key.last_used_at <= datetime.now(UTC)
    shown = (await ok(client.get("keys")))["keys"][0]["last_used_at"]
    assert datetime.fromisoformat(shown) == key.last_used_at

    async def fails(work: Any) -> None:
        raise OSError("on purpose")

    write, services.store.write = services.store.write, fails
    try:
        await client.get("sessions")
        with pytest.raises(OSError, match="on purpose"):
            await services.housekeeping.write_activity()
    finally:
        services.store.write = write
    await services.housekeeping.write_activity()
    [later] = await operator.edge.app.state.store.read(lambda db: list_keys(db, project))
    assert later.last_used_at is not None
    assert later.last_used_at > key.last_used_at


async def test_neither_files_nor_log_hold_a_key(
    make_settings: Callable[..., Settings], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    settings = make_settings(pjwt_auth_enabled=True)
    secrets: list[str] = []
    async with running(settings) as edge:
        operator = Operator(edge)
        project, user = await operator.project("acme"), await operator.user("ada")
        await operator.member(project, user, "owner")
        made = await operator.key(project, role="owner", user_id=user)
        client = edge.with_key(made["key"])
        new = await ok(client.post(f"keys/{made['info']['key_id']}/rotate", json={}))
        token = (await ok(client.post("auth/token", json={})))["jwt"]
        await client.get("keys")
        await client.get(f"keys?key={project}")
        await refused(edge.with_key(new["key"]).post("keys", json={"name": "k", "role": "admin"}), 403)
        await edge.with_key(made["key"] + "x").get("keys")
        secrets += [made["key"][12:], new["key"][12:], token, token.split(".")[2]]
    written = b"".join(
        file.read_bytes() for file in settings.data_dir.rglob("*") if file.is_file() and file.name != "dev_key"
    )
    assert made["info"]["key_id"].encode() in written, "the search does see rows"
    assert "GET /api/v1/keys" in caplog.text
    for secret in secrets:
        assert secret.encode() not in written
        assert secret not in caplog.text


async def test_keys_of_a_folder_without_roles_do_what_they_did(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    """As the migration leaves them: all are owners, and the server makes the one in its own file an operator's."""
    settings = make_settings()
    async with running(settings) as edge:
        key = await edge.new_key("others", "owner")

        async def before_roles(db: Any) -> None:
            from sqlalchemy import update

            from store.tables import ApiKey

            await db.execute(update(ApiKey).values(role="owner"))

        await edge.app.state.store.write(before_roles)
        dev_key = edge.app.state.dev_key
    async with running(settings) as edge:
        assert edge.app.state.dev_key == dev_key
        assert (await edge.client.get("admin/models")).status_code == 200
        assert (await edge.with_key(key).get("admin/models")).status_code == 403
        assert (await edge.with_key(key).get("keys")).status_code == 200
        assert "key_changed" in [entry["event"] for entry in await events(edge.client)]


async def test_a_key_opens_to_another_project_only_what_it_may_do_itself(api: Api) -> None:
    """Every role and every scope as access token, at every route that takes one."""
    mine, theirs = await api.other(), Api(api.edge, api.groups, await api.edge.other_project("theirs"))
    path = (await theirs.do("save_weights", model_id=await theirs.model(), path="x"))["path"]
    session = await mine.session()
    keys: list[dict[str, Any]] = [{"role": role} for role in ROLES]
    keys += [{"role": "admin", "scopes": [scope]} for scope in PERMISSIONS]
    opened: Counter[str] = Counter()
    for number, rights in enumerate(keys):
        key = await api.edge.new_key("theirs", **rights)
        may = held(rights["role"], rights.get("scopes"))
        place = {"session_id": session, "model_seq_id": number, "weights_access_token": key}
        copied = await mine.post("copy_weights", source_path=path, **place)
        place["model_seq_id"] = len(keys) + number
        loaded = await mine.post("load_weights", path=path, optimizer=True, **place)
        for route, answer in (("copy_weights", copied), ("load_weights", loaded)):
            allowed = not may.isdisjoint(ROUTES[route])
            assert answer.status_code == (200 if allowed else 400), (rights, route, answer.text)
            if not allowed:
                assert f"lacks the permission {ROUTES[route][0]}" in answer.json()["detail"]
                assert key not in answer.text
            opened[route] += allowed
    assert opened == {"copy_weights": 4, "load_weights": 4}
    assert len((await ok(mine.client.get("checkpoints")))["checkpoints"]) == 4


async def test_a_key_that_is_shown_as_access_token_was_used(operator: Operator) -> None:
    project = await operator.project("acme")
    made = await operator.key(project, scopes=["sample"])
    copying = {"source_path": "tinker://r/weights/x", "destination_project_id": await own_project(operator)}
    headers = {"X-Tinker-Weights-Access-Token": made["key"]}
    await refused(operator.client.post("copy_weights", json=copying, headers=headers), 400, "permission checkpoints")
    await operator.edge.app.state.services.housekeeping.write_activity()
    [key] = await operator.edge.app.state.store.read(lambda db: list_keys(db, project))
    assert key.last_used_at is not None


async def own_project(operator: Operator) -> str:
    """The id of the operator's project."""
    return str((await ok(operator.client.get("keys")))["keys"][0]["project_id"])


async def test_expired_by_the_clock(operator: Operator) -> None:
    project = await operator.project("acme")
    key = (await operator.key(project, expires_in=3600))["key"]
    store, now = operator.edge.app.state.store, datetime.now(UTC)
    assert await store.read(lambda db: authenticate(db, key, now=now + timedelta(seconds=3590))) is not None
    assert await store.read(lambda db: authenticate(db, key, now=now + timedelta(seconds=3601))) is None
