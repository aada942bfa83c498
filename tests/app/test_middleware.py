"""What surrounds every request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from app.lifecycle import Lifecycle
from app.logging import JsonFormatter, TextFormatter
from app.middleware import HostCheck
from app.settings import Settings
from schemas.errors import InvalidRequest
from tests.app.conftest import Edge, running


async def test_request_ids_are_taken_or_made_and_echoed(edge: Edge) -> None:
    answer = await edge.client.get("sessions", headers={"X-Request-Id": "mine-1.a_b"})
    assert answer.headers["x-request-id"] == "mine-1.a_b"
    for bad in ("", "a b", "x" * 65, "a;b"):
        answer = await edge.client.get("sessions", headers={"X-Request-Id": bad})
        assert len(answer.headers["x-request-id"]) == 32


async def test_security_headers_and_no_cors(edge: Edge) -> None:
    answer = await edge.client.get("sessions", headers={"Origin": "http://evil.example"})
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-frame-options"] == "DENY"
    preflight = await edge.client.options(
        "create_session", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code == 405
    for response in (answer, preflight):
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_the_access_line_has_ids_and_no_secrets(edge: Edge, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "app.access")
    await edge.client.post("create_session", json={"tags": ["private-words"]})
    await edge.client.post("create_session?token=tml-in-query", json={"tags": ["private-words"]})
    await edge.client.get("no%0Asuch")
    lines = [record for record in caplog.records if record.name == "app.access"]
    formatted = [TextFormatter().format(record) for record in lines] + [JsonFormatter().format(r) for r in lines]
    assert "POST /api/v1/create_session 200" in formatted[0]
    assert vars(lines[0])["key_id"]
    assert vars(lines[0])["ms"] >= 0
    assert len(vars(lines[0])["request_id"]) == 32
    for text in formatted:
        assert "\n" not in text
        for secret in (edge.app.state.dev_key, "private-words", "tml-in-query"):
            assert secret not in text


def test_log_lines_cannot_be_forged() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "said %s", ("a\nERROR forged\x1b[31m",), None)
    text = TextFormatter().format(record)
    assert "\n" not in text
    assert "\x1b" not in text
    assert "\\nERROR forged" in text


@pytest.mark.parametrize(
    ("settings", "host", "status"),
    [
        ({}, "localhost:8410", 200),
        ({}, "LOCALHOST", 200),
        ({}, "127.0.0.1:8410", 200),
        ({}, "[::1]:8410", 200),
        ({}, "10.1.2.3", 200),
        ({}, "app.localhost", 200),
        ({}, "evil.example", 400),
        ({}, "localhost.evil.example", 400),
        ({}, "localhost:80@evil.example", 400),
        ({}, "evil.example/.localhost", 400),
        ({}, "127.0.0.1:80:80", 400),
        ({}, "[::1]evil.example", 400),
        ({}, "::1", 200),
        ({}, "", 400),
        ({"allowed_hosts": ["tinsmith.internal"]}, "tinsmith.internal:80", 200),
        ({"allowed_hosts": ["tinsmith.internal"]}, "evil.example", 400),
        ({"allowed_hosts": ["*"]}, "evil.example", 200),
        ({"host": "box.lan"}, "box.lan", 200),
    ],
)
async def test_host_check(
    make_settings: Callable[..., Settings], settings: dict[str, Any], host: str, status: int
) -> None:
    async with running(make_settings(**settings)) as edge:
        answer = await edge.without_key().get("healthz", headers={"Host": host})
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["code"] == "unknown_host"
            assert "--allowed-hosts" in answer.json()["detail"]


async def test_two_host_headers_are_refused() -> None:
    async def never(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("let through")

    check = HostCheck(never, host="127.0.0.1", allowed=())
    scope = {"type": "http", "headers": [(b"host", b"localhost"), (b"host", b"evil.example")]}
    with pytest.raises(InvalidRequest):
        await check(scope, None, None)  # type: ignore[arg-type]


async def test_draining_sends_new_work_away_and_lets_results_out(edge: Edge) -> None:
    session_id = await edge.new_session()
    lifecycle = edge.app.state.lifecycle
    lifecycle.draining = True
    refused = await edge.client.post("create_session", json={})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert refused.json()["error"]["code"] == "unavailable"
    assert (await edge.client.post("forward_backward", content=b"")).status_code == 503
    assert (await edge.client.post("session_heartbeat", json={"session_id": session_id})).status_code == 200
    assert (await edge.client.post("retrieve_future", json={"request_id": "nothing"})).status_code == 404
    assert (await edge.client.get("sessions")).status_code == 200
    ready = await edge.without_key().get("readyz")
    assert (ready.status_code, ready.json()["status"]) == (503, "not_ready")
    done = await edge.client.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}})
    assert done.status_code == 200


async def test_draining_happens_once_and_everybody_waits_for_it(edge: Edge) -> None:
    stopped: list[float] = []
    release = asyncio.Event()

    async def stop(grace: float) -> None:
        stopped.append(grace)
        await release.wait()

    lifecycle = Lifecycle(7.0)
    lifecycle.on_drain(stop)
    waiters = [asyncio.create_task(lifecycle.drain()) for _ in range(3)]
    await asyncio.sleep(0)
    assert lifecycle.draining
    await asyncio.sleep(0.01)
    assert stopped == [7.0]
    assert not any(waiter.done() for waiter in waiters)
    release.set()
    await asyncio.gather(*waiters)


async def test_control_bodies_are_small_and_batches_may_be_large(edge: Edge) -> None:
    large = b'{"tags": ["' + b"x" * 5_000_000 + b'"]}'
    headers = {"Content-Type": "application/json"}
    assert (await edge.client.post("create_session", content=large, headers=headers)).status_code == 413
    batch = await edge.client.post("forward_backward", content=large, headers=headers)
    assert batch.status_code == 400
