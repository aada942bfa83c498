"""Another project's object is as good as none: the same 404 for every route, and nothing happens to it."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.app.conftest import MODEL
from tests.support.api import DATA, Api


async def _everything(api: Api) -> dict[str, str]:
    session = await api.session()
    model = await api.model(session)
    path = (await api.do("save_weights", model_id=model, path="x"))["path"]
    sampler = (await api.do("save_weights_for_sampler", model_id=model, sampling_session_seq_id=0))[
        "sampling_session_id"
    ]
    future = await api.submit("optim_step", model_id=model, seq_id=10, adam_params={})
    return {"session": session, "model": model, "path": path, "sampler": sampler, "future": future}


def _tries(mine: dict[str, str], their: dict[str, str]) -> list[tuple[str, str, dict[str, Any] | None]]:
    model, run = their["model"], f"training_runs/{their['model']}"
    load = {"path": their["path"], "optimizer": False}
    open_base = {"sampling_session_seq_id": 0, "base_model": MODEL}
    open_path = {"sampling_session_seq_id": 1, "model_path": their["path"]}
    return [
        ("POST", "create_model", {"session_id": their["session"], "model_seq_id": 0, "base_model": MODEL}),
        ("POST", "create_model", {"session_id": their["session"], "model_seq_id": 5, "base_model": MODEL}),
        ("POST", "get_info", {"model_id": model}),
        ("POST", "forward_backward", {"model_id": model, "data": DATA, "loss_fn": "cross_entropy"}),
        ("POST", "forward", {"model_id": model, "data": DATA, "loss_fn": "cross_entropy"}),
        ("POST", "optim_step", {"model_id": model, "seq_id": 10, "adam_params": {}}),
        ("POST", "optim_step", {"model_id": model, "seq_id": 11, "adam_params": {}}),
        ("POST", "zero_grad", {"model_id": model}),
        ("POST", "save_weights", {"model_id": model, "path": "y"}),
        ("POST", "save_weights_for_sampler", {"model_id": model, "path": "y"}),
        ("POST", "load_weights", {"model_id": model, **load}),
        ("POST", "load_weights", {"model_id": mine["model"], **load}),
        ("POST", "load_weights", {"session_id": their["session"], "model_seq_id": 1, **load}),
        ("POST", "load_weights", {"session_id": mine["session"], "model_seq_id": 1, **load}),
        ("POST", "create_sampling_session", {"session_id": their["session"], **open_base}),
        ("POST", "create_sampling_session", {"session_id": mine["session"], **open_path}),
        ("POST", "asample", {"sampling_session_id": their["sampler"], "prompt": [5]}),
        ("GET", f"samplers/{their['sampler']}", None),
        ("POST", "retrieve_future", {"request_id": their["future"]}),
        ("POST", "cancel_future", {"request_id": their["future"]}),
        ("POST", "weights_info", {"tinker_path": their["path"]}),
        ("GET", run, None),
        ("GET", f"{run}/checkpoints", None),
        ("DELETE", f"{run}/checkpoints/weights/x", None),
        ("PUT", f"{run}/checkpoints/weights/x/ttl", {"ttl_seconds": 3600}),
        ("POST", f"{run}/checkpoints/weights/x/publish", None),
        ("DELETE", f"{run}/checkpoints/weights/x/publish", None),
        ("GET", f"{run}/checkpoints/weights/x/archive", None),
        ("POST", "unload_model", {"model_id": model}),
        ("POST", "copy_weights", {"source_path": their["path"], "session_id": mine["session"], "model_seq_id": 7}),
        ("POST", "copy_weights", {"source_path": mine["path"], "session_id": their["session"], "model_seq_id": 7}),
    ]  # fmt: skip


async def test_another_projects_objects_look_like_none(api: Api) -> None:
    other = await api.other()
    their, mine = await _everything(api), await _everything(other)
    absent = {key: value.replace(their["session"], "f" * 32) for key, value in their.items()}
    absent["future"] = "e" * 32
    for real, none in zip(_tries(mine, their), _tries(mine, absent), strict=True):
        answers = [await other.client.request(method, path, json=body) for method, path, body in (real, none)]
        assert [answer.status_code for answer in answers] == [404, 404], real
        details = [answers[0].json()["detail"], answers[1].json()["detail"]]
        for key in their:
            details = [detail.replace(their[key], key).replace(absent[key], key) for detail in details]
        assert details[0] == details[1], real
    listed = (await other.client.get("training_runs")).json()["training_runs"]
    assert [run["training_run_id"] for run in listed] == [mine["model"]]
    checkpoints = (await other.client.get("checkpoints")).json()["checkpoints"]
    assert [each["tinker_path"] for each in checkpoints] == [mine["path"]]


async def test_nothing_that_another_project_tries_changes_anything(api: Api) -> None:
    other = await api.other()
    their, mine = await _everything(api), await _everything(other)
    for method, path, body in _tries(mine, their):
        await other.client.request(method, path, json=body)
    # Refused requests of another project did not use up numbers either: 3 to 9 are still waited for.
    bad = {"model_id": their["model"], "seq_id": 3, "data": DATA, "loss_fn": "no_such_loss"}
    assert (await other.post("forward_backward", **bad)).status_code == 400
    await asyncio.sleep(0.1)
    assert "optimizer_step" not in api.groups.made[0].calls
    for seq_id in range(3, 10):
        await api.submit("zero_grad", model_id=their["model"], seq_id=seq_id)
    assert "error" not in await api.result(their["future"])
    info = (await api.post("weights_info", tinker_path=their["path"])).json()
    assert info["lora_rank"] == 4


async def test_a_denied_poll_of_a_pending_future_has_no_side_effect(api: Api) -> None:
    other = await api.other()
    model = await api.model()
    step = await api.submit("optim_step", model_id=model, seq_id=2, adam_params={})
    polls = [asyncio.create_task(api.post("retrieve_future", request_id=step))]
    await asyncio.sleep(0.1)
    assert (await other.post("retrieve_future", request_id=step)).status_code == 404
    await api.submit("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
    answer = await polls[0]
    assert answer.status_code == 200
    assert answer.json()["metrics"]["grad_norm"] > 0


async def test_noisy_neighbours_change_no_bit(api: Api) -> None:
    async def run(model: str) -> list[list[float]]:
        await api.train(model, steps=3)
        return await api.scores(model)

    alone = await run(await api.model(seed=1))
    models = [await api.model(seed=seed) for seed in (1, 2, 3, 4)]
    together = await asyncio.gather(*(run(model) for model in models))
    assert together[0] == alone
    assert together[1] != alone
