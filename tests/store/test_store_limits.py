"""Limits as rows and what is counted against them, on both databases."""

from __future__ import annotations

import asyncio
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from schemas.errors import Cancelled, InvalidRequest
from store import operations as log
from store.database import Store
from store.limit_counters import Counters, counters_of, keep, note_limited, others_wait, restart_budget
from store.limits import clear_limits, key_subject, limits_of, project_subject, set_limits
from store.usage import TokenKind
from tests.store.factories import Make

SUBJECT = project_subject("p")


def test_a_bucket_fills_to_its_size_and_promises_what_it_does_not_have() -> None:
    counters = Counters(SUBJECT)
    assert counters.available("training", 100.0, 10, 50) == 50
    assert counters.take("training", 50, 100.0, 10, 50) == 0
    assert counters.take("training", 20, 100.0, 10, 50) == pytest.approx(2.0)
    assert counters.take("training", 10, 101.0, 10, 50) == pytest.approx(2.0), "behind the one before"
    assert counters.available("training", 101.0, 10, 50) == pytest.approx(-20)
    assert counters.available("training", 1000.0, 10, 50) == 50
    assert counters.available("training", 50.0, 10, 50) == pytest.approx(-20), "a clock that goes back takes nothing"
    assert counters.available("sampling", 101.0, 1, 7) == 7


def test_a_clock_that_was_ahead_once_starves_no_bucket() -> None:
    counters = Counters(SUBJECT)
    begin, day = 1_700_000_000.0, 86_400.0
    counters.take("requests", 1, begin, 1.0, 60.0)
    counters.take("requests", 1, begin + day, 1.0, 60.0)  # by a clock that was wrong
    assert max(counters.take("requests", 1, begin + second, 1.0, 60.0) for second in range(1, 200)) == 0.0
    counters.take("requests", 58, begin + 260, 1.0, 60.0)
    counters.take("requests", 1, begin + 230, 1.0, 60.0)  # by the clock of another server, which is a little behind
    assert counters.requests_at == begin + 260


async def test_limits_are_set_replaced_lifted_and_cleared(store: Store, now: datetime) -> None:
    key = key_subject("k")

    async def write(db: Any) -> None:
        await set_limits(db, SUBJECT, {"lora_rank": 8, "live_runs": 2}, now)
        await set_limits(db, SUBJECT, {"lora_rank": 16, "checkpoint_bytes": None}, now)
        await set_limits(db, key, {"requests_per_second": 0.5}, now)
        await clear_limits(db, SUBJECT, ["live_runs"])

    await store.write(write)
    found = await store.read(lambda db: limits_of(db, [SUBJECT, key, "project:other"]))
    values = {subject: {name: limit.value for name, limit in rows.items()} for subject, rows in found.items()}
    assert values == {SUBJECT: {"lora_rank": 16, "checkpoint_bytes": None}, key: {"requests_per_second": 0.5}}
    await store.write(lambda db: clear_limits(db, SUBJECT, None))
    assert list(await store.read(lambda db: limits_of(db, [SUBJECT, key]))) == [key]


async def test_a_cancelled_sample_is_settled_by_what_it_took(store: Store, make: Make, now: datetime) -> None:
    share = {"sampling": 30, "charged": 25.0, "sequences": 2}

    async def begin(db: Any) -> None:
        counters = await counters_of(db, SUBJECT)
        counters.sampling_reserved, counters.sequence_tokens = 60, 4.0
        counters.take("sampling", 50, 100.0, 1.0, 100.0)
        await keep(db, counters)

    async def cancel(number: int, drawn: int) -> Counters:
        record, _ = await make.operation(f"r{number}", seq_id=number)
        await store.write(partial(note_limited, request_id=record.request_id, limited={"subjects": {SUBJECT: share}}))
        took: dict[TokenKind, int] = {"sampling_prefill": 3, "sampling_sample": drawn}
        first = await store.write(lambda db: log.fail(db, record.request_id, Cancelled(), now, tokens=took))
        again = await store.write(lambda db: log.fail(db, record.request_id, Cancelled(), now, tokens=took))
        assert (first, again) == (True, False)
        return await store.read(lambda db: counters_of(db, SUBJECT))

    await store.write(begin)
    early = await cancel(1, 2)
    assert (early.sampling_reserved, early.sampling_used) == (30, 5)
    assert early.sampling_level == pytest.approx(50 + 25 - 5)
    assert early.sequence_tokens == 4.0, "it would have drawn more"
    late = await cancel(2, 24)
    assert (late.sampling_reserved, late.sampling_used) == (0, 5 + 27)
    assert late.sampling_level == pytest.approx(50 + 25 - 5 + 25 - 27)
    assert late.sequence_tokens == pytest.approx(4 + (12 - 4) / 16)


async def test_a_settled_operation_frees_what_was_held_for_it_once(store: Store, make: Make, now: datetime) -> None:
    share = {"slot": 1, "training": 10, "sampling": 30, "charged": 25.0, "sequences": 2}

    async def begin(db: Any) -> None:
        counters = await counters_of(db, SUBJECT)
        counters.operations, counters.training_reserved, counters.sampling_reserved = 2, 20, 60
        counters.take("sampling", 50, 100.0, 1.0, 100.0)
        await keep(db, counters)

    await store.write(begin)
    (done, _), (failed, _) = [await make.operation(f"r{number}", seq_id=number) for number in (1, 2)]
    for record in (done, failed):
        await store.write(partial(note_limited, request_id=record.request_id, limited={"subjects": {SUBJECT: share}}))
    assert await store.read(lambda db: others_wait(db, done.scope, 1))
    assert not await store.read(lambda db: others_wait(db, done.scope, 2))
    used: dict[TokenKind, int] = {
        "training": 9,
        "sampling_prefill": 5,
        "sampling_prefill_cached": 1,
        "sampling_sample": 8,
    }
    for _ in range(2):  # the first outcome stands
        await store.write(lambda db: log.finish(db, done.request_id, b"", "text/plain", now, tokens=used))
    found = await store.read(lambda db: counters_of(db, SUBJECT))
    assert (found.operations, found.training_reserved, found.sampling_reserved) == (1, 10, 30)
    assert (found.training_used, found.sampling_used) == (9, 14)
    assert found.sampling_level == pytest.approx(50 + 25 - 14)
    assert found.sequence_tokens == pytest.approx(4.0)
    for _ in range(2):
        await store.write(lambda db: log.fail(db, failed.request_id, InvalidRequest("no"), now))
    found = await store.read(lambda db: counters_of(db, SUBJECT))
    assert (found.operations, found.training_reserved, found.sampling_reserved) == (0, 0, 0)
    assert (found.training_used, found.sampling_used) == (9, 14), "what fails uses nothing"
    await store.write(lambda db: restart_budget(db, SUBJECT, "training"))
    assert (await store.read(lambda db: counters_of(db, SUBJECT))).training_used == 0


async def test_writes_at_once_count_all(store: Store) -> None:
    async def add(db: Any) -> None:
        counters = await counters_of(db, SUBJECT)
        counters.operations += 1
        await keep(db, counters)

    await asyncio.gather(*(store.write(add) for _ in range(20)))
    assert (await store.read(lambda db: counters_of(db, SUBJECT))).operations == 20
