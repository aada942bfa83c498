"""Data folders of every earlier version of the schema open, with all that is in them; newer ones are refused unchanged.

A new revision is covered by being there: the tests fill every table as it was before, and open the folder.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine

from schemas.errors import Unavailable
from store.custom_losses import size_of
from store.database import Store
from store.migrate import known_schemas
from store.read_only import open_database, require_known_schema

KNOWN = known_schemas()


@contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection, connection:
        yield connection


def _make(path: Path, revision: str) -> None:
    """An empty database as that version made it."""
    path.parent.mkdir(mode=0o700)
    config = Config()
    config.set_main_option("script_location", "store:migrations")
    config.set_main_option("path_separator", "os")
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    engine.dispose()


def _value(kind: str, name: str) -> Any:
    """Something that a column of this kind takes; rows of different tables refer to each other by these values."""
    if "INT" in kind:
        return 1
    if kind == "BLOB":
        return b"\x01"
    if kind == "DATETIME":
        return "2026-01-02 03:04:05.000000"
    if kind == "JSON":
        return "{}"
    if kind == "BOOLEAN":
        return 0
    if kind in ("FLOAT", "REAL"):
        return 0.5
    return f"a {name}"


def _fill(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """One row in every table; returns what is in them."""
    rows = {}
    with _database(path) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            if table == "alembic_version" or table.startswith("sqlite_"):
                continue
            columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
            values = [_value(kind.split("(")[0], name) for _, name, kind, *_ in columns]
            names = ", ".join(name for _, name, *_ in columns)
            connection.execute(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(values))})", values)
            rows[table] = connection.execute(f"SELECT {names} FROM {table}").fetchall()
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    assert len(rows) >= 10
    return rows


def _contents(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, which names the process that looked last."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.name != "lock"}


@pytest.mark.parametrize("revision", KNOWN)
async def test_a_folder_of_every_known_version_opens_with_its_rows(data_dir: Path, revision: str) -> None:
    path = data_dir / "tinsmith.db"
    _make(path, revision)
    before = _fill(path)
    await (await Store.open(data_dir)).close()
    with _database(path) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [(KNOWN[0],)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        for table, rows in before.items():
            assert len(connection.execute(f"SELECT * FROM {table}").fetchall()) == len(rows), table
        if revision < "0005":  # keys had no roles, and could do what an owner can
            assert connection.execute("SELECT role, scopes, user_id FROM api_keys").fetchall() == [
                ("owner", None, None)
            ]
        if revision < "0008":  # what a loss counts for was not kept
            [(graph, size)] = connection.execute("SELECT graph, size_bytes FROM custom_losses").fetchall()
            assert size == size_of(graph)


def test_the_versions_are_one_line_that_only_grows() -> None:
    assert [f"{number:04d}" for number in range(len(KNOWN), 0, -1)] == KNOWN


async def test_a_newer_folder_is_refused_with_both_versions_and_left_as_it_is(data_dir: Path) -> None:
    await (await Store.open(data_dir)).close()
    path = data_dir / "tinsmith.db"
    with _database(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.execute("CREATE TABLE of_the_future (column_of_the_future)")
    before = _contents(data_dir)
    with pytest.raises(Unavailable) as refused:
        await Store.open(data_dir)
    assert refused.value.code == "newer_schema"
    for words in ("schema 9999", f"tinsmith {version('tinsmith')}", f"newest is {KNOWN[0]}"):
        assert words in refused.value.message
    with open_database(data_dir) as connection, pytest.raises(Unavailable, match="schema 9999"):
        require_known_schema(connection)
    assert _contents(data_dir) == before
