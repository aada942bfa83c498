"""What cannot be read for a moment (no descriptor left, the database away, a base model that a start forgot) is neither
lost nor failed: it goes on when that has passed."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from app.services.futures import Pending
from app.settings import Settings
from schemas.errors import Unavailable
from store.tables import Operation, Snapshot
from tests.app.conftest import MODEL
from tests.support.api import DATA, Api, serving

MakeSettings = Callable[..., Settings]
LARGE = [{"model_input": [5] * 200, "loss_fn_inputs": {"target_tokens": [6] * 200}}] * 100


@pytest.fixture
def elsewhere(tiny_settings: MakeSettings, tiny_folder: Path, tmp_path: Path) -> Settings:
    """Of a start on the same data folder that serves another base model only."""
    second = tmp_path / "second"
    shutil.copytree(tiny_folder, second)
    return tiny_settings(base_model=[f"acme/other={second}"])


class Descriptors:
    """None is left, as often as `missing` says, for files whose path holds `of`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: str) -> None:
        self.missing = 0
        self._of = of
        self._open = os.open
        monkeypatch.setattr(os, "open", self._maybe)

    def _maybe(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if self.missing and self._of in str(path):
            self.missing -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._open(path, flags, *args, **options)


async def _loss(api: Api, model: str) -> dict[str, float]:
    """What a pass says of the weights as they are."""
    return (await api.do("forward", model_id=model, data=DATA, loss_fn="cross_entropy"))["metrics"]


async def test_a_request_that_cannot_be_read_now_runs_later_in_its_place(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.tickets._FIRST_PAUSE", 0.05)
    model = await api.model()
    descriptors = Descriptors(monkeypatch, ".request.")
    late = await api.submit("forward_backward", model_id=model, seq_id=2, data=LARGE, loss_fn="cross_entropy")
    step = await api.submit("optim_step", model_id=model, seq_id=3)
    descriptors.missing = 3
    await api.do("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
    assert (await api.result(late))["metrics"]["loss:sum"] > 0
    assert (await api.result(step))["metrics"]["grad_norm"] > 0
    assert descriptors.missing == 0


async def test_a_result_that_cannot_be_read_now_is_asked_for_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model = await api.model()
    request = await api.submit("forward", model_id=model, data=LARGE, loss_fn="cross_entropy")
    whole = await api.result(request)
    descriptors = Descriptors(monkeypatch, ".result.")
    descriptors.missing = 10**6
    monkeypatch.setattr("app.services.futures._UNREAD_PAUSE", 0.05)
    again = await api.post("retrieve_future", request_id=request)
    assert again.status_code == 408
    assert "cannot be read now" in again.json()["queue_state_reason"]
    assert str(api.edge.settings.data_dir) not in again.text
    descriptors.missing = 2
    assert (await api.post("retrieve_future", request_id=request)).json() == whole


async def test_nobody_reads_on_for_a_client_that_has_left(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model = await api.model()
    request = await api.submit("forward", model_id=model, data=LARGE, loss_fn="cross_entropy")
    await api.result(request)
    descriptors = Descriptors(monkeypatch, ".result.")
    descriptors.missing = 10**6
    project_id = (await api.client.get("auth/apikey/me")).json()["project_id"]

    async def gone() -> None:
        """The client has left."""

    began = time.monotonic()
    outcome = await api.edge.app.state.services.futures.retrieve(project_id, request, 5.0, gone)
    assert isinstance(outcome, Pending)
    assert (time.monotonic() - began < 2, descriptors.missing) == (True, 10**6 - 1)


async def test_samples_wait_for_a_database_that_is_away(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.tickets._FIRST_PAUSE", 0.05)
    made = await api.post(
        "create_sampling_session", session_id=await api.session(), sampling_session_seq_id=0, base_model=MODEL
    )
    store, away = api.edge.app.state.services.operations._store, [3]
    look_up = store.look_up

    async def maybe(work: Any) -> Any:
        if away[0] and "_read_back" in getattr(work, "__qualname__", ""):
            away[0] -= 1
            raise Unavailable("the server's database cannot be read right now", code="database_unavailable")
        return await look_up(work)

    monkeypatch.setattr(store, "look_up", maybe)
    params = {"max_tokens": 4, "stop": ["x" * 900, "y" * 900]}  # more than what is kept in memory while it waits
    about = {"sampling_session_id": made.json()["sampling_session_id"], "prompt": [5] * 20, "sampling_params": params}
    assert (await api.do("asample", seq_id=0, **about))["sequences"]
    assert away == [0]


async def _snapshots(api: Api) -> int:
    async def rows(db: Any) -> int:
        return len((await db.scalars(select(Snapshot.file))).all())

    return int(await api.edge.app.state.store.read(rows))


async def _until_snapshot(api: Api) -> None:
    deadline = time.monotonic() + 30
    while not await _snapshots(api):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_a_start_without_a_base_model_costs_its_runs_nothing(
    tiny_settings: MakeSettings, elsewhere: Settings, tiny_folder: Path
) -> None:
    settings = tiny_settings(snapshot_operations=1, snapshot_share=1.0)
    async with serving(settings) as api:
        model = await api.model()
        await api.train(model, steps=2)
        await _until_snapshot(api)
        before = await _loss(api, model)
        pending = await api.submit("forward", model_id=model, data=DATA, loss_fn="cross_entropy")
        await api.result(pending)
        await _unfinish(api, pending)
    async with serving(elsewhere) as api:
        await api.edge.app.state.services.housekeeping.sweep()
        refused = await api.post("optim_step", model_id=model, adam_params={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "base_model_unavailable")
        waits = await api.post("retrieve_future", request_id=pending)
        assert waits.status_code == 408
        assert MODEL in waits.json()["queue_state_reason"]
        assert await _snapshots(api) > 0
    async with serving(elsewhere) as api:
        added = await api.client.post("admin/models", json={"name": MODEL, "path": str(tiny_folder)})
        assert (added.status_code, added.json()["live_runs"]) == (200, 1), added.text
        assert await _loss(api, model) == before
        assert "error" not in await api.result(pending)
        await api.train(model)


async def test_what_comes_while_a_base_model_comes_back_waits_or_is_told_to(
    tiny_settings: MakeSettings, elsewhere: Settings, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a database that does not answer in the middle of it ends nothing."""
    monkeypatch.setattr("app.services.recovery._FIRST_PAUSE", 0.05)
    async with serving(tiny_settings()) as api:
        model = await api.model()
        await api.train(model)
        before = await _loss(api, model)
        pending = [await api.submit("forward", model_id=model, data=DATA, loss_fn="cross_entropy") for _ in range(2)]
        for request_id in pending:
            await api.result(request_id)
            await _unfinish(api, request_id)
    async with serving(elsewhere) as api:
        recovery, away, answers = api.edge.app.state.services.recovery, [2], []
        prepared = recovery._prepared

        async def slow(record: Any) -> Any:
            answers.append((await api.post("forward", model_id=model, data=DATA, loss_fn="cross_entropy")).status_code)
            if away[0]:
                away[0] -= 1
                raise Unavailable("the server's database cannot be read right now")
            return await prepared(record)

        monkeypatch.setattr(recovery, "_prepared", slow)
        added = await api.client.post("admin/models", json={"name": MODEL, "path": str(tiny_folder)})
        assert added.status_code == 200, added.text
        for request_id in pending:
            assert "error" not in await api.result(request_id)
        assert set(answers) == {503}
        assert (len(answers), away) == (4, [0])
        assert await _loss(api, model) == before


async def test_what_waits_for_a_base_model_ends_with_its_session(
    tiny_settings: MakeSettings, elsewhere: Settings
) -> None:
    async with serving(tiny_settings()) as api:
        model = await api.model()
        session = model.split(":")[0]
        made = await api.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL
        )
        about = {"sampling_session_id": made.json()["sampling_session_id"], "prompt": [5] * 9}
        samples = [await api.submit("asample", seq_id=number, **about) for number in range(2)]
        run = await api.submit("forward", model_id=model, data=DATA, loss_fn="cross_entropy")
        for request_id in (*samples, run):
            await api.result(request_id)
            await _unfinish(api, request_id)
    async with serving(elsewhere) as api:
        for request_id in (*samples, run):
            assert (await api.post("retrieve_future", request_id=request_id)).status_code == 408
        await api.post("cancel_future", request_id=samples[0])
        assert (await api.result(samples[0]))["code"] == "cancelled"
        await api.post(f"sessions/{session}/finish", reason={"type": "errored"})
        for request_id in (samples[1], run):
            assert (await api.result(request_id))["code"] == "gone"
        assert len(api.edge.app.state.services.operations.left) == 0


async def test_a_refused_request_uses_up_its_number_while_its_base_model_is_not_served(
    tiny_settings: MakeSettings, elsewhere: Settings
) -> None:
    async with serving(tiny_settings()) as api:
        model = await api.model()
        await api.do("forward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
    async with serving(elsewhere) as api:
        refused = await api.post("forward", model_id=model, seq_id=2, data=DATA, loss_fn="nonsense")
        assert refused.status_code == 400
    async with serving(tiny_settings()) as api:
        assert "error" not in await api.do("forward", model_id=model, seq_id=3, data=DATA, loss_fn="cross_entropy")


async def test_a_sample_that_a_start_cannot_read_runs_later(
    tiny_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.services.recovery._FIRST_PAUSE", 0.05)
    monkeypatch.setattr("store.bodies.INLINE_LIMIT", 64)  # as if it were a request of more than 64 KiB
    settings = tiny_settings()
    async with serving(settings) as api:
        made = await api.post(
            "create_sampling_session", session_id=await api.session(), sampling_session_seq_id=0, base_model=MODEL
        )
        about = {"sampling_session_id": made.json()["sampling_session_id"], "prompt": [5] * 20}
        params = {"max_tokens": 4, "seed": 7}
        request_id = await api.submit("asample", seq_id=0, sampling_params=params, **about)
        before = await api.result(request_id)
        await _unfinish(api, request_id)
        unwanted = await api.submit("asample", seq_id=1, sampling_params=params, **about)
        await api.result(unwanted)
        await _unfinish(api, unwanted)
    descriptors = Descriptors(monkeypatch, ".request.")
    descriptors.missing = 10**6
    async with serving(settings) as api:
        waits = await api.post("retrieve_future", request_id=request_id)
        assert waits.status_code == 408
        assert "Too many open files" in waits.json()["queue_state_reason"]
        await api.post("cancel_future", request_id=unwanted)
        assert (await api.result(unwanted))["code"] == "cancelled"
        descriptors.missing = 2
        assert (await api.result(request_id))["sequences"] == before["sequences"]
        assert descriptors.missing == 0


async def _unfinish(api: Api, request_id: str) -> None:
    """As if the process had died before it was executed."""

    async def rows(db: Any) -> None:
        record = await db.get(Operation, request_id)
        record.state = "pending"
        record.result_inline = record.result_ref = record.settled_seq = record.finished_at = None

    await api.edge.app.state.store.write(rows)


async def test_a_damaged_list_of_added_base_models_keeps_the_server_from_starting(tiny_settings: MakeSettings) -> None:
    settings = tiny_settings()
    settings.data_dir.mkdir(exist_ok=True)
    file = settings.data_dir / "base_models.json"
    file.write_text('[{"name": "acme/added", "sour')
    with pytest.raises(Unavailable, match=r"base_models\.json") as refused:
        async with serving(settings):
            pass
    assert refused.value.code == "damaged_data_folder"
    assert file.read_text() == '[{"name": "acme/added", "sour'
