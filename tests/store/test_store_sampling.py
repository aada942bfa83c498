"""What the store keeps for sampling: completions in order, clones, inflight slots, sampled sequences."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import InvalidRequest
from schemas.operations import LoraSpec
from store import checkpoints, samplers
from store import operations as log
from store.bodies import Bodies
from store.completions import Client, completions, release
from store.database import Store
from store.records import SequenceRecord
from store.sequences import add_sequences, expire_sequences, get_sequences
from store.slots import move_slot, slot_checkpoint
from tests.store.conftest import only_sqlite
from tests.store.factories import NOW, Make

BILLION = 10**9
SCOPE = "sampler:s:sample:0"


@pytest.fixture
def client(project: str) -> Client:
    return Client(project, SCOPE, 0, BILLION - 1)


async def _settle(store: Store, *names: str, result: Any = b"abc") -> None:
    for name in names:
        await store.write(lambda db, name=name: log.finish(db, name, result, "text/plain", NOW))


async def _seen(
    store: Store, client: Client, after: int = 0, limit: int = 100
) -> list[tuple[str, int, bool, int | None]]:
    found = await store.read(lambda db: completions(db, client, after, limit))
    return [(each.request_id, each.place, each.finished, each.size) for each in found]


async def test_outcomes_are_listed_in_the_order_in_which_they_became_durable(
    store: Store, make: Make, client: Client
) -> None:
    for seq_id, name in enumerate("abcd"):
        await make.operation(name, scope=SCOPE, seq_id=seq_id)
    await make.operation("elsewhere", scope="sampler:s:sample:1", seq_id=0)
    await _settle(store, "c", "elsewhere", "a")
    await store.write(lambda db: log.fail(db, "b", InvalidRequest("no"), NOW))
    assert await _seen(store, client) == [("c", 1, True, 3), ("a", 2, True, 3), ("b", 3, False, None)]
    assert await _seen(store, client, after=1, limit=1) == [("a", 2, True, 3)]
    assert await _seen(store, client, after=3) == []
    await _settle(store, "d", "d")
    assert await _seen(store, client, after=3) == [("d", 4, True, 3)]


async def test_clients_of_a_sampler_and_projects_see_only_their_own(
    store: Store, make: Make, client: Client, other_project: str
) -> None:
    await make.operation("mine", scope=SCOPE, seq_id=BILLION - 1)
    await make.operation("clone", scope=SCOPE, seq_id=BILLION)
    await _settle(store, "mine", "clone")
    assert [name for name, *_ in await _seen(store, client)] == ["mine"]
    clone = replace(client, first=BILLION, last=2 * BILLION - 1)
    assert await _seen(store, clone) == [("clone", 2, True, 3)]
    assert await _seen(store, replace(client, project_id=other_project)) == []
    await store.write(lambda db: release(db, clone, ["mine"], NOW))
    await store.write(lambda db: release(db, replace(client, project_id=other_project), ["mine"], NOW))
    assert await _seen(store, client) == [("mine", 1, True, 3)]


async def test_places_go_on_after_a_restart(
    data_dir: Path, store: Store, make: Make, client: Client, database_url: str | None
) -> None:
    for seq_id, name in enumerate("ab"):
        await make.operation(name, scope=SCOPE, seq_id=seq_id)
    await _settle(store, "b")
    await store.close()
    again = await Store.open(data_dir, database_url)
    await _settle(again, "a")
    assert await _seen(again, client, after=1) == [("a", 2, True, 3)]
    await again.close()


async def test_a_released_result_is_gone_with_its_file_and_the_line_stays(
    store: Store, make: Make, client: Client, data_dir: Path
) -> None:
    bodies = Bodies(data_dir)
    large = await bodies.put("a", "result", b"x" * 100_000)
    await make.operation("a", scope=SCOPE, seq_id=0)
    await make.operation("pending", scope=SCOPE, seq_id=1)
    await _settle(store, "a", result=large)
    assert await _seen(store, client) == [("a", 1, True, 100_000)]
    refs = await store.write(lambda db: release(db, client, ["a", "pending", "unknown"], NOW))
    assert refs == [large]
    assert await store.write(lambda db: release(db, client, ["a"], NOW)) == []
    record = await store.read(lambda db: log.get_operation(db, client.project_id, "a"))
    assert record is not None
    assert (record.state, record.result, record.delivered_at) == ("expired", None, NOW)
    assert await _seen(store, client) == [("a", 1, False, None)]
    assert [each.request_id for each in await store.read(log.unfinished)] == ["pending"]


@only_sqlite
async def test_more_ids_than_a_statement_takes_are_released(store: Store, make: Make, client: Client) -> None:
    names = [f"r{i:04}" for i in range(600)]
    for seq_id, name in enumerate(names):
        await make.operation(name, scope=SCOPE, seq_id=seq_id)
    await _settle(store, *names)
    await store.write(lambda db: release(db, client, names, NOW))
    assert {finished for _, _, finished, _ in await _seen(store, client, limit=1000)} == {False}


async def test_clones_are_numbered_from_one_and_survive(
    data_dir: Path, store: Store, make: Make, database_url: str | None
) -> None:
    await make.session()
    await _sampler(store, make)
    numbers = [await store.write(lambda db: samplers.count_clone(db, "s:sample:0")) for _ in range(3)]
    await store.close()
    again = await Store.open(data_dir, database_url)
    numbers.append(await again.write(lambda db: samplers.count_clone(db, "s:sample:0")))
    assert numbers == [1, 2, 3, 4]
    await again.close()


async def test_a_slot_only_moves_forward_and_what_it_leaves_expires_when_nothing_reads_it(
    store: Store, make: Make
) -> None:
    await make.session()
    model = await make.run()
    for name in ("c1", "c2", "c3"):
        await _checkpoint(store, make, name)
    assert await store.read(lambda db: slot_checkpoint(db, model)) is None
    await store.write(lambda db: move_slot(db, model, 1, "c1", NOW))
    await make.operation("reads", scope=SCOPE, seq_id=0, checkpoint_id="c1")
    await store.write(lambda db: move_slot(db, model, 7, "c3", NOW))
    await store.write(lambda db: move_slot(db, model, 5, "c2", NOW))  # its save ran before, and was written later
    assert await store.read(lambda db: slot_checkpoint(db, model)) == "c3"
    assert await _expired(store) == ["c2"]
    await _settle(store, "reads")
    assert sorted(await _expired(store)) == ["c1", "c2"]


async def test_sequences_are_kept_by_project_until_they_are_old(store: Store, project: str, other_project: str) -> None:
    record = SequenceRecord("s:sample:0:1:0", project, "tiny", None, 0.7, b"tok", b"lp", b"plain", NOW)
    later = replace(record, sequence_id="s:sample:0:2:0", created_at=NOW + timedelta(hours=2))
    await store.write(lambda db: add_sequences(db, [record, later]))
    ids = [record.sequence_id, later.sequence_id, "unknown"]
    found = await store.read(lambda db: get_sequences(db, project, ids))
    assert found == {record.sequence_id: record, later.sequence_id: later}
    assert await store.read(lambda db: get_sequences(db, other_project, ids)) == {}
    assert await store.write(lambda db: expire_sequences(db, NOW + timedelta(hours=1))) == 1
    assert list(await store.read(lambda db: get_sequences(db, project, ids))) == [later.sequence_id]


async def _sampler(store: Store, make: Make) -> None:
    await store.write(
        lambda db: samplers.create_sampler(
            db,
            sampler_id="s:sample:0",
            project_id=make.project,
            session_id="s",
            seq_id=0,
            base_model="tiny",
            model_path=None,
            checkpoint_id=None,
            now=NOW,
        )
    )


async def _checkpoint(store: Store, make: Make, name: str) -> None:
    await store.write(
        lambda db: checkpoints.create_checkpoint(
            db,
            checkpoint_id=name,
            project_id=make.project,
            model_id="s:train:0",
            kind="sampler",
            name=None,
            folder=name * 16,
            size_bytes=1,
            base_model="tiny",
            lora=LoraSpec(rank=4, seed=1),
            has_optimizer=False,
            user_metadata={},
            expires_at=None,
            now=NOW,
            overwrite=False,
        )
    )


async def _expired(store: Store) -> list[str]:
    found = await store.read(lambda db: checkpoints.expired_checkpoints(db, NOW + timedelta(seconds=1)))
    return [each.checkpoint_id for each in found]
