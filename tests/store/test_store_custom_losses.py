"""Uploaded losses are counted for their project, and go when their session has been over for long."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import select

from store.custom_losses import ROW_BYTES, add_custom_loss, count_losses, forget_losses, get_graph
from store.database import Store
from store.forgetting import forget_operations
from store.operations import expire_results, finish
from store.sessions import finish_session
from store.tables import CustomLoss
from tests.store.factories import Make


async def _add(store: Store, make: Make, session: str, number: int, now: datetime) -> None:
    """A loss, and the line of its upload."""
    loss_id, request_id = f"{session}:loss:{number}", f"{session} {number}"
    await make.operation(request_id, scope=f"session:{session}:custom_loss", seq_id=number)
    await store.write(lambda db: finish(db, request_id, b"result", "application/json", now))
    await store.write(
        lambda db: add_custom_loss(
            db,
            loss_id=loss_id,
            project_id=make.project,
            session_id=session,
            name="nll",
            graph="g\u00fc",
            now=now,
        )
    )


async def _left(store: Store) -> set[str]:
    return set(await store.read(_ids))


async def _ids(db: object) -> list[str]:
    return list(await db.scalars(select(CustomLoss.loss_id)))  # type: ignore[attr-defined]


async def test_losses_go_after_the_lines_of_their_session_and_not_before(
    store: Store, project: str, make: Make, now: datetime
) -> None:
    for session in ("s", "late", "live"):
        await make.session(session)
        for number in range(2):
            await _add(store, make, session, number, now)
    everything = await _left(store)
    hour, day = now + timedelta(hours=1), now + timedelta(days=1)
    await store.write(lambda db: finish_session(db, project, "s", "done", None, now))
    await store.write(lambda db: finish_session(db, project, "late", "done", None, hour))
    before = now + timedelta(minutes=1)
    assert await store.write(lambda db: forget_losses(db, before)) == 0, "the log still tells a repeat of the upload"
    assert await _left(store) == everything
    await store.write(lambda db: expire_results(db, day, day))
    await store.write(lambda db: forget_operations(db, before))
    assert await store.write(lambda db: forget_losses(db, before, losses=1)) == 1
    assert await store.write(lambda db: forget_losses(db, before)) == 1
    assert await store.write(lambda db: forget_losses(db, before)) == 0
    assert {name.partition(":")[0] for name in await _left(store)} == {"late", "live"}
    await store.write(lambda db: forget_operations(db, day))
    assert await store.write(lambda db: forget_losses(db, day)) == 2
    assert {name.partition(":")[0] for name in await _left(store)} == {"live"}
    assert await store.read(lambda db: get_graph(db, project, "live:loss:0")) == "g\u00fc"


async def test_the_bytes_of_a_project_are_those_of_all_its_sessions(
    store: Store, project: str, make: Make, now: datetime
) -> None:
    for session in ("s", "s2"):
        await make.session(session)
        await _add(store, make, session, 0, now)
    each = 3 + ROW_BYTES  # in UTF-8
    assert await store.write(lambda db: count_losses(db, project, "s")) == (1, 2 * each)
    assert await store.write(lambda db: count_losses(db, "another", "s3")) == (0, 0)
