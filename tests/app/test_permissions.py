"""Every route with every key: who is let in, and what somebody is told who is not. The cases come from the routes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from app import errors
from app.main import create_app
from app.permissions import NOT_BY_TOKEN, PUBLIC, ROLE_PERMISSIONS, ROUTES, check_routes, held, permit
from app.settings import Settings
from schemas.roles import PERMISSIONS, ROLES, Role, lesser
from tests.app.conftest import Edge, running

APP = create_app(Settings())


def routes() -> Iterator[tuple[str, str, str]]:
    """(operation id, method, path) of every described route; parameters are filled in with what no id is."""
    for context in iter_route_contexts(APP.routes):
        route = context.original_route
        if isinstance(route, APIRoute) and (route.operation_id or route.include_in_schema):
            assert context.path is not None
            for method in sorted(route.methods):
                yield route.operation_id or "", method, re.sub(r"\{[^}]+\}", "nothing", context.path)


ALL = sorted(set(routes()))
KEYED = [each for each in ALL if each[0] not in PUBLIC]


in_shared_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    """One application for all cases: they must leave it as it is."""
    settings = Settings(
        data_dir=tmp_path_factory.mktemp("permissions") / "data",
        base_model=["acme/tiny=/nowhere"],
        shutdown_grace=1.0,
        pjwt_auth_enabled=True,
    )
    async with running(settings) as edge:
        yield edge


def told(answer: httpx.Response) -> str:
    """An error's body without what differs from request to request."""
    return re.sub(r'"request_id": "[^"]*"', "", answer.text)


async def send(client: httpx.AsyncClient, method: str, path: str, **options: Any) -> httpx.Response:
    """A request that no route can do anything with."""
    body = b"" if method in ("GET", "DELETE") else b"[]"
    headers = {"Content-Type": "application/json", **options.pop("headers", {})}
    return await client.request(method, f"http://localhost{path}", content=body, headers=headers, **options)


def test_the_table_knows_every_route_and_every_role() -> None:
    assert {name for name, _, _ in ALL} == {*ROUTES, *PUBLIC}
    assert len(ALL) > 70
    assert tuple(ROLE_PERMISSIONS) == ROLES
    assert {permission for needed in ROUTES.values() for permission in needed} == set(PERMISSIONS)
    for less, more in pairwise(ROLES):
        assert ROLE_PERMISSIONS[less] < ROLE_PERMISSIONS[more]
    for name, _, path in ALL:
        assert ("/admin/" in path or path == "/metrics") == (ROUTES.get(name) == ("admin",)), name


def _unknown(app: FastAPI) -> None:
    router = APIRouter()
    router.add_api_route("/api/v1/new", lambda: None, operation_id="new_route")
    app.include_router(router)


def _nameless(app: FastAPI) -> None:
    app.add_api_route("/api/v1/new", lambda: None)


def _with_body(app: FastAPI) -> None:
    def endpoint(body: dict[str, str]) -> None:
        """Its body is read by the framework."""

    app.add_api_route("/api/v1/new", endpoint, methods=["POST"], operation_id="telemetry")


def _mounted(app: FastAPI) -> None:
    app.mount("/new", FastAPI())


def _plain(app: FastAPI) -> None:
    app.add_route("/new", lambda request: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("add", [_unknown, _nameless, _with_body, _mounted, _plain])
def test_an_application_with_another_route_is_not_put_together(add: Callable[[FastAPI], None]) -> None:
    app = create_app(Settings())
    check_routes(app)
    add(app)
    with pytest.raises(RuntimeError, match="new"):
        check_routes(app)


def test_a_line_of_the_table_without_a_route_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTES, "gone_route", ("read",))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="gone_route"):
        create_app(Settings())


@in_shared_loop
async def test_a_route_without_a_line_answers_nobody(shared: Edge) -> None:
    app = FastAPI(dependencies=[Depends(permit)])
    errors.install(app)
    app.add_api_route("/new", lambda: "secret", operation_id="new_route")
    principal = await shared.app.state.authenticator.principal(shared.app.state.dev_key)

    async def with_principal(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["principal"] = principal
        await app(scope, receive, send)

    transport = httpx.ASGITransport(app=with_principal)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/new")
    assert (answer.status_code, "secret" in answer.text) == (403, False)


@in_shared_loop
async def test_no_route_answers_without_a_valid_key(shared: Edge) -> None:
    key, wrong = shared.app.state.dev_key, "tml-" + "A" * 43
    client = shared.without_key()
    ways: list[list[tuple[str, str]]] = [
        [],
        [("X-API-Key", wrong)],
        [("X-API-Key", "")],
        [("X-API-Key", key[:-1])],
        [("Authorization", f"bearer {key}")],
        [("Authorization", key)],
        [("X-API-Key", key), ("X-API-Key", wrong)],
        [("X-API-Key", key), ("Authorization", f"Bearer {wrong}")],
        [("X-API-Key", key), ("Authorization", "Bearer")],
        [("Api-Key", key)],
        [("Cookie", f"X-API-Key={key}")],
    ]
    for name, method, path in ALL:
        answers = []
        for headers in ways:
            request = client.build_request(method, f"http://localhost{path}?key={key}", content=b"[]")
            request.headers = httpx.Headers([*request.headers.raw, *((a.encode(), b.encode()) for a, b in headers)])
            answers.append(await client.send(request))
        if name in PUBLIC:
            assert 401 not in {answer.status_code for answer in answers}, path
            continue
        assert {answer.status_code for answer in answers} == {401}, (method, path)
        assert len({told(answer) for answer in answers}) == 1, (method, path)
        assert len({answer.headers["www-authenticate"] for answer in answers}) == 1, (method, path)


@pytest.mark.parametrize("role", ROLES)
@in_shared_loop
async def test_every_role_at_every_route(shared: Edge, role: Role) -> None:
    refused = 0
    client = shared.with_key(await shared.new_key(f"project of {role}", role))
    for name, method, path in KEYED:
        if name == "delete_own_api_key":
            client_of_case = shared.with_key(await shared.new_key(f"other of {role}", role))
            await shared.new_key(f"other of {role}", "owner")  # so that it is not the last one
        else:
            client_of_case = client
        answer = await send(client_of_case, method, path)
        allowed = not ROUTES[name] or bool(set(ROUTES[name]) & ROLE_PERMISSIONS[role])
        assert answer.status_code not in (401, 500), (name, answer.text)
        assert (answer.status_code != 403) == allowed, (name, answer.text)
        if not allowed:
            refused += 1
            _check_refusal(name, role, answer)
    assert (refused == 0) == (role == "admin")


def _check_refusal(name: str, role: Role, answer: httpx.Response) -> None:
    """It names what is missing, what the key is, and who has it."""
    message = answer.json().get("detail") or answer.json()["error"]["message"]
    assert " or ".join(ROUTES[name]) in message
    assert f"its role is {role}" in message
    first = next(each for each in ROLES if set(ROUTES[name]) & ROLE_PERMISSIONS[each])
    assert first in message.partition(f"its role is {role}")[2]


@pytest.mark.parametrize("scope", PERMISSIONS)
@in_shared_loop
async def test_every_scope_at_every_route(shared: Edge, scope: str) -> None:
    client = shared.with_key(await shared.new_key(f"scope {scope}", "admin", scopes=[scope]))
    for name, method, path in KEYED:
        if name == "delete_own_api_key":
            continue
        answer = await send(client, method, path)
        assert (answer.status_code != 403) == (not ROUTES[name] or scope in ROUTES[name]), (name, answer.text)
        if answer.status_code == 403:
            assert f"narrowed to the scopes {scope}" in answer.text


@in_shared_loop
async def test_a_scope_beyond_the_role_gives_nothing(shared: Edge) -> None:
    assert held("read-only", ["admin", "keys", "read"]) == {"read"}
    assert held("member", []) == frozenset()
    assert held("emperor") == held("", ["admin"]) == frozenset()
    key = await shared.new_key("beyond", "read-only", scopes=["admin"])
    assert (await shared.with_key(key).get("admin/models")).status_code == 403
    assert (await shared.with_key(key).get("sessions")).status_code == 403
    assert (await shared.with_key(key).get("auth/apikey/me")).status_code == 200


@in_shared_loop
async def test_a_token_does_what_its_key_does_but_for_keys_and_administration(shared: Edge) -> None:
    for role in ROLES:
        client = shared.with_key(await shared.new_key(f"tokens of {role}", role))
        token = (await client.post("auth/token", json={})).json()["jwt"]
        by_token = shared.with_key(token)
        for name, method, path in KEYED:
            if name == "delete_own_api_key":
                continue
            by_both = [(await send(each, method, path)).status_code for each in (client, by_token)]
            if set(ROUTES[name]) & NOT_BY_TOKEN:
                assert by_both[1] == 403, name
            else:
                assert (by_both[0] == 403) == (by_both[1] == 403), name
    answer = await by_token.get("keys")
    assert "the API key itself" in answer.json()["detail"]


@in_shared_loop
async def test_who_is_refused_has_no_body_read(shared: Edge) -> None:
    key = await shared.new_key("bodies", "read-only")

    async def receive() -> Any:
        raise AssertionError("the body was read")

    for name, method, path in KEYED:
        if method == "GET" or not ROUTES[name] or "read" in ROUTES[name]:
            continue
        sent: list[Any] = []

        async def keep(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"x-api-key", key.encode()), (b"content-length", b"10000000")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await shared.app(scope, receive, keep)
        assert sent[0]["status"] == 403, path


@in_shared_loop
async def test_admin_routes_tell_others_nothing_about_what_exists(shared: Edge) -> None:
    project = (await shared.client.get("admin/projects")).json()["projects"][0]["project_id"]
    [key] = (await shared.client.get(f"admin/projects/{project}/keys")).json()["keys"][:1]
    for role in ROLES[:-1]:
        client = shared.with_key(await shared.new_key("curious", role))
        for method, path in (
            ("GET", "admin/projects/{}"),
            ("DELETE", "admin/projects/{}"),
            ("GET", "admin/projects/{}/keys"),
            ("DELETE", f"admin/projects/{{}}/keys/{key['key_id']}"),
            ("GET", "admin/projects/{}/members"),
        ):
            answers = [await client.request(method, path.format(each)) for each in (project, "0" * 32)]
            assert [answer.status_code for answer in answers] == [403, 403]
            assert told(answers[0]) == told(answers[1])


def test_the_lesser_of_two_roles() -> None:
    for one in ROLES:
        for other in ROLES:
            assert lesser(one, other) == lesser(other, one) == ROLES[min(ROLES.index(one), ROLES.index(other))]
        assert lesser(one, "emperor") == lesser("emperor", one) == "emperor"
