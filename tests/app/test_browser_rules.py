"""What a browser is told: headers of every answer, other origins, our own pages; and which proxy is believed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from app import security_headers
from app.routes import docs
from app.settings import Settings
from tests.app.conftest import BASE, Edge, running

EVERY_ANSWER = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}
SERVER = "http://localhost"
ORIGIN = "https://app.example.org"


async def test_every_answer_has_the_headers(edge: Edge) -> None:
    async with edge.without_key() as stranger:
        answers = [
            await edge.client.get("sessions"),
            await edge.client.get("no-such-route"),
            await edge.client.post("create_session", content=b"{"),
            await edge.client.get("sessions", headers={"Host": "evil.example"}),
            await stranger.get("sessions"),
            await stranger.get("healthz"),
            await stranger.get(f"{SERVER}/openapi.json"),
            await stranger.get("files/x/y?expires=1&signature=z"),
            await stranger.options("sessions"),
        ]
    assert {answer.status_code for answer in answers} == {200, 400, 401, 404, 415}
    for answer in answers:
        assert {name: answer.headers.get(name) for name in EVERY_ANSWER} == EVERY_ANSWER
        assert answer.headers["content-security-policy"] == security_headers.DATA
        assert answer.headers["cache-control"] == "no-store"
        assert "set-cookie" not in answer.headers
        assert "strict-transport-security" not in answer.headers, "not without TLS"
        assert "server" not in answer.headers


def test_what_is_refused_before_there_is_a_request_has_them_too() -> None:
    sent = security_headers.raw_headers().decode()
    for name, value in EVERY_ANSWER.items():
        assert f"{name}: {value}\r\n" in sent
    assert f"content-security-policy: {security_headers.DATA}\r\n" in sent


async def test_the_page_loads_nothing_from_elsewhere_and_nothing_inline(edge: Edge) -> None:
    async with edge.without_key() as browser:
        page = await browser.get(f"{SERVER}/docs")
        assert page.status_code == 200
        assert page.headers["content-security-policy"] == security_headers.PAGE
        named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        files = [name for name in named if not name.startswith("data:")]
        assert len(files) == 3
        for name in files:
            assert "//" not in name
            answer = await browser.get(f"{SERVER}/{name}")
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(("text/css", "text/javascript"))
    assert not re.search(r"<script(?! src)|<style| on\w+=|style=", page.text)
    assert "//" not in docs.START
    assert "validatorUrl: null" in docs.START, "else it would send the API's address to a service elsewhere"
    assert "unsafe" not in security_headers.PAGE
    assert "http" not in security_headers.PAGE


@pytest.mark.parametrize("path", ["/docsx", "/api/docs", "/consoles", "/"])
def test_only_pages_have_the_rights_of_pages(path: str) -> None:
    assert security_headers.policy(path) == security_headers.DATA
    assert security_headers.policy("/console/app.js") == security_headers.PAGE


async def preflight(client: httpx.AsyncClient, origin: str) -> httpx.Response:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "X-API-Key"}
    return await client.options("create_session", headers=asked)


async def test_no_other_origin_may_ask_by_default(edge: Edge) -> None:
    async with edge.without_key() as browser:
        for answer in (await preflight(browser, ORIGIN), await browser.get("healthz", headers={"Origin": ORIGIN})):
            assert not [name for name in answer.headers if name.startswith("access-control")]
        assert (await preflight(browser, ORIGIN)).status_code == 401


async def test_an_allowed_origin_may_ask_and_no_other(make_settings: Callable[..., Settings]) -> None:
    async with running(make_settings(allowed_origins=ORIGIN)) as edge, edge.without_key() as browser:
        allowed = await preflight(browser, ORIGIN)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "access-control-allow-credentials" not in allowed.headers, "there are no cookies to send along"
        assert allowed.headers["x-content-type-options"] == "nosniff"
        refusal = await browser.get("sessions", headers={"Origin": ORIGIN})
        assert (refusal.status_code, refusal.headers["access-control-allow-origin"]) == (401, ORIGIN)
        for other in ("https://app.example.org.evil.example", "http://app.example.org", "null"):
            answer = await preflight(browser, other)
            assert answer.status_code == 400
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("bad", ["*", "app.example.org", "https://app.example.org/", "https://*.example.org", "null"])
def test_what_is_no_origin_is_refused(bad: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin"):
        Settings(allowed_origins=(bad,))


@pytest.mark.parametrize("bad", ["*", "proxy.example.org", "10.0.0.1/8", "10.0.0.0/33"])
def test_what_is_no_network_is_refused(bad: str) -> None:
    with pytest.raises(ValidationError, match="is neither an IP address nor a network"):
        Settings(trusted_proxies=(bad,))


async def scheme_seen(edge: Edge, peer: str) -> bool:
    """Whether a request from `peer`, which says that it came by HTTPS, is taken to have done so."""
    transport = httpx.ASGITransport(app=edge.app, client=(peer, 5000))
    async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
        answer = await client.get("healthz", headers={"X-Forwarded-Proto": "https", "Host": "127.0.0.1"})
        return "strict-transport-security" in answer.headers


async def test_only_a_trusted_proxy_is_believed(make_settings: Callable[..., Settings], edge: Edge) -> None:
    assert not await scheme_seen(edge, "127.0.0.1"), "by default nobody is"
    app_settings: dict[str, Any] = {"trusted_proxies": "10.9.0.0/16, 192.0.2.7"}
    other = make_settings(**app_settings, data_dir=edge.settings.data_dir.parent / "other")
    async with running(other) as behind:
        seen = await asyncio.gather(*(scheme_seen(behind, peer) for peer in ("10.9.1.1", "192.0.2.7", "10.8.1.1")))
        assert seen == [True, True, False]
