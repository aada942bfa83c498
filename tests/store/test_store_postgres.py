"""What is PostgreSQL's own: other writers beside the store's, connections that break, answers that are lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import InvalidRequest, Unavailable
from store import edges, runs, samplers, sessions
from store.completions import Client, completions
from store.database import Store
from store.keys import ensure_project
from store.operations import append, finish, highest_seq
from store.tables import Operation, Project, Run
from tests.store.conftest import only_postgres
from tests.store.factories import NOW, Make
from tests.support.postgres import Postgres

pytestmark = only_postgres
SCOPE = "sampler:s:sample:0"
SERVED = ("tiny",)
"""Base models of a server."""


@pytest.fixture
async def other(store: Store, data_dir: Path, database_url: str | None) -> AsyncIterator[Store]:
    """Another server's store on the same database and folder."""
    opened = await Store.open(data_dir, database_url)
    yield opened
    await opened.close()


async def _count(store: Store, table: Any) -> int:
    return await store.read(lambda db: db.scalar(select(func.count()).select_from(table))) or 0


async def test_a_commit_is_durable_and_rows_compare_by_bytes(store: Store) -> None:
    async def settings(db: AsyncSession) -> list[Any]:
        names = ("synchronous_commit", "transaction_isolation", "timezone")
        return [await db.scalar(text(f"SHOW {name}")) for name in names]

    assert await store.write(settings) == ["on", "read committed", "UTC"]
    assert await store.read(settings) == ["on", "repeatable read", "UTC"]
    for name in ("model:b", "model:B", "model:a;", "model:a:"):
        await store.write(lambda db, name=name: ensure_project(db, name))
    ordered = await store.read(lambda db: db.scalars(select(Project.name).order_by(Project.name)))
    assert list(ordered) == ["model:B", "model:a:", "model:a;", "model:b"]


async def test_the_same_requests_at_two_servers_are_one_operation_each(
    store: Store, other: Store, project: str, make: Make
) -> None:
    async def accept(into: Store, name: str, number: int) -> tuple[str, bool]:
        new = make.new(f"{name}{number}", seq_id=number)
        record, created = await into.write(lambda db: append(db, new))
        return record.request_id, created

    one = [accept(store, "a", number) for number in range(60)]
    two = [accept(other, "b", number) for number in reversed(range(60))]
    outcomes = await asyncio.gather(*one, *two)
    first, second = outcomes[:60], outcomes[60:][::-1]
    assert [request_id for request_id, _ in first] == [request_id for request_id, _ in second]
    assert all(mine != theirs for (_, mine), (_, theirs) in zip(first, second, strict=True))
    assert await _count(store, Operation) == 60


async def test_unnumbered_requests_at_two_servers_get_numbers_without_holes(
    store: Store, other: Store, project: str, make: Make
) -> None:
    async def accept(into: Store, request_id: str) -> int:
        async def rows(db: AsyncSession) -> int:
            seq_id = (await highest_seq(db, SCOPE) or 0) + 1
            await append(db, make.new(request_id, scope=SCOPE, seq_id=seq_id))
            return seq_id

        return await into.write(rows)

    both = [accept(into, f"{name}{n}") for n in range(40) for name, into in (("a", store), ("b", other))]
    assert sorted(await asyncio.gather(*both)) == list(range(1, 81))


async def test_a_cursor_misses_nothing_that_two_servers_settle(
    store: Store, other: Store, project: str, make: Make
) -> None:
    for number in range(1, 61):
        await make.operation(f"r{number}", scope=SCOPE, seq_id=number, kind="sample")
    client, seen, cursor = Client(project, SCOPE, 0, 10**9), [], 0

    async def settle(by: Store, first: int) -> None:
        for number in range(first, 61, 2):
            await by.write(lambda db, r=f"r{number}": finish(db, r, b"x", "text/plain", NOW))

    settling = [asyncio.create_task(settle(store, 1)), asyncio.create_task(settle(other, 2))]
    while len(seen) < 60:
        page = await store.read(lambda db, after=cursor: completions(db, client, after, 1000))
        assert [one.place for one in page] == list(range(cursor + 1, cursor + 1 + len(page)))
        seen += [one.request_id for one in page]
        cursor += len(page)
    await asyncio.gather(*settling)
    assert sorted(seen) == sorted(f"r{number}" for number in range(1, 61))


async def test_writes_that_lock_each_other_out_all_succeed(
    store: Store, other: Store, project: str, make: Make
) -> None:
    await make.session()
    models = [await make.run(number) for number in range(2)]
    inside = [asyncio.Event(), asyncio.Event()]

    async def both(db: AsyncSession, mine: int) -> None:
        for number in (mine, 1 - mine):
            change = update(Run).where(Run.model_id == models[number])
            await db.execute(change.values(model_seq_id=Run.model_seq_id + 10))
            inside[mine].set()
            if number == mine:
                await asyncio.wait_for(inside[1 - mine].wait(), 20)

    await asyncio.gather(store.write(lambda db: both(db, 0)), other.write(lambda db: both(db, 1)))
    found = await store.read(lambda db: runs.runs_of_session(db, "s"))
    assert [run.model_seq_id for run in found] == [20, 21]


async def test_what_a_write_has_looked_at_stays_until_its_commit(store: Store, other: Store, make: Make) -> None:
    await make.session()
    looked, commit = asyncio.Event(), asyncio.Event()

    async def look(db: AsyncSession) -> str:
        session = await sessions.get_session(db, make.project, "s")
        looked.set()
        await commit.wait()
        assert session is not None
        return session.state

    looking = asyncio.create_task(store.write(look))
    await looked.wait()
    ending = asyncio.create_task(
        other.write(lambda db: sessions.finish_session(db, make.project, "s", "success", None, NOW))
    )
    await asyncio.sleep(0.5)
    assert not ending.done(), "a session ends after the writes that found it active"
    reading = await other.read(lambda db: sessions.get_session(db, make.project, "s"))
    assert reading is not None
    assert reading.state == "active"
    commit.set()
    assert await looking == "active"
    await ending


async def test_other_writes_go_on_while_one_waits_for_another_server(store: Store, other: Store, make: Make) -> None:
    await make.session()
    inside, release = asyncio.Event(), asyncio.Event()

    async def hold(db: AsyncSession) -> None:
        await sessions.finish_session(db, make.project, "s", "success", None, NOW)
        inside.set()
        await release.wait()

    holding = asyncio.create_task(other.write(hold))
    await inside.wait()
    free = store.write(lambda db: ensure_project(db, "free"))
    waiting = asyncio.create_task(store.write(lambda db: sessions.expire_session(db, "s", NOW)))
    await asyncio.wait_for(free, 20)
    await asyncio.sleep(0.3)
    assert not waiting.done()
    release.set()
    await holding
    assert not await waiting, "the first end of a session wins"


async def test_lost_answer_to_a_commit_is_asked_for(store: Store) -> None:
    dialect = store._writes.sync_engine.dialect
    commit = dialect.do_commit

    def answer_lost(connection: Any) -> None:
        commit(connection)
        dialect.do_commit = commit  # type: ignore[method-assign]
        raise ConnectionResetError("gone")

    def request_lost(connection: Any) -> None:
        dialect.do_commit = commit  # type: ignore[method-assign]
        raise ConnectionResetError("gone")

    dialect.do_commit = answer_lost  # type: ignore[method-assign]
    kept = await store.write(lambda db: ensure_project(db, "kept"))
    assert await store.read(lambda db: db.scalar(select(Project.project_id))) == kept
    dialect.do_commit = request_lost  # type: ignore[method-assign]
    with pytest.raises(Unavailable) as refused:
        await store.write(lambda db: ensure_project(db, "not kept"))
    assert refused.value.code == "database_unavailable"
    assert await _count(store, Project) == 1


async def test_text_that_cannot_be_stored_is_refused(store: Store) -> None:
    with pytest.raises(InvalidRequest, match=r"U\+0000"):
        await store.write(lambda db: ensure_project(db, "a\0b"))
    with pytest.raises(InvalidRequest, match=r"U\+0000"):
        await store.read(lambda db: db.scalar(select(Project.name).where(Project.name == "a\0b")))
    await store.write(lambda db: ensure_project(db, "fine"))


async def test_killed_database_refuses_and_comes_back(store: Store, make: Make, postgres: Postgres) -> None:
    await make.operation("r1", seq_id=1)
    number = 2
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(postgres.kill))
        while True:  # until one fails: whatever succeeded before must be there
            try:
                number = (await store.read(lambda db: highest_seq(db, "model:m")) or 0) + 1
                await make.operation(f"r{number}", seq_id=number)
            except Unavailable as error:
                assert error.code == "database_unavailable"  # noqa: PT017
                break
    for attempt in (store.write(lambda db: ensure_project(db, "x")), store.read(lambda db: highest_seq(db, "model:m"))):
        with pytest.raises(Unavailable) as refused:
            await attempt
        assert refused.value.code == "database_unavailable"
    await asyncio.to_thread(postgres.start)
    highest = await store.read(lambda db: highest_seq(db, "model:m"))
    assert highest is not None
    assert highest >= number - 1, "what was answered is there"
    assert await _count(store, Operation) == highest
    await make.operation("after", seq_id=highest + 1)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://me:geheim@h/db", "accepted is"),
        ("postgresql+psycopg://me:geheim@h/db", "accepted is"),
        ("postgresql+asyncpg://me:geheim@h", "names no database"),
        ("postgresql+asyncpg://me:geheim@127.0.0.1:1/db", "cannot be used"),
        ("postgresql+asyncpg://me:geheim@/db?host=/nowhere", "cannot be used"),
    ],
)
async def test_passwords_are_in_no_error_and_no_log(
    data_dir: Path, url: str, words: str, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises((InvalidRequest, Unavailable), match=words) as refused:
        await Store.open(data_dir, url)
    assert "geheim" not in f"{refused.value}{refused.value.hint}{caplog.text}"


async def test_wrong_database_is_named_in_the_drivers_words(data_dir: Path, postgres: Postgres, backend: str) -> None:
    with pytest.raises(Unavailable, match='database "missing" does not exist'):
        await Store.open(data_dir, postgres.url("missing", password="geheim"))


async def test_what_a_server_held_is_taken_once_when_it_is_gone(store: Store, other: Store, make: Make) -> None:
    await make.session()
    models = [await make.run(number) for number in range(3)]
    await store.write(lambda db: runs.set_run_state(db, models[2], "closed"))
    await store.write(
        lambda db: samplers.create_sampler(
            db,
            sampler_id=SCOPE.partition(":")[2],
            project_id=make.project,
            session_id="s",
            seq_id=0,
            base_model="tiny",
            model_path=None,
            checkpoint_id=None,
            now=NOW,
        )
    )
    await make.operation("sample", kind="sample", scope=SCOPE)
    for edge in ("a", "b", "c"):
        await store.write(lambda db, edge=edge: edges.beat(db, edge, 60))
    for model_id in models:
        await store.write(lambda db, m=model_id: edges.hold_run(db, m, "a"))
    await store.write(lambda db: edges.set_sample_edge(db, "sample", "a"))

    async def take(
        by: Store, edge: str, *, expired: bool = True, served: Sequence[str] = SERVED
    ) -> tuple[dict[str, int], list[str]]:
        async def rows(db: AsyncSession) -> tuple[dict[str, int], list[str]]:
            taken = await edges.take_runs(db, edge, served, expired=expired)
            return taken, await edges.take_samples(db, edge, served, expired=expired)

        return await by.write(rows)

    assert await take(store, "b") == ({}, [])
    await store.write(lambda db: edges.beat(db, "a", 0))  # its time is over
    assert await take(store, "b", expired=False) == ({}, [])
    assert await take(store, "b", served=["acme/other"]) == ({}, []), "what it does not serve is left to others"
    both = await asyncio.gather(take(store, "b"), take(other, "c"))
    assert sorted(model_id for taken, _ in both for model_id in taken) == models[:2]
    assert [request_id for _, samples in both for request_id in samples] == ["sample"]
    assert {fence for taken, _ in both for fence in taken.values()} == {2}
    for edge in ("b", "c"):  # one that leaves need not run out
        await store.write(lambda db, edge=edge: edges.leave(db, edge))
    assert await take(store, "d", expired=False) == (dict.fromkeys(models[:2], 3), ["sample"])
    found = await store.read(lambda db: edges.leases_of(db, "a"))
    assert {model_id: lease.state for model_id, lease in found.items()} == {models[2]: "closed"}
    await store.write(lambda db: edges.drop_leases(db, "a", models))
    assert await store.read(lambda db: edges.holder(db, models[2])) is None
    assert await store.read(lambda db: edges.holder(db, models[0])) == ("d", 3)


async def test_a_run_that_ended_unserved_is_taken_for_what_it_left_unanswered(store: Store, make: Make) -> None:
    await make.session()
    models = [await make.run(number) for number in range(3)]
    for model_id in models:
        await store.write(lambda db, m=model_id: edges.hold_run(db, m, "gone"))
        await store.write(lambda db, m=model_id: runs.set_run_state(db, m, "closed"))
    await make.operation("left", scope=f"model:{models[1]}", seq_id=1)
    await make.operation("creation", kind="create_model", scope="session:s:train", seq_id=2)
    taken = await store.write(lambda db: edges.take_runs(db, "b", ["acme/other"], expired=False))
    assert taken == {models[1]: 2, models[2]: 2}


async def test_a_run_is_not_taken_while_its_holder_writes(store: Store, other: Store, make: Make) -> None:
    await make.session()
    model_id = await make.run()
    await store.write(lambda db: edges.hold_run(db, model_id, "a"))
    looked, commit = asyncio.Event(), asyncio.Event()

    async def write(db: AsyncSession) -> tuple[str, int] | None:
        found = await edges.holder(db, model_id)
        looked.set()
        await commit.wait()
        return found

    writing = asyncio.create_task(store.write(write))
    await looked.wait()
    assert await other.write(lambda db: edges.take_runs(db, "b", SERVED, expired=True)) == {}
    commit.set()
    assert await writing == ("a", 1)
    assert await other.write(lambda db: edges.take_runs(db, "b", SERVED, expired=True)) == {model_id: 2}


async def test_a_server_that_sleeps_within_a_transaction_loses_its_locks(
    store: Store, make: Make, data_dir: Path, database_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make.session()
    model_id = await make.run()
    await store.write(lambda db: edges.hold_run(db, model_id, "a"))
    monkeypatch.setattr("store.postgres.ASLEEP_MILLISECONDS", 500)
    sleeper = await Store.open(data_dir, database_url)

    async def asleep(db: AsyncSession) -> None:
        await edges.holder(db, model_id)
        await asyncio.sleep(1.5)
        await ensure_project(db, "never")

    sleeping = asyncio.create_task(sleeper.write(asleep))
    async with asyncio.timeout(30):
        while not await store.write(lambda db: edges.take_runs(db, "b", SERVED, expired=True)):
            pass
    with pytest.raises(Unavailable):
        await sleeping
    await sleeper.write(lambda db: ensure_project(db, "awake"))
    await sleeper.close()
