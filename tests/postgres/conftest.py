"""PostgreSQL, a tiny base model and a quiet SDK for servers that share a database."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres import Postgres, binaries
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    server = Postgres()
    try:
        server.create()
        yield server
    finally:
        server.stop()


@pytest.fixture
def database_url(postgres: Postgres) -> str:
    """An empty database that no other test has."""
    name = f"t{secrets.token_hex(8)}"
    postgres.create_database(name)
    return postgres.url(name)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(autouse=True)
def quiet_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the SDK's environment leaks in."""
    for name in [name for name in os.environ if name.startswith("TINKER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
