"""SQLite as the store uses it: where the file is, how connections are set up, how a new one is prepared.

WAL, so that readers and the writer do not wait for each other; synchronous=FULL, so that a commit is on disk; foreign
keys on. SQLAlchemy emits BEGIN itself, because the driver's own idea of transactions breaks savepoints and DDL.
Not responsible for who uses the connections when.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import aiosqlite
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from schemas.errors import InvalidRequest
from store.direct_connections import LookupConnection, WriterConnection
from store.files import fsync_folder, make_private_folder
from store.migrate import migrate_to_head

_BUSY_MILLISECONDS = 10_000
_MAX_WAL_BYTES = 64 * 1024 * 1024


def database_path(data_dir: Path, url: str | None) -> Path:
    """The database file: of the URL if there is one, else in the data folder.

    Raises:
        InvalidRequest: not `sqlite+aiosqlite:///PATH` with the path of a file.
    """
    if url is None:
        return data_dir / "tinsmith.db"
    accepted = "accepted is sqlite+aiosqlite:///PATH with the path of a file"
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InvalidRequest(f"database_url is not a URL; {accepted}", field="database_url") from None
    name = parsed.database
    if parsed.drivername != "sqlite+aiosqlite":
        raise InvalidRequest(f"database_url has scheme {parsed.drivername!r}; {accepted}", field="database_url")
    if not name or name.startswith((":memory:", "file:")) or parsed.query or parsed.host:
        raise InvalidRequest(f"database_url names no file, or has options; {accepted}", field="database_url")
    return Path(name)


def prepare_database(path: Path) -> None:
    """Create the file (mode 0600; its WAL takes the same mode) if it is missing and run the migrations. Blocking.

    Raises:
        Unavailable: its schema is newer than this version.
        OSError, SQLAlchemyError: it cannot be used.
    """
    make_private_folder(path.parent)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    engine = create_engine(_url("sqlite+pysqlite", path), poolclass=NullPool)
    _set_up(engine, begin="BEGIN IMMEDIATE", pragmas=("journal_mode=WAL",))
    try:
        with engine.begin() as connection:
            migrate_to_head(connection)
    finally:
        engine.dispose()
    fsync_folder(path.parent)


def write_engine(path: Path) -> AsyncEngine:
    """One connection, whose transactions take the write lock at their begin."""

    async def connect() -> aiosqlite.Connection:
        return await WriterConnection(path)

    engine = create_async_engine(
        _url("sqlite+aiosqlite", path), pool_size=1, max_overflow=0, async_creator=connect, hide_parameters=True
    )
    _set_up(engine.sync_engine, begin="BEGIN IMMEDIATE", pragmas=(f"journal_size_limit={_MAX_WAL_BYTES}",))
    return engine


def read_engine(path: Path, connections: int) -> AsyncEngine:
    """Connections that cannot write; each transaction sees one state of the database."""
    engine = create_async_engine(
        _url("sqlite+aiosqlite", path), pool_size=connections, max_overflow=0, hide_parameters=True
    )
    _set_up(engine.sync_engine, begin="BEGIN", pragmas=("query_only=ON",))
    return engine


def lookup_engine(path: Path) -> AsyncEngine:
    """One connection that cannot write, used without a change of threads."""

    async def connect() -> aiosqlite.Connection:
        return await LookupConnection(path)

    engine = create_async_engine(
        _url("sqlite+aiosqlite", path), pool_size=1, max_overflow=0, async_creator=connect, hide_parameters=True
    )
    _set_up(engine.sync_engine, begin="BEGIN", pragmas=("query_only=ON",))
    return engine


def _url(driver: str, path: Path) -> URL:
    return URL.create(driver, database=str(path))


def _set_up(engine: Engine, *, begin: str, pragmas: tuple[str, ...]) -> None:
    # aiosqlite logs every statement at DEBUG with its values: key digests, prompts. So does an error of SQLAlchemy,
    # without `hide_parameters`.
    logging.getLogger("aiosqlite").setLevel(logging.WARNING)
    every = (f"busy_timeout={_BUSY_MILLISECONDS}", "synchronous=FULL", "foreign_keys=ON")

    def connect(connection: Any, record: object) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (*every, *pragmas):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def start(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    event.listen(engine, "connect", connect)
    event.listen(engine, "begin", start)
