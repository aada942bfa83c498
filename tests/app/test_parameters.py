"""Nothing behind the `?` is ignored: on every route, what it does not have, what has no name and what comes twice is
refused by name. So are headers of a route's own that come twice or say nothing."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi.params import Query
from fastapi.routing import APIRoute, iter_route_contexts

from app.public import is_page
from app.settings import Settings
from tests.app.conftest import Edge, running

ODD = ["=17", "=", "&=17", "%00=17", "%FF=17", "limit%20=17", "LIMIT=17", "limit[]=17", "limit;x=1", "%6Cimit%00=1"]
"""Names that are none, or that a careless reader takes for one that there is."""

TWINS: dict[Any, list[str]] = {
    int: ["1_0", "%2B1", "01", "%201", "1%20", "1.0", "1e1", "%D9%A3", ""],
    bool: ["1", "yes", "True", "t", ""],
}
"""Values that a lenient reader takes for a number or a truth."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_edge(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    """One application for all tests here: refused requests change nothing."""
    data_dir = tmp_path_factory.mktemp("query") / "data"
    async with running(Settings(data_dir=data_dir, base_model=["acme/tiny=/nowhere"], shutdown_grace=1.0)) as edge:
        yield edge


def routes(edge: Edge) -> Iterator[tuple[str, str, APIRoute]]:
    """Method, address and route of all there are; ids are made up."""
    for context in iter_route_contexts(edge.app.routes):
        route = context.original_route
        if isinstance(route, APIRoute):
            for method in sorted(context.methods or ()):
                yield method, re.sub(r"\{[^}]*\}", "x", str(context.path)), route


def declared(route: APIRoute) -> dict[str, Any]:
    return {field.alias: field for field in route.dependant.query_params}


async def _send(edge: Edge, method: str, path: str, query: str) -> httpx.Response:
    return await edge.client.request(method, f"http://localhost{path}?{query}")


def _error(answer: httpx.Response, path: str) -> tuple[str, str, str]:
    """Field, code and message, in each of the shapes of errors."""
    body = answer.json()
    error = body["error"]
    if "type" in body:
        return "", "", error["message"]
    if "detail" in body:
        return error["field"] or "", error["code"], body["detail"]
    return error["param"] or "", error["code"], error["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_every_route_refuses_what_it_does_not_have_and_says_what_it_has(open_edge: Edge) -> None:
    tried = 0
    for method, path, route in routes(open_edge):
        if is_page(path):
            continue
        answer = await _send(open_edge, method, path, "no_such=17")
        assert answer.status_code == 400, (method, path, answer.text)
        field, code, message = _error(answer, path)
        assert "'no_such' is not a query parameter" in message, (path, message)
        assert "(got '17')" in message, (path, message)
        assert (field, code) in (("no_such", "unsupported_parameter"), ("", "")), (path, field, code)
        for name in declared(route):
            assert name in message, (path, message)
        assert ("it takes none" in message) is not bool(declared(route)), (path, message)
        tried += 1
    assert tried > 100


@pytest.mark.asyncio(loop_scope="module")
async def test_names_are_taken_letter_by_letter(open_edge: Edge) -> None:
    tried = 0
    for number, (method, path, route) in enumerate(routes(open_edge)):
        odd = ODD if route.dependant.query_params else [ODD[number % len(ODD)]]
        for query in odd if not is_page(path) else ():
            answer = await _send(open_edge, method, path, query)
            assert answer.status_code == 400, (method, path, query, answer.text)
            assert "accepted are" in answer.text or "it takes none" in answer.text, (path, query, answer.text)
            tried += 1
    assert tried > 100


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_taken_once_is_refused_twice(open_edge: Edge) -> None:
    once = many = 0
    for method, path, route in routes(open_edge):
        for name, field in declared(route).items():
            assert isinstance(field.field_info, Query)
            answer = await _send(open_edge, method, path, f"{name}=1&{name}=2")
            if "list[" in str(field.field_info.annotation):
                many += 1
                assert "given twice" not in answer.text
                continue
            once += 1
            assert answer.status_code == 400, (method, path, answer.text)
            field_name, code, message = _error(answer, path)
            assert f"{name} is given twice ('1' and '2')" in message
            assert (field_name, code) in ((name, "repeated_parameter"), ("", ""))
    assert once > 25
    assert many > 1


@pytest.mark.asyncio(loop_scope="module")
async def test_pages_may_be_asked_for_with_anything(open_edge: Edge) -> None:
    for path in ("/docs", "/openapi.json", "/console/", "/console/app.js", "/docs/start.js"):
        assert (await open_edge.without_key().get(f"http://localhost{path}?v=3&v=4")).status_code == 200, path
    page = await open_edge.without_key().get("http://localhost/playground?mode=checkpoint&checkpoint=x")
    assert (page.status_code, page.headers["Location"]) == (307, "./console/#/playground?mode=checkpoint&checkpoint=x")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_key_and_what_it_may_do_come_first(open_edge: Edge) -> None:
    """Whoever may not use a route learns nothing of its parameters."""
    assert (await open_edge.without_key().get("training_runs", params={"no_such": 1})).status_code == 401
    reader = open_edge.with_key(await open_edge.new_key("readers", "read-only"))
    assert (await reader.post("optim_step", params={"no_such": 1})).status_code == 403


@pytest.mark.asyncio(loop_scope="module")
async def test_what_clients_send_is_taken(open_edge: Edge) -> None:
    """The SDK's, the console's, the command line's; and a question mark with nothing behind it."""
    for address in (
        "training_runs?limit=20&offset=0&access_scope=owned",
        "training_runs?limit=100&include_metrics=true",
        "sessions?limit=20&offset=0&access_scope=accessible",
        "checkpoints?limit=100&offset=0",
        "audit?event_type=all&day=2026-07-13",
        "billing/usage/checkpoints/current",
        "training_runs?",
        "training_runs?&&",
    ):
        answer = await open_edge.client.get(address)
        assert answer.status_code == 200, (address, answer.text)
    for address in ("v1/messages", "v1/messages/count_tokens", "anthropic/api/v1/messages"):
        answer = await open_edge.client.post(f"http://localhost/{address}?beta=true", json={})
        assert "model" in answer.json()["error"]["message"], answer.text


ONCE = [
    ("create_session", "X-Idempotency-Key"),
    ("copy_weights", "X-Idempotency-Key"),
    ("copy_weights", "X-Tinker-Weights-Access-Token"),
    ("checkpoints/import", "X-Idempotency-Key"),
    ("optim_step", "Content-Type"),
    ("forward_backward", "Content-Encoding"),
    ("http://localhost/v1/messages", "anthropic-version"),
]


@pytest.mark.asyncio(loop_scope="module")
async def test_headers_with_a_meaning_are_taken_once_and_not_empty(open_edge: Edge) -> None:
    for path, name in ONCE:
        answer = await open_edge.client.post(
            path, content=b"{}", headers=[(name, "tml-one"), (name.lower(), "tml-two")]
        )
        assert answer.status_code == 400, (path, answer.text)
        assert f"the header {name.lower()} is given twice" in answer.text
        assert "tml-one" not in answer.text
        if name.startswith("X-"):
            answer = await open_edge.client.post(path, content=b"{}", headers={name: ""})
            assert (answer.status_code, answer.json()["error"]["field"]) == (400, name), (path, answer.text)


@pytest.mark.asyncio(loop_scope="module")
async def test_headers_without_a_meaning_are_let_through(open_edge: Edge) -> None:
    """As everywhere in HTTP; the SDK sends some of its own."""
    extra = [("X-Stainless-Lang", "python"), ("X-Tinker-Request-Iteration", "0"), ("X-Tinker-Request-Iteration", "1")]
    accepts = [("Accept", "application/json"), ("Accept", "application/x-protobuf")]
    twice = [("X-Idempotency-Key", "one"), ("X-Idempotency-Key", "two")]
    assert (await open_edge.client.get("training_runs", headers=[*extra, *accepts, *twice])).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_numbers_and_truths_are_written_in_one_way(open_edge: Edge) -> None:
    """So that a signed address has no twins, and nothing is taken that the description does not have."""
    tried = 0
    for method, path, route in routes(open_edge):
        for name, field in declared(route).items():
            kind = field.field_info.annotation
            odd = {
                int: ["1_0", "%2B1", "01", "%201", "1%20", "1.0", "1e1", "%D9%A3", ""],
                bool: ["1", "yes", "True", "t"],
            }
            for value in odd.get(kind, ()):
                answer = await _send(open_edge, method, path, f"{name}={value}")
                assert answer.status_code == 400, (path, name, value, answer.text)
                assert _error(answer, path)[0] == name, answer.text
                tried += 1
    assert tried > 100
    for address in ("training_runs?limit=1&include_metrics=false", "sessions?offset=0&limit=1000"):
        assert (await open_edge.client.get(address)).status_code == 200


@pytest.mark.asyncio(loop_scope="module")
async def test_files_of_the_console_are_sent_whole(open_edge: Edge) -> None:
    whole = await open_edge.client.get("http://localhost/console/app.js")
    for ranges in ("bytes=0-0", "bytes=-0", "bytes=5-2", "lines=1-2", "bytes=" + ",".join(["0-0"] * 5000)):
        answer = await open_edge.client.get("http://localhost/console/app.js", headers={"Range": ranges})
        assert (answer.status_code, answer.content) == (200, whole.content), ranges
