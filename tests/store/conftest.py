"""Fixtures of the store's tests: an open store on either database in a folder of its own, two projects, a factory.

PostgreSQL is started once for all tests; its database is emptied after each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import cast

import pytest

from store.database import Store
from store.keys import ensure_project
from store.tables import metadata
from tests.store.factories import NOW, Make
from tests.support.object_server import CREDENTIALS, ObjectServer, object_server
from tests.support.postgres import Postgres, binaries

DATABASE = "tinsmith"
only_sqlite = pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
only_postgres = pytest.mark.parametrize("backend", ["postgresql"], indirect=True)


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


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server."""
    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    server = Postgres()
    try:
        server.create()
        server.create_database(DATABASE)
        yield server
    finally:
        server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request: pytest.FixtureRequest) -> str:
    """Which database; `only_sqlite` and `only_postgres` leave one out."""
    return cast(str, request.param)


@pytest.fixture
async def database_url(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str | None]:
    """Where an empty database is; None: SQLite's file in the data folder."""
    if backend == "sqlite":
        yield None
        return
    server: Postgres = request.getfixturevalue("postgres")
    yield server.url(DATABASE)
    connection = await server.connect(DATABASE)
    try:
        tables = ", ".join(table.name for table in metadata.sorted_tables)
        await connection.execute(f"TRUNCATE {tables} RESTART IDENTITY")
    finally:
        await connection.close()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
async def store(data_dir: Path, database_url: str | None) -> AsyncIterator[Store]:
    opened = await Store.open(data_dir, database_url)
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
