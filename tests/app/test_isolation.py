"""Another project's object is as good as none: the same answer for every route, and nothing happens to it.

Which routes take an id is read from the routes and the bodies themselves: a new one without a case here fails.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

from fastapi.routing import APIRoute, iter_route_contexts
from starlette.routing import compile_path

from app.openapi import RAW_BODIES
from app.permissions import PUBLIC, ROUTES
from app.settings import Settings
from tests.app.conftest import MODEL
from tests.app.test_custom_losses import loss
from tests.support.api import DATA, Api, serving

Case = tuple[str, str, dict[str, Any] | None]
OAI, ANTHROPIC = "http://localhost/oai/api/v1", "http://localhost/anthropic/api/v1"
NO_OBJECT = re.compile(r"(^|_)seq_id$|^(tokenizer_id|cloned_sampler_id|process_uuid)$")
"""Fields that look like ids, and count or name something that belongs to nobody."""
OBJECT = re.compile(r"(^|_)(id|ids|path|urns)$")
OWNERLESS = {"telemetry"}
"""Looks nothing up and keeps nothing."""
EMPTY_PATHS = {"sessions/search", "retrieve_futures"}
"""To find nothing is no error there."""


async def _everything(api: Api) -> dict[str, str]:
    session = await api.session()
    model = await api.model(session)
    path = (await api.do("save_weights", model_id=model, path="x"))["path"]
    sampler = (await api.do("save_weights_for_sampler", model_id=model, sampling_session_seq_id=0))[
        "sampling_session_id"
    ]
    future = await api.submit("optim_step", model_id=model, seq_id=10, adam_params={})
    key = (await api.client.get("keys")).json()["keys"][0]
    return {
        "session": session,
        "model": model,
        "path": path,
        "sampler": sampler,
        "future": future,
        "key": key["key_id"],
        "project": key["project_id"],
        "user": await _member(api, key["project_id"]),
    }


async def _member(api: Api, project_id: str) -> str:
    """A user of this project."""
    operator = api.edge.client
    user = (await operator.post("admin/users", json={"name": f"of {project_id}"})).json()["user_id"]
    answer = await operator.put(f"admin/projects/{project_id}/members/{user}", json={"role": "member"})
    assert answer.status_code == 200
    return str(user)


def _tries(mine: dict[str, str], their: dict[str, str]) -> list[Case]:
    model, run = their["model"], f"training_runs/{their['model']}"
    load = {"path": their["path"], "optimizer": False}
    open_base = {"sampling_session_seq_id": 0, "base_model": MODEL}
    open_path = {"sampling_session_seq_id": 1, "model_path": their["path"]}
    of_sampler = {"type": "sampling_session", "sampling_session_id": their["sampler"]}
    of_mine = {"type": "sampling_session", "sampling_session_id": mine["sampler"]}
    session, say = f"sessions/{their['session']}", [{"role": "user", "content": "x"}]
    return [
        ("POST", "create_model", {"session_id": their["session"], "model_seq_id": 0, "base_model": MODEL}),
        ("POST", "create_model", {"session_id": their["session"], "model_seq_id": 5, "base_model": MODEL}),
        ("POST", "get_info", {"model_id": model}),
        ("POST", "forward_backward", {"model_id": model, "data": DATA, "loss_fn": "cross_entropy"}),
        ("POST", "forward", {"model_id": model, "data": DATA, "loss_fn": "cross_entropy"}),
        ("POST", "optim_step", {"model_id": model, "seq_id": 10, "adam_params": {}}),
        ("POST", "optim_step", {"model_id": model, "seq_id": 11, "adam_params": {}}),
        ("POST", "zero_grad", {"model_id": model}),
        ("POST", "create_custom_loss", loss(their["session"])),
        ("POST", "save_weights", {"model_id": model, "path": "y"}),
        ("POST", "save_weights_for_sampler", {"model_id": model, "path": "y"}),
        ("POST", "save_weights_external", {"model_id": model, "path": "y"}),
        ("POST", "load_weights", {"model_id": model, **load}),
        ("POST", "load_weights", {"model_id": mine["model"], **load}),
        ("POST", "load_weights", {"session_id": their["session"], "model_seq_id": 1, **load}),
        ("POST", "load_weights", {"session_id": mine["session"], "model_seq_id": 1, **load}),
        ("POST", "create_sampling_session", {"session_id": their["session"], **open_base}),
        ("POST", "create_sampling_session", {"session_id": mine["session"], **open_path}),
        ("POST", "join_sampling_session", {"sampling_session_id": their["sampler"]}),
        ("POST", "asample", {"sampling_session_id": their["sampler"], "prompt": [5]}),
        ("GET", f"samplers/{their['sampler']}", None),
        ("POST", "retrieve_future", {"request_id": their["future"]}),
        ("POST", "retrieve_futures", {"target": of_sampler, "timeout": 0.0}),
        ("POST", "retrieve_futures", {"target": of_mine, "timeout": 0.0, "retrieved_request_ids": [their["future"]]}),
        ("POST", "cancel_future", {"request_id": their["future"]}),
        ("POST", "weights_info", {"tinker_path": their["path"]}),
        ("GET", run, None),
        ("GET", f"{run}/checkpoints", None),
        ("GET", f"{run}/metrics", None),
        ("GET", f"{run}/events", None),
        ("GET", f"{run}/checkpoints/weights/x/files", None),
        ("DELETE", f"{run}/checkpoints/weights/x", None),
        ("PUT", f"{run}/checkpoints/weights/x/ttl", {"ttl_seconds": 3600}),
        ("POST", f"{run}/checkpoints/weights/x/publish", None),
        ("DELETE", f"{run}/checkpoints/weights/x/publish", None),
        ("GET", f"{run}/checkpoints/weights/x/archive", None),
        ("GET", f"{run}/checkpoints/external_weights/x/external_weights_urls", None),
        ("POST", "unload_model", {"model_id": model}),
        ("POST", "copy_weights", {"source_path": their["path"], "session_id": mine["session"], "model_seq_id": 7}),
        ("POST", "copy_weights", {"source_path": mine["path"], "session_id": their["session"], "model_seq_id": 7}),
        ("POST", "copy_weights", {"source_path": mine["path"], "destination_project_id": their["project"]}),
        ("POST", "create_session", {"project_id": their["project"]}),
        ("POST", "session_heartbeat", {"session_id": their["session"]}),
        ("GET", session, None),
        ("GET", f"{session}/trace_export", None),
        ("PUT", f"{session}/project", {"project_id": mine["project"]}),
        ("PUT", f"sessions/{mine['session']}/project", {"project_id": their["project"]}),
        ("POST", f"{session}/finish", {"reason": {"type": "success"}}),
        ("POST", "sessions/search", {"session_id": their["session"]}),
        ("POST", "sessions/search", {"project_ids": [their["project"]]}),
        ("POST", "sessions/search", {"owner": {"type": "user", "owner_urns": [f"tml:user:{their['project']}"]}}),
        ("GET", f"{OAI}/models/{their['path']}", None),
        ("POST", f"{OAI}/completions", {"model": their["path"], "prompt": [5]}),
        ("POST", f"{OAI}/chat/completions", {"model": their["path"], "messages": say}),
        ("POST", f"{ANTHROPIC}/messages", {"model": their["path"], "messages": say, "max_tokens": 1}),
        ("POST", f"{ANTHROPIC}/messages/count_tokens", {"model": their["path"], "messages": say}),
        ("DELETE", f"keys/{their['key']}", None),
        ("POST", f"keys/{their['key']}/rotate", {"overlap": 0}),
        ("POST", "keys", {"name": "k", "user_id": their["user"]}),
    ]  # fmt: skip


def _fields(schema: Any) -> Iterator[str]:
    """Names of all fields of a body, those of parts of it included."""
    if isinstance(schema, dict):
        for name, value in schema.items():
            if name == "properties":
                yield from value
            yield from _fields(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _fields(value)


def _takes_an_id(route: APIRoute) -> bool:
    body = RAW_BODIES.get(route.operation_id or "")
    names = [] if body is None else list(_fields(body.model_json_schema()))
    if route.operation_id is not None and route.operation_id.startswith(("openai_", "anthropic_")):
        names = [name.replace("model", "model_id") for name in names]  # a path of a checkpoint, for example
    return "{" in route.path or any(OBJECT.search(name) and not NO_OBJECT.search(name) for name in names)


async def test_every_route_with_an_id_has_a_case(api: Api) -> None:
    routes: dict[str, APIRoute] = {}
    patterns = []
    for context in iter_route_contexts(api.edge.app.routes):
        route = context.original_route
        if isinstance(route, APIRoute):
            routes[route.operation_id or ""] = route
            form, _, _ = compile_path(str(context.path))
            patterns.append((route.operation_id or "", route.methods, form))
    names = ("session", "model", "path", "sampler", "future", "key", "project", "user")
    ids = {name: name for name in names}
    covered = set()
    for method, path, _ in _tries(ids, ids):
        whole = path.removeprefix("http://localhost") if path.startswith("http") else f"/api/v1/{path}"
        matching = [name for name, methods, form in patterns if method in methods and form.match(whole)]
        assert matching, whole
        covered.add(matching[0])
    # Those for operators are told apart by role, before anything is looked up (test_permissions.py).
    exempt = {*PUBLIC, *OWNERLESS, *(name for name, needed in ROUTES.items() if needed == ("admin",))}
    with_ids = {name for name, route in routes.items() if _takes_an_id(route)}
    assert len(with_ids) > 40
    assert with_ids - exempt - covered == set(), "routes that take an id and have no case"
    assert covered <= with_ids


async def test_another_projects_objects_look_like_none(api: Api) -> None:
    other = await api.other("owner")
    their, mine = await _everything(api), await _everything(other)
    absent = {key: value.replace(their["session"], "f" * 32) for key, value in their.items()}
    absent |= {"future": "e" * 32, "key": "d" * 32, "project": "c" * 32, "user": "b" * 32}
    for real, none in zip(_tries(mine, their), _tries(mine, absent), strict=True):
        answers = [await other.client.request(method, path, json=body) for method, path, body in (real, none)]
        statuses = [answer.status_code for answer in answers]
        assert statuses == [404, 404] or real[1] in EMPTY_PATHS, (real, answers[0].text)
        assert statuses[0] == statuses[1], real
        texts = [re.sub(r'"request_id": "[^"]*"', "", answer.text) for answer in answers]
        for key in their:
            texts = [text.replace(their[key], key).replace(absent[key], key) for text in texts]
        assert texts[0] == texts[1], real
    listed = (await other.client.get("training_runs")).json()["training_runs"]
    assert [run["training_run_id"] for run in listed] == [mine["model"]]
    checkpoints = (await other.client.get("checkpoints")).json()["checkpoints"]
    assert [each["tinker_path"] for each in checkpoints] == [mine["path"]]


async def test_nothing_that_another_project_tries_changes_anything(api: Api) -> None:
    other = await api.other("owner")
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


async def test_a_denied_poll_of_a_pending_future_has_no_side_effect(tiny_settings: Callable[..., Settings]) -> None:
    async with serving(tiny_settings(poll_hold=40.0)) as api:
        other = await api.other()
        model = await api.model()
        step = await api.submit("optim_step", model_id=model, seq_id=2, adam_params={})
        poll = asyncio.create_task(api.post("retrieve_future", request_id=step))
        await asyncio.sleep(0.1)
        assert (await other.post("retrieve_future", request_id=step)).status_code == 404
        await api.submit("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
        answer = await poll
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
