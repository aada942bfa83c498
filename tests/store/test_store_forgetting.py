"""Lines of the log go when their session has been over for long, and only then."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import select

from store.database import Store
from store.forgetting import forget_operations
from store.operations import expire_results, finish, record_refusal
from store.sessions import finish_session
from store.tables import Operation
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


async def test_samples_without_a_session_go_by_their_own_time(store: Store, make: Make, now: datetime) -> None:
    for number in range(3):
        await _done(store, make, f"d{number}", "direct:p", None, now + timedelta(hours=number))
    await store.write(lambda db: expire_results(db, now + timedelta(days=1), now + timedelta(days=1)))
    until = now + timedelta(hours=1, minutes=1)
    assert await store.write(lambda db: forget_operations(db, until, lines=1)) == 1
    assert await store.write(lambda db: forget_operations(db, until)) == 1
    assert await _left(store) == {"d2"}
