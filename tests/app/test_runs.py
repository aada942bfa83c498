"""Training runs and checkpoints as lists."""

from __future__ import annotations

from datetime import datetime

from tests.app.conftest import MODEL
from tests.support.api import Api


async def test_runs_are_listed_newest_first_in_pages(api: Api) -> None:
    session = await api.session()
    models = [await api.model(session, number) for number in range(3)]
    page = (await api.client.get("training_runs", params={"limit": 2})).json()
    assert [run["training_run_id"] for run in page["training_runs"]] == [models[2], models[1]]
    assert page["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
    rest = (await api.client.get("training_runs", params={"limit": 2, "offset": 2})).json()
    assert [run["training_run_id"] for run in rest["training_runs"]] == [models[0]]


async def test_a_run_tells_its_newest_checkpoints_and_metadata(api: Api) -> None:
    session = await api.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    model = (await api.do("create_model", **body, user_metadata={"renderer_name": "chatml"}))["model_id"]
    run = (await api.client.get(f"training_runs/{model}", params={"access_scope": "owned"})).json()
    assert "last_checkpoint" not in run
    for name in ("a", "b"):
        await api.do("save_weights", model_id=model, path=name)
    await api.do("save_weights_for_sampler", model_id=model, path="s")
    run = (await api.client.get(f"training_runs/{model}")).json()
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/b"
    assert run["last_sampler_checkpoint"]["tinker_path"] == f"tinker://{model}/sampler_weights/s"
    assert (run["base_model"], run["lora_rank"], run["is_lora"], run["corrupted"]) == (MODEL, 4, True, False)
    assert run["user_metadata"] == {"renderer_name": "chatml"}
    assert datetime.fromisoformat(run["last_request_time"]).tzinfo is not None


async def test_checkpoints_are_listed_deleted_and_kept_for_a_time(api: Api) -> None:
    model = await api.model()
    for name in ("a", "b", "c"):
        await api.do("save_weights", model_id=model, path=name)
    page = (await api.client.get("checkpoints", params={"limit": 2})).json()
    assert [each["checkpoint_id"] for each in page["checkpoints"]] == ["weights/c", "weights/b"]
    assert page["cursor"]["total_count"] == 3
    at = f"training_runs/{model}/checkpoints/weights/b"
    assert (await api.client.put(f"{at}/ttl", json={"ttl_seconds": 7200})).status_code == 204
    listed = (await api.client.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [("expires_at" in each) for each in listed] == [False, True, False]
    assert (await api.client.put(f"{at}/ttl", json={"ttl_seconds": None})).status_code == 204
    listed = (await api.client.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert not any("expires_at" in each for each in listed)
    # The SDK sends a JSON content type with an empty body.
    deleted = await api.client.delete(at, headers={"Content-Type": "application/json"})
    assert deleted.status_code == 204
    assert (await api.client.delete(at)).status_code == 404
    listed = (await api.client.get(f"training_runs/{model}/checkpoints")).json()["checkpoints"]
    assert [each["checkpoint_id"] for each in listed] == ["weights/c", "weights/a"]
    assert len(list((api.edge.settings.data_dir / "checkpoints").iterdir())) == 2


async def test_ids_that_are_none_are_refused_by_name(api: Api) -> None:
    model = await api.model()
    at = f"training_runs/{model}/checkpoints"
    for wrong in ("weights", "weights/..%2Fx", "elsewhere/x", "weights/a/b"):
        answer = await api.client.delete(f"{at}/{wrong}")
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "checkpoint_id"), wrong
    for query in ({"limit": 0}, {"limit": "many"}, {"offset": -1}, {"access_scope": "all"}):
        answer = await api.client.get("training_runs", params=query)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, *query)
    assert (await api.client.get("training_runs", params={"project_id": "elsewhere"})).status_code == 404
