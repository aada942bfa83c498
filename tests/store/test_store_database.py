"""The writer, the readers, and what survives."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, func, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import InvalidRequest, Unavailable
from store.bodies import Bodies
from store.database import Store
from store.keys import ensure_project
from store.operations import get_operation
from store.tables import Project
from tests.store.conftest import only_sqlite
from tests.store.factories import Make


async def _names(db: AsyncSession) -> set[str]:
    return set(await db.scalars(select(Project.name)))


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def _python(*lines: str, argument: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "\n".join(lines), argument]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)


@only_sqlite
async def test_settings_of_every_connection(store: Store) -> None:
    async def pragmas(db: AsyncSession) -> dict[str, Any]:
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        return {name: await db.scalar(text(f"PRAGMA {name}")) for name in names}

    expected = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 10_000}
    assert await store.write(pragmas) == expected
    assert await store.read(pragmas) == expected


async def test_failing_write_leaves_nothing_and_spoils_nothing(store: Store) -> None:
    commits: list[int] = []
    event.listen(store._writes.sync_engine, "commit", lambda connection: commits.append(1))

    async def failing(db: AsyncSession) -> None:
        await ensure_project(db, "half")
        raise KeyError("mine")

    async def broken_sql(db: AsyncSession) -> None:
        await ensure_project(db, "half too")
        await db.execute(text("INSERT INTO nowhere VALUES (1)"))

    good = [store.write(lambda db, n=n: ensure_project(db, f"p{n}")) for n in range(20)]
    bad = [store.write(failing), store.write(broken_sql)]
    outcomes = await asyncio.gather(*good[:10], *bad, *good[10:], return_exceptions=True)

    errors = [o for o in outcomes if isinstance(o, BaseException)]
    assert isinstance(errors[0], KeyError)
    assert isinstance(errors[1], DBAPIError)
    assert await store.read(_names) == {f"p{n}" for n in range(20)}
    assert len(commits) < 22, "writes that wait together share commits, also on a busy machine"


async def test_commit_that_fails_fails_every_write_of_the_batch_and_the_store_goes_on(store: Store) -> None:
    broken = True

    def full(connection: object) -> None:
        if broken:
            raise OSError(28, "No space left on device: /secret/path")

    event.listen(store._writes.sync_engine, "commit", full)
    writes = [store.write(lambda db, n=n: ensure_project(db, f"p{n}")) for n in range(5)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert all(isinstance(o, Unavailable) and "/" not in o.message for o in outcomes)
    assert await store.read(_names) == set()
    broken = False
    await store.write(lambda db: ensure_project(db, "later"))
    assert await store.read(_names) == {"later"}


@only_sqlite
async def test_transaction_that_sqlite_ends_by_itself_keeps_nothing_of_the_batch(store: Store) -> None:
    async def lose(db: AsyncSession) -> None:
        await db.execute(text("ROLLBACK"))  # what SQLite does itself when the disk is full
        raise sqlite3.OperationalError("database or disk is full")

    writes = (store.write(lambda db: ensure_project(db, "before")), store.write(lose))
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [type(o) for o in outcomes] == [Unavailable, Unavailable]
    await store.write(lambda db: ensure_project(db, "after"))
    assert await store.read(_names) == {"after"}


async def test_readers_do_not_wait_for_the_writer_and_see_what_is_committed(store: Store) -> None:
    inside, release = asyncio.Event(), asyncio.Event()

    async def slow(db: AsyncSession) -> None:
        await ensure_project(db, "slow")
        inside.set()
        await release.wait()

    writing = asyncio.create_task(store.write(slow))
    await inside.wait()
    reads = [asyncio.wait_for(store.read(_names), 20) for _ in range(20)]
    assert await asyncio.gather(*reads) == [set()] * 20
    release.set()
    await writing
    assert await store.read(_names) == {"slow"}


async def test_a_read_cannot_write(store: Store) -> None:
    with pytest.raises(Unavailable):
        await store.read(lambda db: ensure_project(db, "sneaky"))
    assert await store.read(_names) == set()


async def test_looking_up_sees_what_is_committed_and_cannot_write(store: Store) -> None:
    assert await store.look_up(_names) == set()
    await store.write(lambda db: ensure_project(db, "one"))
    assert await store.look_up(_names) == {"one"}
    with pytest.raises(Unavailable):
        await store.look_up(lambda db: ensure_project(db, "sneaky"))
    with pytest.raises(ZeroDivisionError):
        await store.look_up(lambda db: 1 // 0)  # type: ignore[arg-type,return-value]
    assert await store.look_up(_names) == {"one"}
    await store.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await store.look_up(_names)


@only_sqlite
async def test_looking_up_waits_for_no_connection_and_no_thread(store: Store) -> None:
    reading, release = asyncio.Event(), asyncio.Event()

    async def long(db: AsyncSession) -> None:
        await _names(db)
        reading.set()
        await release.wait()

    await store.look_up(_names)  # the first one opens the connection
    readers = [asyncio.create_task(store.read(long)) for _ in range(3 * Store.READERS)]
    await reading.wait()
    looking = store.look_up(_names)
    with pytest.raises(StopIteration) as found:  # it never gives the event loop back
        looking.send(None)
    assert found.value.value == set()
    release.set()
    await asyncio.gather(*readers)


async def test_write_inside_a_write_is_refused_instead_of_hanging(store: Store) -> None:
    async def nested(db: AsyncSession) -> None:
        await store.write(lambda db: ensure_project(db, "inner"))

    with pytest.raises(RuntimeError, match="inside a write"):
        await asyncio.wait_for(store.write(nested), 20)


async def test_cancelled_callers_and_cancelled_work_do_not_stop_the_writer(store: Store) -> None:
    async def cancelled(db: AsyncSession) -> None:
        raise asyncio.CancelledError

    given_up = asyncio.create_task(store.write(lambda db: ensure_project(db, "given up")))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(RuntimeError, match="cancelled from inside"):
        await store.write(cancelled)
    await store.write(lambda db: ensure_project(db, "next"))
    assert "next" in await store.read(_names)


async def test_close_finishes_what_was_accepted_and_refuses_the_rest(data_dir: Path) -> None:
    store = await Store.open(data_dir)
    writes = [asyncio.create_task(store.write(lambda db, n=n: ensure_project(db, f"p{n}"))) for n in range(50)]
    await asyncio.sleep(0)
    await store.close()
    await store.close()
    await asyncio.gather(*writes)
    for refused in (store.write(_names), store.read(_names)):
        with pytest.raises(Unavailable, match="shutting down"):
            await refused
    again = await Store.open(data_dir)
    assert len(await again.read(_names)) == 50
    await again.close()


@only_sqlite
async def test_second_server_on_the_same_folder_is_refused(store: Store, data_dir: Path) -> None:
    with pytest.raises(Unavailable, match=f"process {os.getpid()}"):
        await Store.open(data_dir)
    other = await _python(
        "import asyncio, pathlib, sys; from store.database import Store",
        "asyncio.run(Store.open(pathlib.Path(sys.argv[1])))",
        argument=str(data_dir),
    )
    assert other.returncode != 0
    assert "is using this data folder" in other.stderr


_WRITE_AND_DIE = """
import asyncio, os, pathlib, sys
from datetime import UTC, datetime
from store.bodies import Bodies
from store.database import Store
from store.keys import ensure_project
from store.operations import append
from store.records import NewOperation

async def main():
    folder = pathlib.Path(sys.argv[1])
    store, bodies = await Store.open(folder), Bodies(folder)
    project = await store.write(lambda db: ensure_project(db, "mine"))
    body = await bodies.put("r", "request", b"x" * 200_000)
    new = NewOperation("r", project, "forward_backward", "model:m", 1, "d", body, datetime.now(UTC))
    await store.write(lambda db: append(db, new))
    print(project, flush=True)
    os._exit(9)

asyncio.run(main())
"""


async def test_write_survives_the_death_of_the_process_right_after_it(data_dir: Path) -> None:
    died = await _python(_WRITE_AND_DIE, argument=str(data_dir))
    assert died.returncode == 9, died.stderr
    store = await Store.open(data_dir)  # the dead process's lock is gone with it
    record = await store.read(lambda db: get_operation(db, died.stdout.strip(), "r"))
    assert record is not None
    assert record.state == "pending"
    assert await Bodies(data_dir).get(record.body) == b"x" * 200_000
    await store.close()


async def test_what_was_written_is_in_the_files_when_write_returns(data_dir: Path) -> None:
    store = await Store.open(data_dir)
    await store.write(lambda db: ensure_project(db, "mine"))
    copy = data_dir.parent / "copy"
    copy.mkdir()
    for name in ("tinsmith.db", "tinsmith.db-wal"):
        (copy / name).write_bytes((data_dir / name).read_bytes())
    with sqlite3.connect(copy / "tinsmith.db") as connection:
        assert connection.execute("SELECT name FROM projects").fetchall() == [("mine",)]
    await store.close()


async def test_reopening_keeps_everything_and_modes_are_private(data_dir: Path) -> None:
    store = await Store.open(data_dir)
    project = await store.write(lambda db: ensure_project(db, "mine"))
    await Make(store, project).operation("r")
    assert (data_dir / "tinsmith.db-wal").stat().st_mode & 0o777 == 0o600
    await store.close()
    store = await Store.open(data_dir)
    assert await store.read(lambda db: get_operation(db, project, "r")) is not None
    await store.close()
    assert _mode(data_dir) == 0o700
    assert {_mode(path) & 0o077 for path in _files(data_dir)} == {0}


async def test_open_folder_of_others_stays_open_and_an_empty_one_is_closed(tmp_path: Path) -> None:
    shared, empty = tmp_path / "shared", tmp_path / "empty"
    for folder in (shared, empty):
        folder.mkdir(mode=0o755)
    (shared / "something").touch()
    for folder, mode in ((shared, 0o755), (empty, 0o700)):
        await (await Store.open(folder)).close()
        assert folder.stat().st_mode & 0o777 == mode
    assert (shared / "tinsmith.db").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "url",
    ["sqlite:///x.db", "sqlite+aiosqlite://", "sqlite+aiosqlite:///:memory:", "nonsense"],
)
async def test_unsupported_database_is_refused_and_what_is_accepted_is_named(data_dir: Path, url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"accepted is sqlite\+aiosqlite:///PATH"):
        await Store.open(data_dir, url)


async def test_database_elsewhere(data_dir: Path, tmp_path: Path) -> None:
    store = await Store.open(data_dir, f"sqlite+aiosqlite:///{tmp_path}/other%20place/x.db")
    await store.write(lambda db: ensure_project(db, "mine"))
    await store.close()
    assert not (data_dir / "tinsmith.db").exists()
    assert (tmp_path / "other place" / "x.db").exists()


async def test_unusable_folder_is_unavailable_without_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable) as refused:
        await Store.open(tmp_path / "file" / "data")
    assert str(tmp_path) not in refused.value.message


async def test_damaged_database_is_refused_and_lets_go_of_the_lock(data_dir: Path) -> None:
    await (await Store.open(data_dir)).close()
    database = data_dir / "tinsmith.db"
    good = database.read_bytes()
    database.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    with pytest.raises(Unavailable, match="file is not a database"):
        await Store.open(data_dir)
    database.write_bytes(good)
    await (await Store.open(data_dir)).close()


async def test_stored_values_are_in_no_log_and_no_error(
    store: Store, project: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await make.operation("r", body=b"a secret prompt")
    await store.read(lambda db: get_operation(db, project, "r"))
    with pytest.raises(IntegrityError) as clash:
        await make.operation("r", seq_id=2, body=b"a secret prompt")
    assert "secret" not in caplog.text
    assert "secret" not in str(clash.value)


async def test_no_threads_are_left(data_dir: Path) -> None:
    before = threading.active_count()
    store = await Store.open(data_dir)
    await store.write(lambda db: ensure_project(db, "mine"))
    await asyncio.gather(*(store.read(_names) for _ in range(10)))
    await store.close()
    from_pool = sum(t.name.startswith("asyncio_") for t in threading.enumerate())
    assert threading.active_count() <= before + from_pool


async def test_foreign_keys_hold(store: Store) -> None:
    with pytest.raises(Exception, match=r"(?i)foreign key constraint"):
        await Make(store, "no such project").operation("r")
    assert await store.read(lambda db: db.scalar(select(func.count()).select_from(Project))) == 0
