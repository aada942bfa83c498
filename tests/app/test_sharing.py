"""Public checkpoints and access tokens: what another project may do with a checkpoint, and what it may not."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.api import Api


async def saved(api: Api) -> tuple[str, dict[str, str]]:
    """A trained model with a checkpoint `x` of every kind: the model, and the paths by segment."""
    model = await api.model()
    await api.train(model)
    paths = {
        "weights": (await api.do("save_weights", model_id=model, path="x"))["path"],
        "sampler_weights": (await api.do("save_weights_for_sampler", model_id=model, path="x"))["path"],
        "external_weights": (await api.do("save_weights_external", model_id=model, path="x"))["path"],
    }
    return model, paths


def route(path: str, suffix: str = "") -> str:
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    return f"training_runs/{run}/checkpoints/{checkpoint}{suffix}"


async def publish(api: Api, path: str, method: str = "POST") -> int:
    """As the SDK does it: no body, with the content type of one."""
    headers = {"Content-Type": "application/json"}
    answer = await api.client.request(method, route(path, "/publish"), headers=headers)
    assert answer.status_code != 204 or answer.content == b""
    return answer.status_code


async def test_a_public_checkpoint_is_loaded_sampled_and_asked_about_by_others(api: Api) -> None:
    model, paths = await saved(api)
    other = await api.other()
    for path in paths.values():
        assert [await publish(api, path), await publish(api, path)] == [204, 204]
    session = await other.session()
    loaded = await other.do("load_weights", session_id=session, model_seq_id=0, path=paths["weights"], optimizer=True)
    assert await other.scores(loaded["model_id"]) == await api.scores(model)
    for number, segment in enumerate(("weights", "sampler_weights")):
        opened = await other.post(
            "create_sampling_session", session_id=session, sampling_session_seq_id=number, model_path=paths[segment]
        )
        drawn = await other.do(
            "asample",
            sampling_session_id=opened.json()["sampling_session_id"],
            prompt=[5],
            sampling_params={"max_tokens": 2},
        )
        assert len(drawn["sequences"]) == 1
    for path in paths.values():
        info = await other.post("weights_info", tinker_path=path)
        assert (info.status_code, info.json()["lora_rank"]) == (200, 4)


async def test_public_is_not_more_than_that(api: Api) -> None:
    model, paths = await saved(api)
    other = await api.other()
    for path in paths.values():
        await publish(api, path)
    tries: list[tuple[str, str, dict[str, Any] | None]] = [
        ("GET", f"training_runs/{model}", None),
        ("GET", f"training_runs/{model}/checkpoints", None),
        ("GET", route(paths["external_weights"], "/external_weights_urls"), None),
        ("GET", route(paths["weights"], "/archive"), None),
        ("PUT", route(paths["weights"], "/ttl"), {"ttl_seconds": 3600}),
        ("POST", route(paths["weights"], "/publish"), None),
        ("DELETE", route(paths["weights"], "/publish"), None),
        ("DELETE", route(paths["weights"]), None),
        (
            "POST",
            "copy_weights",
            {"source_path": paths["weights"], "session_id": await other.session(), "model_seq_id": 0},
        ),
    ]
    for method, target, body in tries:
        answer = await other.client.request(method, target, json=body)
        assert answer.status_code == 404, (method, target)
    assert (await other.client.get("checkpoints")).json()["checkpoints"] == []
    listed = (await api.client.get("checkpoints")).json()["checkpoints"]
    assert [(each["public"], "expires_at" in each) for each in listed] == [(True, False)] * 3


async def test_after_unpublish_every_new_use_answers_404_and_what_others_made_stays(api: Api) -> None:
    _, paths = await saved(api)
    other = await api.other()
    path = paths["weights"]
    await publish(api, path)
    session = await other.session()
    use = {"session_id": session, "path": path, "optimizer": False}
    mine = await other.do("load_weights", model_seq_id=0, **use)
    opened = await other.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=path)
    sampler = opened.json()["sampling_session_id"]
    assert [await publish(api, path, "DELETE"), await publish(api, path, "DELETE")] == [204, 204]
    answers: list[httpx.Response] = [
        await other.post("load_weights", model_seq_id=1, **use),
        await other.post("create_sampling_session", session_id=session, sampling_session_seq_id=1, model_path=path),
        await other.post("weights_info", tinker_path=path),
        await other.post("asample", sampling_session_id=sampler, prompt=[5], sampling_params={"max_tokens": 1}),
    ]
    assert [answer.status_code for answer in answers] == [404] * 4
    await other.train(mine["model_id"])
    assert (await api.post("weights_info", tinker_path=path)).status_code == 200


async def test_new_weights_under_a_public_name_are_private(api: Api) -> None:
    model, paths = await saved(api)
    await publish(api, paths["weights"])
    await api.do("save_weights", model_id=model, path="x", overwrite=True)
    assert (await (await api.other()).post("weights_info", tinker_path=paths["weights"])).status_code == 404


@pytest.mark.parametrize("target", ["weights/none", "sampler_weights/x", "nonsense/x"])
async def test_publishing_what_is_not_there(api: Api, target: str) -> None:
    model = await api.model()
    await api.do("save_weights", model_id=model, path="x")
    code = 400 if target.startswith("nonsense") else 404
    assert await publish(api, f"tinker://{model}/{target}") == code
    assert await publish(api, f"tinker://{model}/{target}", "DELETE") == code


async def test_a_checkpoint_called_publish_or_ttl_is_deleted_like_any_other(api: Api) -> None:
    model = await api.model()
    for name in ("publish", "ttl", "archive"):
        path = (await api.do("save_weights", model_id=model, path=name))["path"]
        assert await publish(api, path) == 204
        assert (await api.client.delete(route(path))).status_code == 204
        assert (await api.post("weights_info", tinker_path=path)).status_code == 404


async def test_a_token_opens_its_projects_checkpoints_and_not_those_of_a_third(api: Api) -> None:
    other = await api.other()
    third = Api(api.edge, api.groups, await api.edge.other_project("third"))
    _, paths = await saved(other)
    use = {"session_id": await api.session(), "path": paths["weights"], "optimizer": False}
    token, wrong = (str(each.client.headers["X-API-Key"]) for each in (other, third))
    assert (await api.post("load_weights", model_seq_id=0, **use)).status_code == 404
    assert (await api.post("load_weights", model_seq_id=0, weights_access_token=wrong, **use)).status_code == 404
    bad = await api.post("load_weights", model_seq_id=0, weights_access_token="tml-x", **use)
    assert (bad.status_code, bad.json()["error"]["field"]) == (400, "weights_access_token")
    assert "tml-x" not in bad.text
    await api.do("load_weights", model_seq_id=0, weights_access_token=token, **use)
