"""Base models that are added and removed while the server runs, and who may do that."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.commands.serve import with_local_ray
from app.settings import Settings
from tests.app.conftest import MODEL, Edge, IdleWorker, running
from tests.support.api import serving
from tests.support.inline_group import InlineWorkerGroup

ADDED = "acme/second"


def group(name: str, source: str | None) -> InlineWorkerGroup:
    """Loads every folder but one that has no weights."""

    def build(progress: Any) -> IdleWorker:
        if source is not None and source.endswith("broken"):
            raise ValueError(f"no weights in {source}")
        return IdleWorker()

    return InlineWorkerGroup(build)


async def names(edge: Edge) -> dict[str, bool]:
    """Served name -> whether it was added."""
    return {model["name"]: model["added"] for model in (await edge.client.get("admin/models")).json()["models"]}


async def test_what_is_added_serves_and_comes_back(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    folder = tmp_path / "second"
    folder.mkdir()
    settings = make_settings()
    async with running(settings, group) as edge:
        answer = await edge.client.post("admin/models", json={"name": ADDED, "path": str(folder)})
        assert (answer.status_code, answer.json()["state"]) == (200, "ready"), answer.text
        assert await names(edge) == {MODEL: False, ADDED: True}
        again = await edge.client.post("admin/models", json={"name": ADDED, "path": str(folder)})
        assert again.json()["error"]["code"] == "already_exists"
    async with running(settings, group) as edge:
        assert await names(edge) == {MODEL: False, ADDED: True}
        capabilities = (await edge.client.get("get_server_capabilities")).json()
        assert [model["model_name"] for model in capabilities["supported_models"]] == [MODEL, ADDED]
        assert (await edge.client.delete(f"admin/models/{ADDED}")).status_code == 204
        assert await names(edge) == {MODEL: False}
        assert (await edge.client.get("/readyz")).json()["status"] in ("ready", "not_ready")
    async with running(settings, group) as edge:
        assert await names(edge) == {MODEL: False}


async def test_what_cannot_be_served_leaves_nothing_behind(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    settings = make_settings()
    async with running(settings, group) as edge:
        for body, code, words in (
            ({"name": ADDED, "path": str(tmp_path / "broken")}, "base_model_unavailable", "cannot be served"),
            ({"name": ADDED, "path": str(tmp_path / "nowhere")}, "invalid_request", "there is no folder"),
            (
                {"name": ADDED, "path": "http://127.0.0.1/x"},
                "invalid_request",
                "neither an existing folder nor a hub id",
            ),
            ({"name": ADDED, "path": "../" * 20 + "etc"}, "invalid_request", "absolute path"),
            ({"name": ADDED, "path": "~"}, "invalid_request", "absolute path"),
            ({"name": "plain"}, "invalid_request", "neither an existing folder nor a hub id"),
            ({"name": "/etc"}, "invalid_request", "folder without a name"),
            ({"name": ADDED, "size": 3}, "invalid_request", "size"),
        ):
            answer = await edge.client.post("admin/models", json=body)
            assert answer.json()["error"]["code"] == code, answer.text
            assert words in answer.text
        assert await names(edge) == {MODEL: False}
    assert not (settings.data_dir / "base_models.json").exists()


async def test_only_the_operator_may(edge: Edge) -> None:
    other = await edge.other_project()
    for client, status, code in ((other, 403, "forbidden"), (edge.without_key(), 401, "unauthenticated")):
        for answer in (
            await client.get("admin/models"),
            await client.post("admin/models", json={"name": ADDED}),
            await client.delete(f"admin/models/{MODEL}"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_what_is_in_use_or_in_the_settings_stays(
    tiny_settings: Callable[..., Settings], tiny_folder: Path, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    shutil.copytree(tiny_folder, second)
    async with serving(tiny_settings()) as api:
        assert (await api.client.delete(f"admin/models/{MODEL}")).json()["error"]["field"] == "name"
        assert (await api.client.delete("admin/models/acme/none")).status_code == 404
        await api.client.post("admin/models", json={"name": ADDED, "path": str(second)})
        session_id = await api.session()
        created = await api.do(
            "create_model", session_id=session_id, model_seq_id=0, base_model=ADDED, lora_config={"rank": 4, "seed": 1}
        )
        refused = await api.client.delete(f"admin/models/{ADDED}")
        assert refused.json()["error"]["code"] == "base_model_in_use"
        await api.train(created["model_id"])
        assert (await api.client.delete(f"admin/models/{ADDED}?force=true")).status_code == 204
        lost = await api.post("optim_step", model_id=created["model_id"], adam_params={"learning_rate": 1e-3})
        assert lost.json()["error"]["code"] == "model_lost"
        on_first = await api.model(session_id, 1)
        await api.train(on_first)


def test_ray_may_stand_without_a_value() -> None:
    for given, read in (
        ([], []),
        (["--ray"], ["--ray", "local"]),
        (["--ray", "--port", "1"], ["--ray", "local", "--port", "1"]),
        (["--ray", "host:6379", "--port", "1"], ["--ray", "host:6379", "--port", "1"]),
        (["--ray=host:1"], ["--ray=host:1"]),
    ):
        assert with_local_ray(given) == read
