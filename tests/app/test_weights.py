"""Saving and loading: what a checkpoint holds, what it is called, what may be loaded where."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest

from app.settings import Settings
from tests.app.conftest import MODEL
from tests.support.api import DATA, Api, datum, serving

OTHER = [datum(30, 31, 32, 33)]


async def _load_new(api: Api, path: str, *, optimizer: bool) -> str:
    outcome = await api.do(
        "load_weights", session_id=await api.session(), model_seq_id=0, path=path, optimizer=optimizer
    )
    return str(outcome["model_id"])


async def test_resuming_with_the_optimizer_goes_on_bit_for_bit_and_without_it_differs(api: Api) -> None:
    model = await api.model()
    await api.train(model, steps=3)
    path = (await api.do("save_weights", model_id=model, path="state"))["path"]
    assert path == f"tinker://{model}/weights/state"
    resumed = await _load_new(api, path, optimizer=True)
    weights_only = await _load_new(api, path, optimizer=False)
    assert await api.scores(model) == await api.scores(resumed) == await api.scores(weights_only)
    for each in (model, resumed, weights_only):
        await api.train(each, data=OTHER)
    live, with_state, without = [await api.scores(each) for each in (model, resumed, weights_only)]
    assert live == with_state
    assert live != without


async def test_a_model_made_by_loading_has_the_geometry_of_the_checkpoint(api: Api) -> None:
    model = await api.model(rank=8, train_mlp=False)
    path = (await api.do("save_weights", model_id=model, path="x"))["path"]
    loaded = await _load_new(api, path, optimizer=False)
    info = (await api.post("get_info", model_id=loaded)).json()
    assert (info["lora_rank"], info["model_name"]) == (8, MODEL)
    again = (await api.do("save_weights", model_id=loaded, path="y"))["path"]
    told = (await api.post("weights_info", tinker_path=again)).json()
    assert told["base_model"] == MODEL
    assert (told["is_lora"], told["lora_rank"]) == (True, 8)
    assert (told["train_attn"], told["train_mlp"], told["train_unembed"]) == (True, False, True)


async def test_loading_into_a_live_model_replaces_its_weights_and_clears_its_gradient(api: Api) -> None:
    model = await api.model()
    start = await api.scores(model)
    path = (await api.do("save_weights", model_id=model, path="start"))["path"]
    await api.train(model, steps=2)
    await api.do("forward_backward", model_id=model, data=DATA, loss_fn="cross_entropy")
    outcome = await api.do("load_weights", model_id=model, path=path, optimizer=False)
    assert outcome == {"path": path, "model_id": model, "type": "load_weights"}
    assert await api.scores(model) == start
    step = await api.do("optim_step", model_id=model, adam_params={"learning_rate": 0.1})
    assert step["metrics"]["grad_norm"] == 0


async def test_weights_alone_come_with_fresh_moments_in_a_live_model_too(api: Api) -> None:
    model = await api.model()
    await api.train(model, steps=3)
    path = (await api.do("save_weights", model_id=model, path="x"))["path"]
    await api.do("load_weights", model_id=model, path=path, optimizer=False)
    fresh = await _load_new(api, path, optimizer=False)
    for each in (model, fresh):
        await api.train(each, data=OTHER)
    assert await api.scores(model) == await api.scores(fresh)


async def test_a_checkpoint_of_another_geometry_does_not_fit_and_changes_nothing(api: Api) -> None:
    small, large = await api.model(rank=4), await api.model(rank=8)
    before = await api.scores(small)
    path = (await api.do("save_weights", model_id=large, path="x"))["path"]
    failure = await api.fails("load_weights", model_id=small, path=path, optimizer=False)
    assert failure["category"] == "user"
    assert await api.scores(small) == before


async def test_names_are_used_once_unless_overwritten(api: Api) -> None:
    model = await api.model()
    first = await api.do("save_weights", model_id=model, path="x", user_metadata={"a": "1"})
    answer = await api.post("save_weights", model_id=model, path="x")
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["field"]) == ("already_exists", "path")
    await api.train(model)
    await api.do("save_weights", model_id=model, path="x", overwrite=True, user_metadata={"b": "2"})
    [listed] = (await api.client.get("checkpoints")).json()["checkpoints"]
    assert listed["user_metadata"] == {"b": "2"}
    loaded = await _load_new(api, first["path"], optimizer=False)
    assert await api.scores(loaded) == await api.scores(model)


async def test_two_saves_under_one_name_at_once_fail_the_later_one(api: Api) -> None:
    model = await api.model()
    promises = [
        await api.submit("save_weights", model_id=model, seq_id=seq_id, path="x", ttl_seconds=3600 + seq_id)
        for seq_id in (2, 1)
    ]
    # Both wait for seq_id 1 to arrive, so both pass the check at the door.
    outcomes = [await api.result(promise) for promise in promises]
    assert outcomes[1] == {"path": f"tinker://{model}/weights/x", "type": "save_weights"}
    assert (outcomes[0]["code"], outcomes[0]["category"]) == ("already_exists", "user")
    await api.folders(1)


async def test_training_and_sampler_checkpoints_have_names_of_their_own(api: Api) -> None:
    model = await api.model()
    await api.do("save_weights", model_id=model, path="same")
    await api.do("save_weights_for_sampler", model_id=model, path="same")
    listed = (await api.client.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert {(each["checkpoint_id"], each["checkpoint_type"]) for each in listed} == {
        ("weights/same", "training"),
        ("sampler_weights/same", "sampler"),
    }
    assert all(each["size_bytes"] > 0 for each in listed)


async def test_a_sampler_checkpoint_gives_weights_but_no_optimizer(api: Api) -> None:
    model = await api.model()
    await api.train(model)
    path = (await api.do("save_weights_for_sampler", model_id=model, path="s"))["path"]
    answer = await api.post("load_weights", session_id=await api.session(), model_seq_id=0, path=path, optimizer=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "optimizer"
    loaded = await _load_new(api, path, optimizer=False)
    assert await api.scores(loaded) == await api.scores(model)


async def test_checkpoints_stay_as_they_were_and_training_goes_on(api: Api) -> None:
    model = await api.model()
    await api.train(model)
    path = (await api.do("save_weights", model_id=model, path="x"))["path"]
    then = await api.scores(model)
    await api.train(model, steps=2)
    assert await api.scores(await _load_new(api, path, optimizer=False)) == then
    assert await api.scores(model) != then


async def test_a_base_model_that_is_not_the_checkpoints_is_refused(
    tiny_settings: Callable[..., Settings], tiny_folder: Any, tmp_path: Any
) -> None:
    from tests.support.tiny_model import make_tiny_model

    second = make_tiny_model(tmp_path / "second", seed=1)
    async with serving(tiny_settings(base_model=[f"{MODEL}={tiny_folder}", f"b/two={second}"])) as api:
        model = await api.model()
        path = (await api.do("save_weights", model_id=model, path="x"))["path"]
        body = {"session_id": await api.session(), "model_seq_id": 0, "path": path, "optimizer": False}
        answer = await api.post("load_weights", base_model="b/two", **body)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "base_model")
        live = await api.do("create_model", session_id=body["session_id"], model_seq_id=1, base_model="b/two")
        answer = await api.post("load_weights", model_id=live["model_id"], path=path, optimizer=False)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "path")


async def test_a_checkpoint_expires_after_its_time(api: Api) -> None:
    from datetime import UTC, datetime, timedelta

    model = await api.model()
    path = (await api.do("save_weights", model_id=model, path="x", ttl_seconds=3600))["path"]
    [listed] = (await api.client.get("checkpoints")).json()["checkpoints"]
    left = datetime.fromisoformat(listed["expires_at"]) - datetime.now(UTC)
    assert timedelta(minutes=58) < left <= timedelta(hours=1)
    services = api.edge.app.state.services
    services.checkpoints._clock = lambda: datetime.now(UTC) + timedelta(hours=2)
    assert (await api.post("weights_info", tinker_path=path)).status_code == 404
    await services.checkpoints.sweep_expired()
    assert (await api.client.get("checkpoints")).json()["checkpoints"] == []
    assert list((api.edge.settings.data_dir / "checkpoints").iterdir()) == []
    await api.do("save_weights", model_id=model, path="x")


async def test_a_load_that_waits_keeps_its_checkpoint_though_that_expires_or_is_deleted(api: Api) -> None:
    from datetime import UTC, datetime, timedelta

    model = await api.model()
    path = (await api.do("save_weights", model_id=model, path="x", ttl_seconds=3600))["path"]
    gap = await api.model()  # what has number 2 waits here for number 1
    load = {"model_id": gap, "path": path, "optimizer": False}
    kept = await api.submit("load_weights", seq_id=2, **load)
    services = api.edge.app.state.services
    services.checkpoints._clock = lambda: datetime.now(UTC) + timedelta(hours=2)
    await services.checkpoints.sweep_expired()
    await api.do("zero_grad", model_id=gap, seq_id=1)
    assert "error" not in await api.result(kept)
    services.checkpoints._clock = lambda: datetime.now(UTC)
    late = await api.submit("load_weights", seq_id=4, **load)
    deleted = await api.client.delete(f"training_runs/{model}/checkpoints/weights/x")
    assert deleted.status_code == 204
    await api.folders(1)
    await api.do("zero_grad", model_id=gap, seq_id=3)
    assert "error" not in await api.result(late)
    await api.folders(0)
    assert (await api.post("load_weights", seq_id=5, **load)).json()["error"]["code"] == "not_found"


async def test_a_load_whose_folder_went_away_otherwise_says_so(api: Api) -> None:
    model = await api.model()
    path = (await api.do("save_weights", model_id=model, path="x"))["path"]
    late = await api.submit("load_weights", model_id=model, path=path, optimizer=False, seq_id=3)
    [folder] = await api.folders(1)
    shutil.rmtree(folder)  # as another server does that shares the folder
    await api.do("zero_grad", model_id=model, seq_id=2)
    assert (await api.result(late))["code"] == "weights_deleted"


BAD_NAMES = [
    "..",
    "../x",
    "/etc/x",
    "a/b",
    "C:\\x",
    "%2e%2e%2f",
    "a\x00b",
    "a\nb",
    "",
    " x",
    "x ",
    "é",
    "-x",
    "x" * 129,
]


@pytest.mark.parametrize("route", ["save_weights", "save_weights_for_sampler"])
async def test_names_cannot_leave_their_place(edge: Any, route: str) -> None:
    for name in BAD_NAMES:
        answer = await edge.client.post(route, json={"model_id": "s:train:0", "path": name})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "path"), name


async def test_a_key_of_the_owning_project_opens_its_checkpoint(api: Api) -> None:
    model = await api.model()
    path = (await api.do("save_weights", model_id=model, path="x"))["path"]
    other = await api.other()
    body = {"session_id": await other.session(), "model_seq_id": 0, "path": path, "optimizer": False}
    assert (await other.post("load_weights", **body)).status_code == 404
    wrong = await other.post("load_weights", **body, weights_access_token="tml-wrong")
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "weights_access_token")
    outcome = await other.do("load_weights", **body, weights_access_token=api.client.headers["X-API-Key"])
    assert await other.scores(outcome["model_id"]) == await api.scores(model)


@pytest.mark.parametrize("written", [False, True])
async def test_a_save_that_is_executed_again_keeps_what_it_has_written(api: Api, written: bool) -> None:
    model = await api.model()
    [group], loop = api.groups.made, asyncio.get_running_loop()
    engine: Any = group.worker.actor.engine

    def dying(*arguments: Any, **named: Any) -> None:
        if written:
            type(engine).save_adapter(engine, *arguments, **named)
        loop.call_soon_threadsafe(group.die)
        time.sleep(0.2)  # its call fails by the death, not by this
        raise RuntimeError("the worker is dead")

    engine.save_adapter = dying  # the engine of the next worker is another one
    path = (await api.do("save_weights", model_id=model, path="x"))["path"]
    await api.folders(1)
    await api.do("load_weights", model_id=model, path=path, optimizer=False)
    await api.folders(1)
