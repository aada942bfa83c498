"""One real server on the tiny model for all tests here, and the unmodified SDK aimed at it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import RunningServer, serve
from tests.support.tiny_model import make_tiny_model

MODEL = "acme/tiny"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[RunningServer]:
    """A `tinsmith serve` process."""
    data_dir = tmp_path_factory.mktemp("server") / "data"
    arguments = ["--base-model", f"{MODEL}={tiny_folder}", "--threads", "1", "--shutdown-grace", "2"]
    arguments += ["--log-requests", "true"]
    with serve(data_dir, arguments) as running:
        yield running


@pytest.fixture
def service(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The SDK's ServiceClient, closed at the end."""
    for name in [name for name in os.environ if name.startswith("TINKER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import tinker

    with tinker.ServiceClient(base_url=server.url, api_key=server.key) as client:
        yield client
