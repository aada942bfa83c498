"""Fixtures of the store's tests: an open store in a folder of its own, two projects, a factory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from store.database import Store
from store.keys import ensure_project
from tests.store.factories import NOW, Make
from tests.support.object_server import CREDENTIALS, ObjectServer, object_server


@pytest.fixture(scope="session")
def objects() -> Iterator[ObjectServer]:
    """A real S3 server; tests keep apart by their prefixes."""
    with object_server() as server:
        yield server


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in the usual variables."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
async def store(data_dir: Path) -> AsyncIterator[Store]:
    opened = await Store.open(data_dir)
    yield opened
    await opened.close()


@pytest.fixture
async def project(store: Store) -> str:
    return await store.write(lambda db: ensure_project(db, "mine"))


@pytest.fixture
async def other_project(store: Store) -> str:
    return await store.write(lambda db: ensure_project(db, "theirs"))


@pytest.fixture
def now() -> datetime:
    return NOW


@pytest.fixture
def make(store: Store, project: str) -> Make:
    return Make(store, project)
