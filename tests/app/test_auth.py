"""Keys: who gets in, who does not, and that nobody is told why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts

from app.auth import Authenticator, presented_key
from app.public import CONSOLE_PATHS, CONSOLE_PREFIXES, is_public
from store.keys import authenticate, create_key, ensure_project, revoke_key
from tests.app.conftest import BASE, Edge

PUBLIC = {"/healthz", "/readyz", "/api/v1/healthz", "/api/v1/readyz", "/openapi.json"}
PUBLIC |= {"/docs", "/docs/start.js", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js"}
SIGNED = "/api/v1/files/"


def every_route(edge: Edge) -> Iterator[tuple[str, str]]:
    """(method, path) of everything that the application routes; parameters filled in."""
    for context in iter_route_contexts(edge.app.routes):
        assert context.path is not None, "a mounted application: extend this walk"
        for method in sorted(context.methods or ()):
            yield method, context.path.replace(":path", "").replace("{", "").replace("}", "")


async def test_every_route_but_the_public_ones_needs_a_key(edge: Edge) -> None:
    routes = set(every_route(edge))
    assert {path for _, path in routes} >= PUBLIC
    assert len(routes) > 25
    client = edge.without_key()
    bodies = set()
    for method, path in sorted(routes):
        if path.startswith(SIGNED) or path in CONSOLE_PATHS or path.startswith(CONSOLE_PREFIXES):
            continue  # of the console: tests/app/test_console.py
        answer = await client.request(method, f"http://localhost{path}", content=b"not even json")
        if path in PUBLIC:
            assert answer.status_code in (200, 405), path
        else:
            assert answer.status_code == 401, (method, path)
            if method != "HEAD":
                body = answer.json()
                body.pop("request_id", None)
                body["error"].pop("request_id", None)
                bodies.add(str(body))
    assert len(bodies) == 3, "one in each of the shapes: Tinsmith's own, OpenAI's, Anthropic's"


async def test_unknown_paths_need_a_key_too(edge: Edge) -> None:
    for path in (
        "/index.html",
        "/consoles",
        "/api/v1/nothing",
        "/api/v1/../healthz",
        "/docs/",
        "/healthz/",
        "/metrics",
        "/api/v1/files",
    ):
        answer = await edge.without_key().get(f"http://localhost{path}")
        assert answer.status_code == 401, path


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-API-Key": ""},
        {"X-API-Key": "tml-wrong"},
        {"X-API-Key": "tml-" + "x" * 100_000},
        {"X-API-Key": "\xff\xfe"},
        {"Authorization": "KEY"},
        {"Authorization": "bearer KEY"},
        {"Authorization": "Basic KEY"},
        {"Authorization": "Bearer"},
        {"X-Key": "KEY"},
        {"X-API-Key": "KEY", "Authorization": "Bearer tml-other"},
        {"X-API-Key": "tml-other", "Authorization": "Bearer KEY"},
    ],
)
async def test_what_does_not_get_in(edge: Edge, headers: dict[str, str]) -> None:
    key = edge.app.state.dev_key
    sent = [(name, value.replace("KEY", key).encode("latin-1")) for name, value in headers.items()]
    answer = await edge.without_key().get("sessions", headers=sent)  # type: ignore[arg-type]
    assert answer.status_code == 401
    body = answer.json()
    assert body["error"]["code"] == "unauthenticated"
    assert "www-authenticate" in answer.headers
    assert "invalid_token" not in answer.headers["www-authenticate"]
    reference = (await edge.without_key().get("sessions")).json()
    assert body["detail"] == reference["detail"]


async def test_both_headers_get_in_and_two_equal_ones(edge: Edge) -> None:
    key = edge.app.state.dev_key
    for headers in (
        {"X-API-Key": key},
        {"Authorization": f"Bearer {key}"},
        {"X-API-Key": key, "Authorization": f"Bearer {key}"},
    ):
        assert (await edge.without_key().get("sessions", headers=headers)).status_code == 200


async def test_the_body_is_not_read_without_a_key(edge: Edge) -> None:
    async def receive() -> Any:
        raise AssertionError("the body was read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/api/v1/forward_backward",
        "raw_path": b"/api/v1/forward_backward",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-length", b"10000000000")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await edge.app(scope, receive, send)
    assert sent[0]["status"] == 401


async def test_a_revoked_key_stops_working_within_the_cache_time(edge: Edge) -> None:
    store, now = edge.app.state.store, [0.0]
    authenticator = Authenticator(store, ttl=2.0, clock=lambda: now[0])

    async def make(db: Any) -> tuple[str, str, str]:
        project_id = await ensure_project(db, "revoked")
        return (project_id, *await create_key(db, project_id, "key"))

    project_id, key_id, key = await store.write(make)
    found = await authenticator.principal(key)
    assert found is not None
    assert (found.project_id, found.key_id) == (project_id, key_id)
    await store.write(lambda db: revoke_key(db, project_id, key_id, datetime.now(UTC)))
    assert await store.read(lambda db: authenticate(db, key)) is None
    assert await authenticator.principal(key) == found  # within the cache time
    now[0] = 2.1
    assert await authenticator.principal(key) is None


async def test_a_slow_body_does_nothing_once_its_key_is_revoked(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.auth.CACHE_SECONDS", 0.0)
    for path, body in (("keys", b'{"name": "late"}'), ("create_session", b'{"display_name": "late"}')):
        key = (await edge.client.post("keys", json={"name": "slow", "role": "owner"})).json()

        async def slowly(revoked: str | None, body: bytes = body) -> AsyncIterator[bytes]:
            yield body[:5]
            if revoked is not None:
                assert (await edge.client.delete(f"keys/{revoked}")).status_code == 204
            yield body[5:]

        client, headers = edge.with_key(key["key"]), {"Content-Type": "application/json"}
        assert (await client.post(path, content=slowly(None), headers=headers)).status_code == 200
        late = await client.post(path, content=slowly(key["info"]["key_id"]), headers=headers)
        assert (late.status_code, late.json()["error"]["code"]) == (401, "unauthenticated")
    keys = (await edge.client.get("keys")).json()["keys"]
    assert sum(each["name"] == "late" for each in keys) == 1
    sessions = (await edge.client.post("sessions/search", json={"display_name": "late"})).json()["sessions"]
    assert len(sessions) == 1


async def test_a_slow_body_does_nothing_once_its_key_may_do_less(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.auth.CACHE_SECONDS", 0.0)
    operator = edge.client
    project = (await operator.post("admin/projects", json={"name": "p"})).json()["project_id"]
    user = (await operator.post("admin/users", json={"name": "u"})).json()["user_id"]
    member = f"admin/projects/{project}/members/{user}"
    assert (await operator.put(member, json={"role": "owner"})).is_success
    mine = {"name": "k", "role": "owner", "user_id": user}
    client = edge.with_key((await operator.post(f"admin/projects/{project}/keys", json=mine)).json()["key"])

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"name": '
        assert (await operator.put(f"{member}?force=true", json={"role": "read-only"})).is_success
        yield b'"late", "role": "owner"}'

    late = await client.post("keys", content=slowly(), headers={"Content-Type": "application/json"})
    assert (late.status_code, late.json()["error"]["code"]) == (403, "forbidden")
    keys = (await operator.get(f"admin/projects/{project}/keys")).json()["keys"]
    assert [each["name"] for each in keys] == ["k"]


async def test_who_was_known_stays_known_when_keys_change_and_is_looked_up_again(edge: Edge) -> None:
    gone = (await edge.client.post("keys", json={"name": "gone"})).json()
    await edge.with_key(gone["key"]).get("limits")
    authenticator: Authenticator = edge.app.state.authenticator
    assert (await edge.client.delete(f"keys/{gone['info']['key_id']}")).status_code == 204
    assert authenticator.knows(gone["key"])
    assert (await edge.with_key(gone["key"]).get("limits")).status_code == 401
    assert not authenticator.knows(gone["key"])
    assert (await edge.client.get("limits")).status_code == 200


async def test_good_keys_are_cached_and_bad_ones_are_not(edge: Edge) -> None:
    class Counting:
        reads = 0

        async def look_up(self, work: Any) -> Any:
            self.reads += 1
            return await edge.app.state.store.look_up(work)

    store = Counting()
    authenticator = Authenticator(store)  # type: ignore[arg-type]
    for _ in range(3):
        assert await authenticator.principal(edge.app.state.dev_key) is not None
    assert store.reads == 1
    for _ in range(3):
        assert await authenticator.principal("tml-guess") is None
    assert store.reads == 4


async def test_tenants_do_not_see_each_other(edge: Edge) -> None:
    session_id = await edge.new_session()
    stranger = await edge.other_project()
    for answer in (
        await stranger.post("session_heartbeat", json={"session_id": session_id}),
        await stranger.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}}),
        await stranger.get(f"sessions/{session_id}"),
    ):
        nobody = await stranger.get("sessions/" + "0" * len(session_id))
        assert answer.status_code == nobody.status_code == 404
        assert answer.json()["detail"] == nobody.json()["detail"].replace("0" * len(session_id), session_id)
    assert (await stranger.get("sessions")).json() == {"sessions": []}
    assert (await edge.client.get("sessions")).json() == {"sessions": [session_id]}


def test_the_presented_key() -> None:
    assert presented_key([(b"x-api-key", b" k ")]) == "k"
    assert presented_key([(b"x-api-key", b"k"), (b"x-api-key", b"other")]) is None
    assert presented_key([(b"authorization", b"Bearer k")]) == "k"
    assert not is_public("/api/v1/files")
    assert is_public("/api/v1/files/x/y")
    assert httpx.URL(BASE).path == "/api/v1/"
