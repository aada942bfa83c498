"""The operation log: what a repeat is, outcomes, expiry."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select

from schemas.errors import InvalidRequest, ModelLost, NonFiniteGradient, OutOfMemory, SeqIdConflict, TinsmithError
from store.bodies import Bodies
from store.database import Store
from store.error_codec import error_from_json, error_to_json
from store.keys import ensure_project
from store.operations import (
    append,
    body_names,
    expire_results,
    fail,
    finish,
    get_operation,
    highest_seq,
    mark_delivered,
    record_refusal,
    unfinished,
)
from store.records import BodyRef, OperationRecord
from store.tables import Operation
from tests.store.factories import Make


async def _get(store: Store, project: str, request_id: str) -> OperationRecord:
    record = await store.read(lambda db: get_operation(db, project, request_id))
    assert record is not None
    return record


async def test_fifty_repeats_at_once_are_one_operation(store: Store, make: Make) -> None:
    outcomes = await asyncio.gather(*(make.operation(f"r{n}") for n in range(50)))
    assert {record.request_id for record, _ in outcomes} == {"r0"}
    assert [created for _, created in outcomes].count(True) == 1
    assert await store.read(lambda db: db.scalar(select(func.count()).select_from(Operation))) == 1


@pytest.mark.parametrize("change", [{"digest": "other"}, {"kind": "zero_grad"}])
async def test_other_request_under_the_same_seq_id_conflicts(make: Make, change: dict[str, str]) -> None:
    first, _ = await make.operation("r1")
    with pytest.raises(SeqIdConflict, match="seq_id 1 was used before") as conflict:
        await make.operation("r2", **change)
    assert conflict.value.status == 400, "the SDK retries a 409 for minutes"
    assert (await make.operation("r3"))[0] == first


async def test_other_scope_other_seq_id_and_none_are_other_operations(make: Make) -> None:
    made = [
        await make.operation("r1"),
        await make.operation("r2", seq_id=2),
        await make.operation("r3", scope="model:other"),
        await make.operation("r4", seq_id=None),
        await make.operation("r5", seq_id=None),
        await make.operation("r6", seq_id=2**62),
    ]
    assert all(created for _, created in made)


async def test_repeat_after_the_result_and_after_its_expiry_is_still_recognised(
    store: Store, make: Make, now: datetime
) -> None:
    await make.operation("r1")
    await store.write(lambda db: finish(db, "r1", b"result", "application/json", now))
    record, created = await make.operation("r2")
    assert (record.request_id, record.result, created) == ("r1", b"result", False)
    later = now + timedelta(days=1)
    await store.write(lambda db: expire_results(db, later, later))
    record, created = await make.operation("r3")
    assert (record.request_id, record.state, created) == ("r1", "expired", False)
    with pytest.raises(SeqIdConflict):
        await make.operation("r4", digest="other")


async def test_refused_request_holds_its_place_until_a_corrected_one_comes(
    store: Store, project: str, make: Make, now: datetime
) -> None:
    for _ in range(2):
        await store.write(lambda db: record_refusal(db, project, "model:m", 7, now))
    assert await store.read(lambda db: highest_seq(db, "model:m")) == 7
    assert await store.read(unfinished) == []
    record, created = await make.operation("r1", seq_id=7)
    assert (record.state, created) == ("pending", True)
    with pytest.raises(SeqIdConflict):
        await make.operation("r2", seq_id=7, digest="other")


async def test_refusal_never_displaces_an_operation(store: Store, project: str, make: Make, now: datetime) -> None:
    first, _ = await make.operation("r1")
    await store.write(lambda db: record_refusal(db, project, "model:m", 1, now))
    assert await _get(store, project, "r1") == first


async def test_highest_seq_of_an_empty_scope(store: Store) -> None:
    assert await store.read(lambda db: highest_seq(db, "model:nobody")) is None


async def test_first_outcome_stands(store: Store, project: str, make: Make, now: datetime) -> None:
    await make.operation("r1")
    assert await store.write(lambda db: finish(db, "r1", b"one", "application/json", now))
    assert not await store.write(lambda db: finish(db, "r1", b"two", "text/plain", now))
    assert not await store.write(lambda db: fail(db, "r1", OutOfMemory("late"), now))
    assert not await store.write(lambda db: finish(db, "unknown", b"two", "text/plain", now))
    record = await _get(store, project, "r1")
    assert (record.state, record.result, record.content_type, record.error) == (
        "done",
        b"one",
        "application/json",
        None,
    )


async def test_empty_result_is_a_result(store: Store, project: str, make: Make, now: datetime) -> None:
    await make.operation("r1", body=b"")
    await store.write(lambda db: finish(db, "r1", b"", "application/json", now))
    record = await _get(store, project, "r1")
    assert (record.state, record.result, record.body) == ("done", b"", b"")


async def test_outcomes_survive_a_restart_and_are_delivered_again_and_again(data_dir: Path, now: datetime) -> None:
    store = await Store.open(data_dir)
    project = await store.write(lambda db: ensure_project(db, "mine"))
    make = Make(store, project)
    for n, request_id in enumerate(("done", "failed", "open")):
        await make.operation(request_id, seq_id=n)
    error = NonFiniteGradient("the gradient is not finite", field="loss_fn_inputs", hint="Lower the rate.")
    await store.write(lambda db: finish(db, "done", b"result", "application/x-protobuf", now))
    await store.write(lambda db: fail(db, "failed", error, now))
    await store.close()
    for _ in range(3):
        store = await Store.open(data_dir)
        done, failed = [await _get(store, project, name) for name in ("done", "failed")]
        assert (done.result, done.content_type) == (b"result", "application/x-protobuf")
        assert type(failed.error) is NonFiniteGradient
        assert vars(failed.error) == vars(error)
        assert [record.request_id for record in await store.read(unfinished)] == ["open"]
        await store.write(lambda db: mark_delivered(db, dict.fromkeys(("done", "failed", "open"), now)))
        await store.close()


async def test_unfinished_comes_in_order(store: Store, make: Make) -> None:
    for request_id, scope, seq_id in (("c", "model:b", 1), ("b", "model:a", 10), ("a", "model:a", 2)):
        await make.operation(request_id, scope=scope, seq_id=seq_id)
    assert [record.request_id for record in await store.read(unfinished)] == ["a", "b", "c"]


async def test_expiry_counts_from_the_first_delivery_or_the_end(
    store: Store, project: str, make: Make, now: datetime
) -> None:
    minute = timedelta(minutes=1)
    for n, request_id in enumerate(("delivered", "fresh", "forgotten", "undelivered", "pending", "failed")):
        await make.operation(request_id, seq_id=n)
    for request_id in ("delivered", "fresh", "forgotten", "undelivered"):
        finished = now - 100 * minute if request_id == "forgotten" else now - 20 * minute
        await store.write(lambda db, r=request_id, t=finished: finish(db, r, b"result", "application/json", t))
    await store.write(lambda db: fail(db, "failed", OutOfMemory("x"), now - 20 * minute))
    await store.write(
        lambda db: mark_delivered(db, dict.fromkeys(("delivered", "failed", "pending"), now - 10 * minute))
    )
    await store.write(lambda db: mark_delivered(db, dict.fromkeys(("delivered", "fresh"), now)))

    await store.write(lambda db: expire_results(db, now - 5 * minute, now - 60 * minute))
    records = {name: await _get(store, project, name) for name in ("delivered", "forgotten", "failed")}
    for record in records.values():
        assert record.state == "expired"
        assert (record.body, record.result, record.error, record.content_type) == (b"", None, None, None)
    assert (await _get(store, project, "fresh")).result == b"result"
    assert (await _get(store, project, "undelivered")).result == b"result"
    pending = await _get(store, project, "pending")
    assert (pending.state, pending.delivered_at) == ("pending", None)


async def test_expiry_hands_back_the_files_and_the_sweep_keeps_the_others(
    store: Store, data_dir: Path, project: str, make: Make, now: datetime
) -> None:
    bodies = Bodies(data_dir)
    large = b"x" * 100_000
    refs = {name: await bodies.put(name, "request", large) for name in ("old", "kept", "stray")}
    result = await bodies.put("old", "result", large)
    await make.operation("old", body=refs["old"])
    await make.operation("kept", seq_id=2, body=refs["kept"])
    await store.write(lambda db: finish(db, "old", result, "application/json", now))
    record = await _get(store, project, "old")
    assert (record.body, record.result) == (refs["old"], result)

    later = now + timedelta(hours=1)
    _, dropped = await store.write(lambda db: expire_results(db, later, later))
    assert set(dropped) == {refs["old"], result}
    await bodies.delete(dropped)
    assert await bodies.sweep(await store.read(body_names)) == 1
    assert isinstance(refs["kept"], BodyRef)
    assert [path.name for path in (data_dir / "bodies").iterdir()] == [refs["kept"].name]
    assert await store.write(lambda db: expire_results(db, later, later)) == (0, [])


async def test_expiry_is_done_in_short_writes(store: Store, make: Make, now: datetime) -> None:
    for n in range(5):
        await make.operation(f"r{n}", seq_id=n)
        await store.write(lambda db, r=f"r{n}": finish(db, r, b"result", "application/json", now))
    later, left = now + timedelta(hours=1), []
    done = select(func.count()).select_from(Operation).where(Operation.state == "done")
    for _ in range(3):
        await store.write(lambda db: expire_results(db, later, later, limit=2))
        left.append(await store.read(lambda db: db.scalar(done)))
    assert left == [3, 1, 0]


async def test_operation_of_another_project_is_never_handed_out(
    store: Store, other_project: str, make: Make, now: datetime
) -> None:
    await make.operation("r1")
    assert await store.read(lambda db: get_operation(db, other_project, "r1")) is None
    new = make.new("r2", project_id=other_project)
    with pytest.raises(SeqIdConflict):
        await store.write(lambda db: append(db, new))


def test_unknown_error_class_becomes_its_nearest_known_ancestor() -> None:
    data = error_to_json(ModelLost("lost", field="model_id", code="special"))
    assert data["classes"] == ["ModelLost", "TinsmithError"]
    back = error_from_json(data)
    assert (type(back), back.status, back.code, back.field) == (ModelLost, 410, "special", "model_id")
    data["classes"] = ["OfAPlugin", "InvalidRequest", "TinsmithError"]
    assert type(error_from_json(data)) is InvalidRequest
    data["classes"] = ["OfAPlugin"]
    assert type(error_from_json(data)) is TinsmithError
