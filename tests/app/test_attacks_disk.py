"""A disk that loses, damages or refuses what was written: one request suffers, none is done twice, the rest go on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy

from app.settings import Settings
from schemas.errors import Unavailable
from tests.support.api import DATA, Api, serving

LARGE = [{"model_input": [5] * 200, "loss_fn_inputs": {"target_tokens": [6] * 200}}] * 100


def _remove(file: Path) -> None:
    file.unlink()


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[100] ^= 255
    file.write_bytes(data)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def body_file(api: Api, request_id: str, kind: str) -> Path:
    [file] = (api.edge.settings.data_dir / "bodies").glob(f"{request_id}.{kind}.*")
    return file


@pytest.mark.parametrize("damage", [_remove, _flip, _cut, _folder])
async def test_a_damaged_request_fails_alone(api: Api, damage: Callable[[Path], None]) -> None:
    model = await api.model()
    damaged = await api.submit("forward_backward", model_id=model, seq_id=2, data=LARGE, loss_fn="cross_entropy")
    damage(body_file(api, damaged, "request"))
    after = await api.submit("optim_step", model_id=model, seq_id=3)
    await api.do("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
    failure = await api.result(damaged)
    assert (failure["code"], failure["category"]) == ("damaged_body", "server")
    assert str(api.edge.settings.data_dir) not in str(failure)
    assert "error" not in await api.result(after)


@pytest.mark.parametrize("damage", [_remove, _flip, _cut, _folder])
async def test_a_damaged_result_is_gone_and_not_a_5xx_that_is_asked_for_again(
    api: Api, damage: Callable[[Path], None]
) -> None:
    model = await api.model()
    request = await api.submit("forward", model_id=model, data=LARGE, loss_fn="cross_entropy")
    await api.result(request)
    damage(body_file(api, request, "result"))
    answer = await api.post("retrieve_future", request_id=request)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "result_lost")
    assert str(api.edge.settings.data_dir) not in answer.text


async def test_a_lost_checkpoint_folder_fails_what_needs_it(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    training = (await api.do("save_weights", model_id=model, path="a"))["path"]
    sampled = (await api.do("save_weights_for_sampler", model_id=model, path="s"))["path"]
    await api.do("save_weights_external", model_id=model, path="e")
    route = f"training_runs/{model}/checkpoints/external_weights/e"
    urls = (await api.client.get(f"{route}/external_weights_urls")).json()["urls"]
    answer = await api.post(
        "create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=sampled
    )
    sampler = answer.json()["sampling_session_id"]
    for folder in (api.edge.settings.data_dir / "checkpoints").iterdir():
        shutil.rmtree(folder)
    for url in urls.values():
        assert (await api.edge.without_key().get(url)).status_code == 404
    failures = [
        await api.fails("load_weights", model_id=model, path=training, optimizer=True),
        await api.fails("load_weights", session_id=session, model_seq_id=1, path=training, optimizer=True),
        await api.fails("asample", sampling_session_id=sampler, prompt=[5], sampling_params={"max_tokens": 1}),
    ]
    assert all(str(api.edge.settings.data_dir) not in str(failure) for failure in failures)
    assert (await api.client.delete(route)).status_code == 204
    await api.train(model)


async def test_a_result_that_the_disk_refuses_is_told_later_and_the_work_is_not_done_twice(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    services = api.edge.app.state.services
    good = services.operations.settling._store

    async def full(work: object) -> None:
        raise Unavailable("the disk is full")

    await api.do("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
    step = await api.submit("optim_step", model_id=model, seq_id=3, adam_params={"learning_rate": 0.01})
    save = await api.submit("save_weights", model_id=model, seq_id=4, path="x")
    await api.submit("zero_grad", model_id=model, seq_id=2)
    with monkeypatch.context() as broken:
        broken.setattr(
            services.operations.settling, "_store", SimpleNamespace(write=full, read=good.read, look_up=good.look_up)
        )
        async with asyncio.timeout(10):
            while len(services.operations.settling._unsettled) < 3:  # noqa: ASYNC110 (written in the background)
                await asyncio.sleep(0.02)
        await services.housekeeping.sweep()
        assert len(services.operations.settling._unsettled) == 3
    assert services.operations.settling._store is good
    calls = list(api.groups.made[0].calls)
    await services.housekeeping.sweep()
    assert "error" not in await api.result(step)
    assert (await api.result(save))["path"].endswith("/weights/x")
    assert not services.operations.settling._unsettled
    assert api.groups.made[0].calls == calls
    assert (await api.client.get("checkpoints")).json()["cursor"]["total_count"] == 1


async def test_a_folder_that_cannot_be_removed_fails_nobody(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model = await api.model()
    await api.do("save_weights", model_id=model, path="a")

    async def stuck(folder: str) -> None:
        raise PermissionError(13, "Permission denied", "/secret/place")

    monkeypatch.setattr(api.edge.app.state.services.checkpoints._artifacts, "delete", stuck)
    assert (await api.client.delete(f"training_runs/{model}/checkpoints/weights/a")).status_code == 204
    worker: Any = api.groups.made[0].worker
    monkeypatch.setattr(type(worker), "save_checkpoint", _full, raising=True)
    failure = await api.fails("save_weights", model_id=model, path="b")
    assert failure["category"] == "server"
    assert "/" not in failure["error"]
    await api.train(model)


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device", "/secret/place")


async def test_an_unreadable_sample_in_the_log_does_not_keep_the_server_from_starting(
    tiny_settings: Callable[..., Settings],
) -> None:
    settings = tiny_settings()

    async def nothing(*_: object) -> None:
        return None

    async with serving(settings) as api:
        session = await api.session()
        answer = await api.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="acme/tiny"
        )
        sampler = answer.json()["sampling_session_id"]
        api.edge.app.state.services.operations.settling.settle = nothing
        ids = [
            await api.submit(
                "asample", sampling_session_id=sampler, seq_id=i, prompt=[5], sampling_params={"max_tokens": 200}
            )
            for i in range(3)
        ]
    engine = sqlalchemy.create_engine(f"sqlite:///{settings.data_dir / 'tinsmith.db'}")
    with engine.begin() as connection:
        for request_id, garbage in zip(ids[:2], (b"\xff\xfe{", b'{"kind":"optim_step"}'), strict=True):
            connection.execute(
                sqlalchemy.text("UPDATE operations SET body_inline = :body WHERE request_id = :id"),
                {"body": garbage, "id": request_id},
            )
    engine.dispose()
    async with serving(settings) as api:
        for request_id in ids[:2]:
            assert (await api.result(request_id))["code"] == "damaged_body"
        assert (await api.result(ids[2]))["sequences"]
