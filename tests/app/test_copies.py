"""Copies of checkpoints: made once, independent of their source, and only of what may be read."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinker.types import ParsedCheckpointTinkerPath

from schemas.errors import Unavailable
from tests.support.api import Api
from tests.support.leaving import leaves_during_its_write

SEGMENTS = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


async def project(api: Api) -> str:
    """The id of the project, as its owner sees it."""
    model = await api.model()
    return str((await api.client.get(f"training_runs/{model}")).json()["model_owner"])


async def copy(
    api: Api, source: str, *, key: str | None = None, token: str | None = None, **body: Any
) -> httpx.Response:
    headers = {"X-Idempotency-Key": key, "X-Tinker-Weights-Access-Token": token}
    given = {name: value for name, value in headers.items() if value is not None}
    return await api.client.post("copy_weights", json={"source_path": source, **body}, headers=given)


def folders(api: Api) -> list[Path]:
    return list((api.edge.settings.data_dir / "checkpoints").iterdir())


async def test_a_copy_has_kind_name_metadata_and_weights_of_its_source_and_outlives_it(api: Api) -> None:
    owner = await project(api)
    model = await api.model()
    await api.train(model)
    for segment, save in SEGMENTS.items():
        extra = {"user_metadata": {"step": "7"}} if segment != "external_weights" else {}
        source = (await api.do(save, model_id=model, path="x", ttl_seconds=3600, **extra))["path"]
        answer = await copy(api, source, destination_project_id=owner)
        assert answer.status_code == 200, answer.text
        made = answer.json()["tinker_path"]
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(made)
        assert made != source
        assert (parsed.training_run_id, parsed.checkpoint_id) == (made.split("/")[2], f"{segment}/x")
        assert re.fullmatch(rf"tinker://[0-9a-f]+:train:0/{segment}/x", made)
        run = made.removeprefix("tinker://").partition("/")[0]
        [listed] = (await api.client.get(f"training_runs/{run}/checkpoints")).json()["checkpoints"]
        assert listed["tinker_path"] == made
        assert "expires_at" not in listed
        assert listed.get("user_metadata") == extra.get("user_metadata")
        target = source.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
        assert (await api.client.delete(f"training_runs/{target}")).status_code == 204
        if segment == "external_weights":
            urls = (await api.client.get(f"training_runs/{run}/checkpoints/{segment}/x/external_weights_urls")).json()
            assert (await api.client.get(urls["urls"]["adapter_config.json"])).status_code == 200
            continue
        loaded = await api.do(
            "load_weights", session_id=await api.session(), model_seq_id=0, path=made, optimizer=segment == "weights"
        )
        assert await api.scores(loaded["model_id"]) == await api.scores(model)


async def test_the_same_key_gives_the_same_copy_even_at_once_and_leaves_no_folder_behind(api: Api) -> None:
    owner = await project(api)
    source = (await api.do("save_weights", model_id=await api.model(), path="x"))["path"]
    before = len(folders(api))
    order: dict[str, Any] = {"destination_project_id": owner, "ttl_seconds": 7200}
    answers = await asyncio.gather(*(copy(api, source, key="k", **order) for _ in range(4)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["tinker_path"] for answer in answers}) == 1
    assert len(folders(api)) == before + 1
    other = await copy(api, source, key="k", **{**order, "ttl_seconds": 3600})
    assert (other.status_code, other.json()["error"]["code"]) == (400, "seq_id_conflict")
    more = [(await copy(api, source, key=key, **order)).json()["tinker_path"] for key in ("l", None, None)]
    assert len({answers[0].json()["tinker_path"], *more}) == 4
    await api.client.delete(f"training_runs/{source.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}")
    again = await copy(api, source, key="k", **order)
    assert again.json() == answers[0].json()


async def test_a_copy_into_a_place_of_a_session_takes_that_place(api: Api) -> None:
    session = await api.session()
    model = await api.model(session, 0)
    source = (await api.do("save_weights", model_id=model, path="x"))["path"]
    place = {"session_id": session, "model_seq_id": 1}
    paths = [(await copy(api, source, **place)).json()["tinker_path"] for _ in range(2)]
    assert paths == [f"tinker://{session}:train:1/weights/x"] * 2
    clash = await copy(api, source, session_id=session, model_seq_id=0)
    assert (clash.status_code, clash.json()["error"]["code"]) == (400, "seq_id_conflict")
    trained = await api.post("zero_grad", model_id=f"{session}:train:1")
    assert (trained.status_code, trained.json()["error"]["code"]) == (410, "model_unloaded")
    await api.train(model)


async def test_whose_checkpoints_can_be_copied_and_where(api: Api) -> None:
    other = await api.other()
    mine, theirs = await project(api), await project(other)
    source = (await other.do("save_weights", model_id=await other.model(), path="x"))["path"]
    token = str(other.client.headers["X-API-Key"])
    before = len(folders(api))
    for refused in (
        await copy(api, source, destination_project_id=mine),
        await copy(api, source, destination_project_id=theirs, token=token),
        await copy(api, source, session_id=await other.session(), model_seq_id=0, token=token),
    ):
        assert refused.status_code == 404
    bad = await copy(api, source, destination_project_id=mine, token="tml-x")
    assert (bad.status_code, bad.json()["error"]["field"]) == (400, "X-Tinker-Weights-Access-Token")
    assert len(folders(api)) == before
    made = await copy(api, source, destination_project_id=mine, token=token, ttl_seconds=3600)
    assert made.status_code == 200, made.text
    [listed] = (await api.client.get("checkpoints")).json()["checkpoints"]
    assert listed["tinker_path"] == made.json()["tinker_path"]
    assert "expires_at" in listed
    assert len((await other.client.get("checkpoints")).json()["checkpoints"]) == 1
    in_body = await copy(api, source, destination_project_id=mine, weights_access_token=token)
    assert in_body.status_code == 200
    differing = await copy(api, source, destination_project_id=mine, token=token, weights_access_token="tml-y")
    assert (differing.status_code, differing.json()["error"]["field"]) == (400, "weights_access_token")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"session_id": "s"},
        {"model_seq_id": 0},
        {"destination_project_id": "p", "session_id": "s", "model_seq_id": 0},
        {"destination_project_id": "p", "model_seq_id": 0},
        {"destination_project_id": "p", "ttl_seconds": 3599},
        {"destination_project_id": "p", "ttl_seconds": 315360001},
    ],
)
async def test_a_destination_is_one_of_two_forms(edge: Any, body: dict[str, Any]) -> None:
    answer = await edge.client.post("copy_weights", json={"source_path": "tinker://r/weights/x", **body})
    assert answer.status_code == 400, answer.text


async def test_a_source_that_is_deleted_meanwhile_leaves_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = await project(api)
    source = (await api.do("save_weights", model_id=await api.model(), path="x"))["path"]
    artifacts = api.edge.app.state.services.checkpoints._artifacts
    original = artifacts.copy

    async def slow(*names: str) -> None:
        await original(*names)
        await api.client.delete(f"training_runs/{source.removeprefix('tinker://').replace('/', '/checkpoints/', 1)}")

    monkeypatch.setattr(artifacts, "copy", slow)
    assert (await copy(api, source, key="k", destination_project_id=owner)).status_code == 404
    assert folders(api) == []
    assert len((await api.client.get("sessions")).json()["sessions"]) == 2


async def test_a_copy_whose_client_leaves_while_it_is_recorded_is_there_with_its_files(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = await project(api)
    source = (await api.do("save_weights", model_id=await api.model(), path="x"))["path"]
    order: dict[str, Any] = {"key": "left", "destination_project_id": owner}
    await leaves_during_its_write(api, copy(api, source, **order), monkeypatch)
    again = await copy(api, source, **order)
    assert again.status_code == 200, again.text
    assert len(folders(api)) == 2
    place = {"session_id": await api.session(), "model_seq_id": 0}
    await api.do("load_weights", path=again.json()["tinker_path"], optimizer=True, **place)


async def test_a_copy_that_cannot_be_recorded_leaves_no_folder(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = await project(api)
    source = (await api.do("save_weights", model_id=await api.model(), path="x"))["path"]

    async def full(*_: Any, **__: Any) -> None:
        raise Unavailable("on purpose")

    monkeypatch.setattr("app.services.copies.add_event", full)
    assert (await copy(api, source, destination_project_id=owner)).status_code == 503
    assert len(folders(api)) == 1
