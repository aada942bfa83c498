"""The schema that the migrations make is the schema that the code means."""

from __future__ import annotations

import logging
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, inspect

from schemas.errors import Unavailable
from store.connections import prepare_database
from store.database import Store
from store.tables import metadata


def test_head_equals_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    prepare_database(path)
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        found = inspect(connection)
        for table in metadata.sorted_tables:
            primary = found.get_pk_constraint(table.name)["constrained_columns"]
            assert primary == [column.name for column in table.primary_key.columns]
            nullable = {column["name"]: column["nullable"] for column in found.get_columns(table.name)}
            assert nullable == {column.name: column.nullable for column in table.columns}
    engine.dispose()


def test_migrating_again_changes_nothing_and_is_quiet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.db"
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            prepare_database(path)
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


def test_works_from_any_working_directory_without_alembic_ini(tmp_path: Path) -> None:
    script = "import pathlib; from store.connections import prepare_database; prepare_database(pathlib.Path('x.db'))"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.db"]


async def test_newer_schema_is_refused_and_left_as_it_is(data_dir: Path) -> None:
    await (await Store.open(data_dir)).close()
    with sqlite3.connect(data_dir / "tinsmith.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(Unavailable, match="schema 9999, which this version does not know") as refused:
        await Store.open(data_dir)
    assert refused.value.hint is not None
    assert "newer version" in refused.value.hint
    with sqlite3.connect(data_dir / "tinsmith.db") as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("9999",)]


def test_migration_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE operations (something)")  # in the way of the last table
    with pytest.raises(Exception, match="already exists"):
        prepare_database(path)
    with sqlite3.connect(path) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    assert names == [("operations",)]
