"""Sessions, runs, samplers and checkpoints: idempotency, states, paging, and whose they are."""

from __future__ import annotations

import secrets
from datetime import datetime, timedelta
from typing import Any

import pytest

from schemas.errors import AlreadyExists, SeqIdConflict
from schemas.operations import LoraSpec
from store import checkpoints, runs, samplers, sessions
from store.database import Store
from store.operations import get_operation
from store.records import CheckpointRecord, RunState, SamplerRecord, SessionRecord
from tests.store.factories import NOW, Make

SPEC = LoraSpec(rank=8, seed=2**62, train_unembed=False)
MINUTE = timedelta(minutes=1)


async def _session(store: Store, project: str, session_id: str, **changes: Any) -> SessionRecord:
    values: dict[str, Any] = {
        "session_id": session_id,
        "project_id": project,
        "tags": ["ä", "b"],
        "user_metadata": {"deep": {"list": [1, None, "\ud800"]}},
        "sdk_version": "0.38.0",
        "display_name": "name",
        "idempotency_key": None,
        "now": NOW,
    }
    return await store.write(lambda db: sessions.create_session(db, **(values | changes)))


async def _checkpoint(
    store: Store, project: str, model_id: str, name: str | None, **changes: Any
) -> tuple[CheckpointRecord, str | None]:
    values: dict[str, Any] = {
        "checkpoint_id": secrets.token_hex(16),
        "project_id": project,
        "model_id": model_id,
        "kind": "training",
        "name": name,
        "folder": secrets.token_hex(16),
        "size_bytes": 2**40,
        "base_model": "tiny",
        "lora": SPEC,
        "has_optimizer": True,
        "user_metadata": {"a": "b"},
        "expires_at": None,
        "now": NOW,
        "overwrite": False,
    }
    return await store.write(lambda db: checkpoints.create_checkpoint(db, **(values | changes)))


async def _sampler(store: Store, project: str, sampler_id: str, **changes: Any) -> SamplerRecord:
    values: dict[str, Any] = {
        "sampler_id": sampler_id,
        "project_id": project,
        "session_id": "s",
        "seq_id": 2**40,
        "base_model": "tiny",
        "model_path": None,
        "checkpoint_id": None,
        "now": NOW,
    }
    return await store.write(lambda db: samplers.create_sampler(db, **(values | changes)))


async def test_session_comes_back_as_it_was_made(store: Store, project: str) -> None:
    made = await _session(store, project, "s")
    assert await store.read(lambda db: sessions.get_session(db, project, "s")) == made
    assert (made.state, made.tags, made.ended_at) == ("active", ("ä", "b"), None)
    assert made.user_metadata == {"deep": {"list": [1, None, "\ud800"]}}
    assert made.created_at.tzinfo is not None


async def test_session_is_made_once_per_idempotency_key_and_project(
    store: Store, project: str, other_project: str
) -> None:
    first = await _session(store, project, "s1", idempotency_key="k")
    assert await _session(store, project, "s2", idempotency_key="k") == first
    with pytest.raises(SeqIdConflict, match="used before"):
        await _session(store, project, "s2", idempotency_key="k", display_name="other")
    assert (await _session(store, other_project, "s3", idempotency_key="k")).session_id == "s3"
    assert (await _session(store, project, "s4")).session_id == "s4"
    assert (await _session(store, project, "s5")).session_id == "s5"


async def test_first_reason_of_an_end_wins(store: Store, project: str) -> None:
    await _session(store, project, "s")
    ended = await store.write(lambda db: sessions.finish_session(db, project, "s", "success", None, NOW + MINUTE))
    assert ended is not None
    assert (ended.state, ended.finish_reason, ended.ended_at) == ("finished", "success", NOW + MINUTE)
    again = await store.write(lambda db: sessions.finish_session(db, project, "s", "errored", "late", NOW + 2 * MINUTE))
    assert again == ended
    assert not await store.write(lambda db: sessions.expire_session(db, "s", NOW))


async def test_silent_sessions_are_found_and_expire(store: Store, project: str) -> None:
    for name in ("silent", "alive", "finished"):
        await _session(store, project, name)
    await store.write(lambda db: sessions.finish_session(db, project, "finished", "success", None, NOW))
    seen = {"alive": NOW + 5 * MINUTE, "finished": NOW + 5 * MINUTE, "unknown": NOW}
    await store.write(lambda db: sessions.touch_sessions(db, seen))
    await store.write(lambda db: sessions.touch_sessions(db, {"alive": NOW + MINUTE}))
    silent = await store.read(lambda db: sessions.silent_sessions(db, NOW + 5 * MINUTE))
    assert [record.session_id for record in silent] == ["silent"]
    assert await store.write(lambda db: sessions.expire_session(db, "silent", NOW + 9 * MINUTE))
    assert await store.read(lambda db: sessions.silent_sessions(db, NOW + 5 * MINUTE)) == []
    expired = await store.read(lambda db: sessions.get_session(db, project, "silent"))
    assert expired is not None
    assert (expired.state, expired.ended_at) == ("expired", NOW + 9 * MINUTE)
    finished = await store.read(lambda db: sessions.get_session(db, project, "finished"))
    assert finished is not None
    assert finished.last_seen_at == NOW


async def test_time_without_a_zone_is_refused(store: Store, project: str) -> None:
    with pytest.raises(Exception, match="without a zone"):
        await _session(store, project, "s", now=datetime(2026, 5, 1))


async def test_run_is_made_once_and_learns_its_geometry(store: Store, project: str, make: Make) -> None:
    await make.session()
    model_id = await make.run()
    with pytest.raises(SeqIdConflict):
        await make.run()
    await store.write(lambda db: runs.set_run_lora(db, model_id, SPEC))
    for when in (NOW + MINUTE, NOW):
        await store.write(lambda db, t=when: runs.touch_run(db, model_id, t))
    run = await store.read(lambda db: runs.get_run(db, project, model_id))
    assert run is not None
    assert (run.lora, run.state, run.last_request_at) == (SPEC, "creating", NOW + MINUTE)


ALLOWED = {
    ("creating", "ready"),
    ("creating", "failed"),
    ("creating", "lost"),
    ("creating", "closed"),
    ("ready", "lost"),
    ("ready", "closed"),
    ("failed", "closed"),
    ("lost", "closed"),
}


@pytest.mark.parametrize("before", ["creating", "ready", "failed", "lost", "closed"])
async def test_run_states_never_go_back(store: Store, project: str, make: Make, before: RunState) -> None:
    await make.session()
    states: tuple[RunState, ...] = ("creating", "ready", "failed", "lost", "closed")
    for n, after in enumerate(states):
        model_id = await make.run(n)
        if before != "creating":
            assert await store.write(lambda db, m=model_id: runs.set_run_state(db, m, before))
        moved = await store.write(lambda db, m=model_id, a=after: runs.set_run_state(db, m, a))
        run = await store.read(lambda db, m=model_id: runs.get_run(db, project, m))
        assert run is not None
        assert (moved, run.state) == (((before, after) in ALLOWED), after if moved else before)


async def test_live_runs_are_found_after_a_restart(store: Store, project: str, make: Make) -> None:
    await make.session()
    states: tuple[RunState, ...] = ("ready", "failed", "closed")
    ids = {"creating": await make.run(0)}
    for n, state in enumerate(states, start=1):
        ids[state] = await make.run(n)
        await store.write(lambda db, s=state: runs.set_run_state(db, ids[s], s))
    live = await store.read(runs.live_runs)
    assert [(run.model_id, run.state) for run in live] == [(ids["creating"], "creating"), (ids["ready"], "ready")]


async def test_pages_are_newest_first_and_know_the_total(
    store: Store, project: str, other_project: str, make: Make
) -> None:
    await make.session()
    for n in range(5):
        await make.run(n, now=NOW + n * MINUTE)
        await _checkpoint(store, project, "s:train:0", f"c{n}", now=NOW + n * MINUTE)
    page, total = await store.read(lambda db: runs.list_runs(db, project, 2, 1))
    assert ([run.model_seq_id for run in page], total) == ([3, 2], 5)
    listed, total = await store.read(lambda db: checkpoints.list_checkpoints(db, project, limit=2, offset=3))
    assert ([record.name for record in listed], total) == (["c1", "c0"], 5)
    assert await store.read(lambda db: sessions.list_sessions(db, other_project, 10, 0)) == ([], 0)
    _, total = await store.read(lambda db: sessions.list_sessions(db, project, 10, 0))
    assert total == 1


async def test_sampler_is_made_once_per_content(store: Store, make: Make) -> None:
    await make.session()
    first = await _sampler(store, make.project, "a", model_path="tinker://x/sampler_weights/y", checkpoint_id="c")
    again = await _sampler(store, make.project, "b", model_path="tinker://x/sampler_weights/y", checkpoint_id="c")
    assert again == first
    for change in ({"model_path": None}, {"base_model": "other"}, {"checkpoint_id": "d"}):
        wanted: dict[str, Any] = {"model_path": "tinker://x/sampler_weights/y", "checkpoint_id": "c"}
        with pytest.raises(SeqIdConflict):
            await _sampler(store, make.project, "b", **(wanted | change))
    await _sampler(store, make.project, "z", seq_id=1)
    listed = await store.read(lambda db: samplers.samplers_of_session(db, "s"))
    assert [record.sampler_id for record in listed] == ["z", "a"]


async def test_checkpoint_names_are_per_run_and_kind(store: Store, project: str, make: Make) -> None:
    await make.session()
    model_id, other_model = await make.run(0), await make.run(1)
    training, _ = await _checkpoint(store, project, model_id, "same")
    sampler, _ = await _checkpoint(store, project, model_id, "same", kind="sampler", has_optimizer=False)
    await _checkpoint(store, project, other_model, "same")
    with pytest.raises(AlreadyExists, match="training checkpoint named 'same'") as clash:
        await _checkpoint(store, project, model_id, "same")
    assert clash.value.status == 400
    for record, kind in ((training, "training"), (sampler, "sampler")):
        found = await store.read(lambda db, k=kind: checkpoints.find_checkpoint(db, project, model_id, k, "same"))
        assert found == record
    assert (training.lora, training.size_bytes, training.has_optimizer) == (SPEC, 2**40, True)


async def test_overwriting_hands_back_the_old_folder(store: Store, project: str, make: Make) -> None:
    await make.session()
    model_id = await make.run()
    old, none = await _checkpoint(store, project, model_id, "c", overwrite=True)
    new, replaced = await _checkpoint(store, project, model_id, "c", overwrite=True)
    assert (none, replaced) == (None, old.folder)
    assert await store.read(lambda db: checkpoints.get_checkpoint(db, project, old.checkpoint_id)) is None
    assert await store.read(checkpoints.checkpoint_folders) == {new.folder}


async def test_ephemeral_checkpoints_have_no_name_and_are_not_listed(store: Store, project: str, make: Make) -> None:
    await make.session()
    model_id = await make.run()
    made = [(await _checkpoint(store, project, model_id, None, kind="sampler"))[0] for _ in range(2)]
    assert await store.read(lambda db: checkpoints.list_checkpoints(db, project, model_id, limit=9, offset=0)) == (
        [],
        0,
    )
    for record in made:
        found = await store.read(lambda db, r=record: checkpoints.get_checkpoint(db, project, r.checkpoint_id))
        assert found == record
    assert await store.read(checkpoints.checkpoint_folders) == {record.folder for record in made}


async def test_expiry_of_checkpoints_can_be_moved(store: Store, project: str, make: Make) -> None:
    await make.session()
    model_id = await make.run()
    due, _ = await _checkpoint(store, project, model_id, "due", expires_at=NOW)
    kept, _ = await _checkpoint(store, project, model_id, "kept", expires_at=NOW)
    await _checkpoint(store, project, model_id, "for ever")
    await store.write(lambda db: checkpoints.set_checkpoint_expiry(db, kept.checkpoint_id, NOW + MINUTE))
    assert await store.read(lambda db: checkpoints.expired_checkpoints(db, NOW - MINUTE)) == []
    assert await store.read(lambda db: checkpoints.expired_checkpoints(db, NOW)) == [due]
    assert await store.write(lambda db: checkpoints.delete_checkpoint(db, due.checkpoint_id)) == due.folder
    assert await store.write(lambda db: checkpoints.delete_checkpoint(db, due.checkpoint_id)) is None
    await store.write(lambda db: checkpoints.set_checkpoint_expiry(db, kept.checkpoint_id, None))
    assert await store.read(lambda db: checkpoints.expired_checkpoints(db, NOW + 99 * MINUTE)) == []


async def test_latest_checkpoints_of_runs(store: Store, project: str, make: Make) -> None:
    await make.session()
    model_id, empty = await make.run(0), await make.run(1)
    for n in (1, 2, 0):
        await _checkpoint(store, project, model_id, f"c{n}", now=NOW + n * MINUTE)
    await _checkpoint(store, project, model_id, "s", kind="sampler")
    latest = await store.read(lambda db: checkpoints.latest_checkpoints(db, project, [model_id, empty]))
    names = {key: record.name for key, record in latest.items()}
    assert names == {(model_id, "training"): "c2", (model_id, "sampler"): "s"}


async def test_another_project_gets_nothing_by_any_getter(
    store: Store, project: str, other_project: str, make: Make
) -> None:
    await make.session()
    model_id = await make.run()
    record, _ = await _checkpoint(store, project, model_id, "c")
    await _sampler(store, project, "sampler")
    await make.operation("r")

    async def everything(owner: str) -> list[object]:
        return [
            await store.read(lambda db: sessions.get_session(db, owner, "s")),
            await store.read(lambda db: runs.get_run(db, owner, model_id)),
            await store.read(lambda db: samplers.get_sampler(db, owner, "sampler")),
            await store.read(lambda db: checkpoints.find_checkpoint(db, owner, model_id, "training", "c")),
            await store.read(lambda db: checkpoints.get_checkpoint(db, owner, record.checkpoint_id)),
            await store.read(lambda db: get_operation(db, owner, "r")),
            (await store.read(lambda db: sessions.list_sessions(db, owner, 9, 0)))[0] or None,
            (await store.read(lambda db: runs.list_runs(db, owner, 9, 0)))[0] or None,
            (await store.read(lambda db: checkpoints.list_checkpoints(db, owner, limit=9, offset=0)))[0] or None,
            (await store.read(lambda db: checkpoints.list_checkpoints(db, owner, model_id, limit=9, offset=0)))[0]
            or None,
            await store.read(lambda db: checkpoints.latest_checkpoints(db, owner, [model_id])) or None,
        ]

    assert None not in await everything(project)
    assert set(await everything(other_project)) == {None}
    theirs = sessions.finish_session
    assert await store.write(lambda db: theirs(db, other_project, "s", "errored", None, NOW)) is None
    session = await store.read(lambda db: sessions.get_session(db, project, "s"))
    assert session is not None
    assert session.state == "active"
