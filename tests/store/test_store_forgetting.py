"""Lines of the log go when their session has been over for long, and only then."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import event, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.database import Store
from store.forgetting import forget_operations
from store.operations import expire_results, finish, highest_seq, record_refusal
from store.sessions import finish_session
from store.tables import Operation
from tests.store.conftest import only_sqlite
from tests.store.factories import Make


async def _left(store: Store) -> set[str]:
    return set(await store.read(_ids))


async def _ids(db: object) -> list[str]:
    return list(await db.scalars(select(Operation.request_id)))  # type: ignore[attr-defined]


async def _done(store: Store, make: Make, request_id: str, scope: str, seq_id: int | None, now: datetime) -> None:
    await make.operation(request_id, scope=scope, seq_id=seq_id)
    await store.write(lambda db: finish(db, request_id, b"result", "application/json", now))


async def test_lines_of_an_ended_session_go_after_their_outcomes(
    store: Store, project: str, make: Make, now: datetime
) -> None:
    for session in ("s", "s2", "live"):
        await make.session(session)
        await _done(store, make, f"step of {session}", f"model:{session}:train:0", 1, now)
        await _done(store, make, f"draw of {session}", f"sampler:{session}:sample:0", 1, now)
        await _done(store, make, f"create of {session}", f"session:{session}:train", 0, now)
    await store.write(lambda db: record_refusal(db, project, "model:s:train:0", 2, now))
    await store.write(lambda db: finish_session(db, project, "s", "done", None, now))
    await store.write(lambda db: finish_session(db, project, "s2", "done", None, now + timedelta(hours=2)))
    everything = await _left(store)
    hour = now + timedelta(hours=1)

    assert await store.write(lambda db: forget_operations(db, hour)) == 1, "only the refusal has no outcome to keep"
    await store.write(lambda db: expire_results(db, hour, hour))
    assert await store.write(lambda db: forget_operations(db, now)) == 0, "not over for long enough"
    assert await store.write(lambda db: forget_operations(db, hour)) == 3
    left = await _left(store)
    assert {name.rpartition(" ")[2] for name in left} == {"s2", "live"}
    assert len(everything - left) == 4
    later = now + timedelta(days=9)
    assert await store.write(lambda db: forget_operations(db, later)) == 3
    assert {name.rpartition(" ")[2] for name in await _left(store)} == {"live"}


async def test_what_has_one_request_of_a_run_goes_with_its_session(
    store: Store, project: str, make: Make, now: datetime
) -> None:
    for session in ("s", "s2"):
        await make.session(session)
        await _done(store, make, f"unload of {session}", f"unload:{session}:train:0", 0, now)
    await store.write(lambda db: finish_session(db, project, "s", "done", None, now))
    hour = now + timedelta(hours=1)
    await store.write(lambda db: expire_results(db, hour, hour))
    assert await store.write(lambda db: forget_operations(db, hour)) == 1
    assert await _left(store) == {"unload of s2"}


async def test_samples_without_a_session_go_by_their_own_time(store: Store, make: Make, now: datetime) -> None:
    scope = f"direct:{make.project}"
    for number in range(1, 5):
        await _done(store, make, f"d{number}", scope, number, now + timedelta(hours=number))
    later = now + timedelta(days=9)
    assert await store.write(lambda db: forget_operations(db, later)) == 0, "their outcomes are still kept"
    await store.write(lambda db: expire_results(db, later, later))
    until = now + timedelta(hours=2, minutes=1)
    assert await store.write(lambda db: forget_operations(db, until, lines=1)) == 1
    assert await _left(store) == {"d2", "d3", "d4"}, "the oldest first"
    assert await store.write(lambda db: forget_operations(db, until)) == 1
    assert await _left(store) == {"d3", "d4"}
    assert await store.write(lambda db: forget_operations(db, later)) == 1
    assert await _left(store) == {"d4"}
    assert await store.read(lambda db: highest_seq(db, scope)) == 4, "no number is given again"
    assert await store.write(lambda db: forget_operations(db, later)) == 0


async def test_every_project_gets_its_turn(
    store: Store, project: str, other_project: str, make: Make, now: datetime
) -> None:
    """One that samples all the time does not keep the lines of another one."""
    for number in range(1, 6):
        for owner, minutes in ((project, 1), (other_project, 0)):
            name = f"{owner} {number}"
            await _done(store, make, name, f"direct:{owner}", number, now + timedelta(hours=number, minutes=minutes))
    later = now + timedelta(days=9)
    await store.write(lambda db: expire_results(db, later, later))
    for _ in range(4):
        assert await store.write(lambda db: forget_operations(db, later, lines=2)) == 2
    assert await _left(store) == {f"{project} 5", f"{other_project} 5"}


async def test_a_sample_that_still_runs_is_passed_over(store: Store, make: Make, now: datetime) -> None:
    scope = f"direct:{make.project}"
    await _done(store, make, "d1", scope, 1, now)
    await make.operation("runs", scope=scope, seq_id=2)
    for number in (3, 4):
        await _done(store, make, f"d{number}", scope, number, now)
    later = now + timedelta(days=9)
    await store.write(lambda db: expire_results(db, later, later))
    assert await store.write(lambda db: forget_operations(db, later)) == 2
    assert await _left(store) == {"runs", "d4"}


async def test_copies_and_imports_go_by_their_own_time(store: Store, make: Make, now: datetime) -> None:
    for kind in ("copy", "import"):
        for number in range(3):
            scope = f"{kind}:{make.project}:key {number}"
            await _done(store, make, f"{kind}{number}", scope, 0, now + timedelta(hours=number))
    later = now + timedelta(days=9)
    assert await store.write(lambda db: forget_operations(db, later)) == 0, "their answers are still kept"
    await store.write(lambda db: expire_results(db, later, later))
    until = now + timedelta(hours=1, minutes=1)
    assert await store.write(lambda db: forget_operations(db, until, lines=3)) == 3
    assert await store.write(lambda db: forget_operations(db, until)) == 1
    assert await _left(store) == {"copy2", "import2"}


@only_sqlite
async def test_the_log_is_not_searched_from_end_to_end(
    store: Store, project: str, make: Make, now: datetime, data_dir: Path
) -> None:
    """Nearly all of a log has expired, so what looks for expired lines has to look where the old ones are."""
    await make.session("s")
    await _done(store, make, "step", "model:s:train:0", 1, now)
    for number in (1, 2):
        await _done(store, make, f"d{number}", f"direct:{project}", number, now)
    await _done(store, make, "copy", f"copy:{project}:key", 0, now)
    await store.write(lambda db: finish_session(db, project, "s", "done", None, now))
    later = now + timedelta(days=9)
    await store.write(lambda db: expire_results(db, later, later))

    asked: list[tuple[str, Sequence[object]]] = []

    async def forget(db: AsyncSession) -> int:
        event.listen(db.get_bind().engine, "before_cursor_execute", lambda *told: asked.append((told[2], told[3])))
        return await forget_operations(db, later)

    assert await store.write(forget) == 3
    searching = [(text, values) for text, values in asked if "FROM operations" in text]
    assert len(searching) == 5
    with closing(sqlite3.connect(data_dir / "tinsmith.db")) as database:
        for text, values in searching:
            plan = [step[3] for step in database.execute(f"EXPLAIN QUERY PLAN {text}", values)]
            assert not [step for step in plan if "SCAN operations" in step or "ix_operations_state" in step], plan
