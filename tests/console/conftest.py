"""One server on a tiny model and one browser for all tests of the console; without a browser they are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.console.traffic import Client
from tests.support.server import RunningServer, serve

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Where a Chromium is: TINSMITH_TEST_CHROMIUM, or the first one on the path."""
    named = os.environ.get("TINSMITH_TEST_CHROMIUM")
    return named or next((found for name in CHROMIUM if (found := shutil.which(name))), None)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of a tiny model, which the browser reaches by another address than its public one: a forwarded port."""
    from tests.support.tiny_model import make_tiny_model

    folder = make_tiny_model(tmp_path_factory.mktemp("base") / "tiny", context_length=512)
    data_dir = tmp_path_factory.mktemp("console") / "data"
    options = ["--base-model", f"acme/tiny={folder}", "--log-level", "warning"]
    with serve(data_dir, [*options, "--public-url", "https://tinsmith.example/behind"]) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Client:
    """A client program beside the browser."""
    return Client.of(server.url, server.key)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-console does it")
    found = chromium()
    if found is None:
        pytest.skip("there is no Chromium: apt-get install chromium, or name one in TINSMITH_TEST_CHROMIUM")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def context(browser: Any, server: RunningServer) -> Iterator[Any]:
    """A browser of its own for each test, that is watched: it asks nobody else, the policy refuses nothing, no error is
    left uncaught."""
    made = browser.new_context(viewport={"width": 1360, "height": 900}, accept_downloads=True)
    foreign: list[str] = []
    complaints: list[str] = []
    home = urlsplit(server.url).netloc
    made.on("request", lambda request: None if _is_home(request.url, home) else foreign.append(request.url))
    made.on("weberror", lambda error: complaints.append(str(error.error)))
    made.on("console", lambda message: complaints.append(message.text) if _is_refusal(message) else None)
    made.set_default_timeout(20_000)
    yield made
    made.close()
    assert foreign == []
    assert complaints == []


def _is_home(url: str, home: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("blob", "data") or parts.netloc == home


def _is_refusal(message: Any) -> bool:
    return message.type == "error" and "Content Security Policy" in message.text


@pytest.fixture
def page(context: Any, server: RunningServer) -> Any:
    """A page that is signed in."""
    return signed_in(context, server)


def signed_in(context: Any, server: RunningServer, key: str | None = None) -> Any:
    """A new page, after a key was typed: the server's first one if none is named."""
    page = context.new_page()
    page.goto(f"{server.url}/")
    page.get_by_label("API key").fill(key or server.key)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("heading", name="Runs", level=1).wait_for()
    return page


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    return (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
