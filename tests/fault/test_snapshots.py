"""What a model goes back to when its worker dies, bit for bit: snapshots good and damaged, its creation, or nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from app.settings import Settings
from store import snapshots
from store.tables import Operation, Snapshot
from tests.app.conftest import MODEL
from tests.support.api import Api, datum, serving

DATA = [datum(5, 6, 7, 8, 9), datum(10, 11, 12)]
NEVER = {"snapshot_operations": 10_000, "snapshot_seconds": 1e6}
OFTEN = {"snapshot_operations": 2, "snapshot_share": 1.0}
MakeSettings = Callable[..., Settings]


@pytest.fixture
def settings(tmp_path: Path, base: Path) -> MakeSettings:
    def make(**values: Any) -> Settings:
        given = {"data_dir": tmp_path / "data", "base_model": [f"{MODEL}={base}"], "poll_hold": 5.0, **values}
        return Settings(**given)

    return make


def state(api: Api, model: str) -> dict[str, Any]:
    """All that the worker knows of a model."""
    kept = api.groups.made[0].worker.actor.engine._pool.get(model)
    vectors = {"weights": kept.flat, **kept.moments}
    if kept.gradient.flat is not None:
        vectors["gradient"] = kept.gradient.flat
    bits = {name: vector.numpy().tobytes() for name, vector in vectors.items()}
    return {**bits, "steps": kept.steps, "passes": kept.gradient.passes, "poisoned": kept.gradient.poisoned}


async def forward_backward(api: Api, model: str, weight: float = 1.0) -> None:
    data = [datum(5, 6, 7, 8, 9, weight=weight), *DATA]
    await api.do("forward_backward", model_id=model, data=data, loss_fn="cross_entropy")


async def die(api: Api, model: str) -> None:
    """The worker dies, and the model is back when this returns."""
    api.groups.made[0].die()
    await api.do("forward", model_id=model, data=DATA, loss_fn="cross_entropy")


async def newest(api: Api, model: str, above: int = -1) -> list[Any]:
    """The snapshots of a model, once the newest one is of an operation after `above`."""
    store = api.edge.app.state.store
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = await store.read(lambda db: snapshots.snapshots_of(db, model))
        if found and found[0].applied_seq > above:
            return list(found)
        await asyncio.sleep(0.02)
    raise AssertionError("no snapshot was taken")


async def all_taken(api: Api) -> None:
    """Wait until no snapshot is due, written or recorded."""
    [runtime] = api.edge.app.state.services.models.runtimes.values()
    taken = runtime._training._snapshots
    deadline = time.monotonic() + 20
    while taken._writing is not None or any(model.operations >= 2 for model in taken._models.values()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("policy", [NEVER, OFTEN], ids=["from its creation", "from a snapshot"])
async def test_a_dead_worker_leaves_no_trace(settings: MakeSettings, policy: dict[str, Any]) -> None:
    async with serving(settings(**policy)) as api:
        model = await api.model()
        await api.train(model, steps=4)
        await forward_backward(api, model)
        await forward_backward(api, model, weight=0.25)
        before = state(api, model)
        assert before["passes"] == 2
        await die(api, model)
        assert state(api, model) == before
        await api.do("zero_grad", model_id=model)
        await forward_backward(api, model)
        cleared = state(api, model)
        await die(api, model)
        assert state(api, model) == cleared
        calls = api.groups.made[0].calls
        assert ("restore_snapshot" in calls) == (policy is OFTEN)


async def test_weights_that_were_loaded_are_there_after_a_death_even_if_their_checkpoint_is_not(
    settings: MakeSettings,
) -> None:
    async with serving(settings(**NEVER)) as api:
        model = await api.model()
        await api.train(model, steps=2)
        path = (await api.do("save_weights", model_id=model, path="x"))["path"]
        await api.train(model)
        await api.do("load_weights", model_id=model, path=path, optimizer=True)
        await newest(api, model)
        assert (await api.client.delete(f"training_runs/{model}/checkpoints/weights/x")).is_success
        await forward_backward(api, model)
        before = state(api, model)
        await die(api, model)
        assert state(api, model) == before


async def test_a_step_that_only_cleared_a_bad_gradient_does_so_again(settings: MakeSettings) -> None:
    async with serving(settings(**NEVER)) as api:
        model = await api.model()
        await api.train(model)
        await forward_backward(api, model, weight=3e38)
        assert (await api.fails("optim_step", model_id=model, adam_params={}))["code"] == "non_finite_gradient"
        await forward_backward(api, model)
        before = state(api, model)
        await die(api, model)
        assert state(api, model) == before


async def test_a_snapshot_damaged_at_any_byte_is_found_out_and_the_one_before_is_used(settings: MakeSettings) -> None:
    chance = random.Random(3)
    config = settings(**OFTEN)
    async with serving(config) as api:
        model, above = await api.model(), 0
        await api.train(model)
        await newest(api, model)
        for place in (0.0, 0.02, chance.random(), chance.random(), 1.0):
            await api.train(model, steps=2)
            await all_taken(api)
            [last, older] = await newest(api, model, above)
            above = last.applied_seq
            damage(config.data_dir / "snapshots" / last.file, place)
            before = state(api, model)
            await die(api, model)
            assert state(api, model) == before
            left = [one.file for one in await newest(api, model)]
            assert last.file not in left
            assert older.file in left


def damage(path: Path, place: float) -> None:
    """Change one byte, `place` of the way through."""
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 0x10
    path.write_bytes(data)


async def test_without_any_intact_snapshot_a_model_is_lost_and_says_what_to_do(settings: MakeSettings) -> None:
    config = settings(**OFTEN)
    async with serving(config) as api:
        session = await api.session()
        model = await api.model(session)
        await api.train(model, steps=2)
        path = (await api.do("save_weights", model_id=model, path="x"))["path"]
        first = await newest(api, model)
        await api.train(model, steps=2)
        for one in await newest(api, model, first[0].applied_seq):
            damage(config.data_dir / "snapshots" / one.file, 0.5)
        api.groups.made[0].die()
        answer = await api.fails("forward", model_id=model, data=DATA, loss_fn="cross_entropy")
        assert (answer["code"], answer["category"]) == ("model_lost", "server")
        assert "create_training_client_from_state_with_optimizer" in answer["hint"]
        resumed = await api.do("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)
        await api.train(resumed["model_id"])


@pytest.mark.parametrize("policy", [NEVER, OFTEN], ids=["without snapshots", "with snapshots"])
async def test_a_new_server_goes_on_where_the_old_one_was(settings: MakeSettings, policy: dict[str, Any]) -> None:
    config = settings(**policy)
    async with serving(config) as api:
        session = await api.session()
        model = await api.model(session)
        await api.train(model, steps=3)
        await forward_backward(api, model)
        before = state(api, model)
    async with serving(config) as api:
        await api.do("forward", model_id=model, data=DATA, loss_fn="cross_entropy")
        assert state(api, model) == before
        await api.do("unload_model", model_id=model)
        await api.edge.app.state.services.housekeeping.sweep()
        assert list((config.data_dir / "snapshots").iterdir()) == []


async def test_requests_are_kept_until_two_snapshots_cover_them_and_no_longer(settings: MakeSettings) -> None:
    config = settings(**OFTEN, result_retention_delivered=600.0)
    async with serving(config) as api:
        model = await api.model()
        await api.train(model, steps=6)
        [last, older] = await newest(api, model, 10)

        async def kept(db: Any) -> list[int]:
            scope = Operation.scope == f"model:{model}"
            return list(await db.scalars(select(Operation.seq_id).where(scope, Operation.body_inline.is_not(None))))

        store = api.edge.app.state.store
        assert await store.read(kept) == list(range(older.applied_seq + 1, 13))
        assert last.applied_seq <= 12
        assert await store.read(lambda db: db.scalar(select(func.count()).select_from(Snapshot))) == 2
        async with asyncio.timeout(20):  # the file of the one before goes after its row
            while len(list((config.data_dir / "snapshots").iterdir())) != 2:  # noqa: ASYNC110 (a test, not the product)
                await asyncio.sleep(0.01)


async def test_what_a_stopping_server_did_not_come_to_is_done_by_the_next_one(settings: MakeSettings) -> None:
    config = settings(**NEVER, shutdown_grace=0.0)
    async with serving(config) as api:
        model = await api.model()
        many = {"data": [datum(*range(5, 60))] * 40, "loss_fn": "cross_entropy"}
        promised = [await api.submit("forward_backward", model_id=model, seq_id=seq, **many) for seq in range(1, 6)]
        promised.append(await api.submit("optim_step", model_id=model, seq_id=6, adam_params={"learning_rate": 0.01}))
        await api.edge.app.state.lifecycle.drain()

        async def pending(db: Any) -> int:
            mine = select(func.count()).where(Operation.scope == f"model:{model}", Operation.state == "pending")
            return int(await db.scalar(mine) or 0)

        assert await api.edge.app.state.store.read(pending) > 0, "all was done in time: the test is vacuous"
    async with serving(config) as api:
        outcomes = [await api.result(request_id) for request_id in promised]
        assert all("error" not in outcome for outcome in outcomes)
        assert state(api, model)["steps"] == 1
        other = await api.model()
        for _ in range(5):
            await api.do("forward_backward", model_id=other, **many)
        await api.do("optim_step", model_id=other, adam_params={"learning_rate": 0.01})
        assert state(api, other) == state(api, model)
