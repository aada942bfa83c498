"""Snapshots and the part of the log that is kept for them."""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import NonFiniteGradient, NotFound, OutOfMemory, TinsmithError
from store import runs, snapshots
from store.database import Store
from store.operations import expire_results, fail, finish, get_operation, record_refusal
from store.records import BodyRef, RunState, SnapshotRecord
from store.snapshot_files import SnapshotFiles
from store.tables import Operation
from tests.store.factories import NOW, Make

MODEL = "s:train:0"
SCOPE = f"model:{MODEL}"


@pytest.fixture
async def run(store: Store, make: Make) -> str:
    """A live run."""
    await make.session()
    model_id = await make.run(0)
    await store.write(lambda db: runs.set_run_state(db, model_id, "ready"))
    return model_id


async def done(store: Store, make: Make, seq_id: int, **changes: object) -> str:
    """An operation of the run with a result."""
    request_id = f"r{seq_id}"
    await make.operation(request_id, seq_id=seq_id, scope=SCOPE, **changes)
    await store.write(lambda db: finish(db, request_id, b"result", "text/plain", NOW))
    return request_id


async def _fail(request_id: str, error: TinsmithError, db: AsyncSession) -> bool:
    return await fail(db, request_id, error, NOW)


def snapshot(number: int, applied_seq: int) -> SnapshotRecord:
    return SnapshotRecord(f"{number:032x}.safetensors", MODEL, applied_seq, 10, "ab", NOW)


async def bodies(store: Store) -> list[int]:
    """The seq_ids whose bodies are kept."""

    async def read(db: AsyncSession) -> list[int]:
        kept = select(Operation.seq_id).where(Operation.body_inline.is_not(None)).order_by(Operation.seq_id)
        return [seq_id for seq_id in await db.scalars(kept) if seq_id is not None]

    return await store.read(read)


async def test_bodies_outlive_results_until_two_snapshots_cover_them(
    store: Store, make: Make, run: str, now: datetime
) -> None:
    for seq_id in range(1, 7):
        await done(store, make, seq_id, kind="forward" if seq_id == 3 else "optim_step")
    later = now + timedelta(days=1)
    assert await store.write(lambda db: expire_results(db, later, later)) == (6, [])
    record = await store.read(lambda db: get_operation(db, make.project, "r1"))
    assert record is not None
    assert (record.state, record.result, record.body) == ("expired", None, b"body")
    assert await bodies(store) == [1, 2, 4, 5, 6]
    assert await store.write(lambda db: snapshots.add_snapshot(db, snapshot(1, 2))) == ([], [])
    assert await bodies(store) == [1, 2, 4, 5, 6]
    assert await store.write(lambda db: snapshots.add_snapshot(db, snapshot(2, 4))) == ([], [])
    assert await bodies(store) == [4, 5, 6]
    assert await store.write(lambda db: snapshots.add_snapshot(db, snapshot(3, 6))) == ([snapshot(1, 2).file], [])
    assert await bodies(store) == [5, 6]
    kept = await store.read(lambda db: snapshots.snapshots_of(db, MODEL))
    assert kept == [snapshot(3, 6), snapshot(2, 4)]


async def test_files_of_large_bodies_are_named_when_nobody_needs_them(store: Store, make: Make, run: str) -> None:
    refs = [BodyRef(f"r{seq_id}.request.{seq_id:032x}", 10**6, "ab") for seq_id in (1, 2)]
    for seq_id, ref in enumerate(refs, start=1):
        await done(store, make, seq_id, body=ref, kind="forward_backward")
    await store.write(lambda db: snapshots.add_snapshot(db, snapshot(1, 1)))
    logged = await store.read(lambda db: snapshots.log_of(db, MODEL, -1))
    assert [one.size for one in logged] == [10**6, 10**6]
    assert await store.write(lambda db: snapshots.add_snapshot(db, snapshot(2, 2))) == ([], refs[:1])


async def test_a_snapshot_of_operations_without_outcomes_is_not_recorded(store: Store, make: Make, run: str) -> None:
    await done(store, make, 1)
    await make.operation("r2", seq_id=2, scope=SCOPE)
    assert await store.write(lambda db: snapshots.add_snapshot(db, snapshot(1, 2))) is None
    assert await store.write(lambda db: snapshots.add_snapshot(db, snapshot(1, 1))) is not None
    assert await store.read(snapshots.snapshot_files) == {snapshot(1, 1).file}


@pytest.mark.parametrize("state", ["closed", "lost"])
async def test_what_was_kept_for_a_run_goes_when_it_is_over(
    store: Store, make: Make, run: str, now: datetime, state: RunState
) -> None:
    await done(store, make, 1)
    await store.write(lambda db: snapshots.add_snapshot(db, snapshot(1, 0)))
    later = now + timedelta(days=1)
    await store.write(lambda db: expire_results(db, later, later))
    assert await store.write(snapshots.collect_ended) == ([], [])
    assert await bodies(store) == [1]
    await store.write(lambda db: runs.set_run_state(db, run, state))
    assert await store.write(lambda db: snapshots.add_snapshot(db, snapshot(2, 1))) is None
    assert await store.write(snapshots.collect_ended) == ([snapshot(1, 0).file], [])
    assert await bodies(store) == []


async def test_a_start_drops_what_no_live_run_needs(store: Store, make: Make, run: str, now: datetime) -> None:
    large = BodyRef(f"r1.request.{1:032x}", 10**6, "ab")
    await done(store, make, 1, body=large)
    await make.operation("c", seq_id=0, scope="session:s:train", kind="create_model")
    await store.write(lambda db: finish(db, "c", b"result", "text/plain", NOW))
    later = now + timedelta(days=1)
    await store.write(lambda db: expire_results(db, later, later))
    assert await store.write(snapshots.drop_unneeded) == []
    await store.write(lambda db: runs.set_run_state(db, run, "closed"))
    assert await store.write(snapshots.drop_unneeded) == [large]
    assert await store.write(snapshots.drop_unneeded) == []
    assert await bodies(store) == [0]


async def test_failures_of_a_live_run_stay_what_they_are(store: Store, make: Make, run: str, now: datetime) -> None:
    for seq_id, error in ((1, NonFiniteGradient("nan")), (2, OutOfMemory("full"))):
        await make.operation(f"r{seq_id}", seq_id=seq_id, scope=SCOPE)
        await store.write(partial(_fail, f"r{seq_id}", error))
    later = now + timedelta(days=1)
    await store.write(lambda db: expire_results(db, later, later))
    logged = await store.read(lambda db: snapshots.log_of(db, MODEL, 0))
    assert [(one.state, one.error_code) for one in logged] == [
        ("failed", "non_finite_gradient"),
        ("failed", "out_of_memory"),
    ]


async def test_the_place_of_a_run_in_its_log(store: Store, make: Make, run: str, now: datetime) -> None:
    assert await store.read(lambda db: snapshots.place_in_log(db, MODEL)) == (1, [], [])
    await done(store, make, 1)
    await make.operation("r2", seq_id=2, scope=SCOPE)
    await done(store, make, 3)
    await store.write(lambda db: record_refusal(db, make.project, SCOPE, 4, now))
    await make.operation("r5", seq_id=5, scope=SCOPE)
    assert await store.read(lambda db: snapshots.place_in_log(db, MODEL)) == (4, [2, 5], [4])


async def test_only_our_own_files_without_a_row_are_swept(data_dir: Path, store: Store) -> None:
    files = SnapshotFiles(data_dir)
    kept, stray = files.new_path(), files.new_path()
    unfinished = stray.with_name(f".{stray.name}.0a1b2c3d.tmp")
    other = data_dir / "snapshots" / "README"
    for path in (kept, stray, unfinished, other):
        path.write_bytes(b"x")
    assert await files.sweep({kept.name}, older_than=60) == 0
    assert await files.sweep({kept.name}) == 2
    assert sorted(path.name for path in other.parent.iterdir()) == sorted([kept.name, "README"])
    with pytest.raises(NotFound):
        files.path("../dev_key")
    await files.delete([kept.name])
    await files.delete([kept.name])
    assert not kept.exists()
