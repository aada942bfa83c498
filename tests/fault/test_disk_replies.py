"""The connection is cut just when the reply is to be sent, after everything is committed: a repeat gives that reply.

For every route of openapi.yaml that is not a GET. The reply of the first request is lost on its way; the client sends
the same again, twice, and what happened on the server is what one request does. Of a few routes the repeat says
something else, or is new work, by their nature: what holds for those is asserted one by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.app.conftest import BASE, MODEL
from tests.app.test_custom_losses import loss
from tests.support.api import DATA, Api, serving
from tests.support.disk_program import calm_settings
from tests.support.tiny_model import make_tiny_model

OPENAPI = Path(__file__).parents[2] / "openapi.yaml"
ROOT = BASE.removesuffix("/api/v1/")
STEP = {"learning_rate": 0.01}


def changing() -> set[str]:
    """The operation ids of everything but GET."""
    paths = yaml.safe_load(OPENAPI.read_text())["paths"].values()
    return {verbs[verb]["operationId"] for verbs in paths for verb in verbs.keys() & {"post", "put", "patch", "delete"}}


class Cut(Exception):
    """The connection is gone."""


class CutsReplies:
    """The application behind a connection that breaks when the first byte of a reply is to go."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.lost: set[str] = set()
        """Operation ids of the replies that did not arrive."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def cut(message: Message) -> None:
            assert message["status"] < 300, message
            self.lost.add(scope["route"].operation_id)
            raise Cut

        await self._app(scope, receive, cut)


class Careless:
    """A client whose first reply to everything is lost."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.connection = CutsReplies(api.edge.app)
        self._cutting = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.connection), base_url=BASE, headers=api.client.headers
        )

    async def lose(self, method: str, route: str, **options: Any) -> None:
        """Send once, and never hear of it."""
        with pytest.raises(Cut):
            await self._cutting.request(method, route, **options)

    async def send(self, method: str, route: str, **options: Any) -> Any:
        """Send, lose the reply, send again twice; returns the reply, which must be the same both times."""
        await self.lose(method, route, **options)
        first, second = [await self._api.client.request(method, route, **options) for _ in range(2)]
        assert first.status_code < 300, first.text
        assert (first.status_code, first.content) == (second.status_code, second.content)
        return first.json() if first.content else None

    async def post(self, route: str, **body: Any) -> Any:
        """`send` of a JSON body."""
        return await self.send("POST", route, json=body)

    async def do(self, route: str, **body: Any) -> dict[str, Any]:
        """An operation; returns its result."""
        outcome = await self._api.result((await self.post(route, **body))["request_id"])
        assert "error" not in outcome, outcome
        return outcome


async def test_a_lost_reply_is_given_again_and_nothing_is_done_twice(tmp_path: Path) -> None:
    settings = calm_settings(tmp_path / "data", make_tiny_model(tmp_path / "tiny"))
    settings = settings.model_copy(update={"pjwt_auth_enabled": True})
    async with serving(settings) as api:
        careless = Careless(api)
        session, model, sampler = await _training(careless, api)
        await _asking(careless, session, model, sampler)
        await _what_is_new_each_time(careless, api, sampler)
        await _base_models(careless, api, make_tiny_model(tmp_path / "second"))
        await _tenants(careless, api)
        await _adapter_from_elsewhere(careless, api)
        await _ending(careless, api, session, model)
        missing = changing() - careless.connection.lost
        assert not missing, f"nobody lost a reply of {missing}: what does a repeat do there?"


async def _training(careless: Careless, api: Api) -> tuple[str, str, str]:
    """Everything that changes weights or makes something of them."""
    key = {"X-Idempotency-Key": "one session"}
    session = (await careless.send("POST", "create_session", json={"sdk_version": "t"}, headers=key))["session_id"]
    made = {"base_model": MODEL, "lora_config": {"rank": 4, "seed": 1}}
    model = (await careless.do("create_model", session_id=session, model_seq_id=0, **made))["model_id"]
    batch = {"model_id": model, "data": DATA, "loss_fn": "cross_entropy"}
    await careless.do("forward_backward", seq_id=1, **batch)
    await careless.do("zero_grad", model_id=model, seq_id=2)
    await careless.do("forward_backward", seq_id=3, **batch)
    await careless.do("optim_step", model_id=model, seq_id=4, adam_params=STEP)
    scored = await careless.do("forward", seq_id=5, **batch)
    saved = await careless.do("save_weights", model_id=model, seq_id=6, path="a")
    sampled = await careless.do("save_weights_for_sampler", model_id=model, seq_id=7, path="s")
    await careless.do("save_weights_external", model_id=model, seq_id=8, path="e")
    await careless.post("copy_weights", source_path=saved["path"], session_id=session, model_seq_id=1)
    loaded = await careless.do("load_weights", session_id=session, model_seq_id=2, path=saved["path"], optimizer=True)
    opening = {"session_id": session, "sampling_session_seq_id": 0, "model_path": sampled["path"]}
    sampler = (await careless.post("create_sampling_session", **opening))["sampling_session_id"]
    drawn = await careless.do(
        "asample", sampling_session_id=sampler, seq_id=0, prompt=[5], sampling_params={"max_tokens": 2}
    )
    assert len(drawn["sequences"]) == 1
    await careless.do("create_custom_loss", **loss(session))
    calls = list(api.groups.made[0].calls)
    assert [calls.count(name) for name in ("optimizer_step", "forward_backward", "save_checkpoint")] == [1, 2, 3]
    other = await api.model(session, 3)
    await api.train(other)
    expected = await api.scores(other)
    assert [row["logprobs"]["data"] for row in scored["loss_fn_outputs"]] == expected
    assert await api.scores(loaded["model_id"]) == expected
    return session, model, sampler


async def _asking(careless: Careless, session: str, model: str, sampler: str) -> None:
    """What changes nothing, or the same thing to the same value."""
    path = f"tinker://{model}/weights/a"
    at = f"training_runs/{model}/checkpoints"
    await careless.send("PUT", f"{at}/weights/a/ttl", json={"ttl_seconds": 4000})
    await careless.send("POST", f"{at}/weights/a/publish")
    await careless.send("DELETE", f"{at}/weights/a/publish")
    await careless.post("client/config")
    await careless.post("client/dynamic_config")
    await careless.post("session_heartbeat", session_id=session)
    await careless.post("sessions/search")
    project = (await careless.post("sessions/search"))["sessions"][0]["project_id"]
    await careless.send("PUT", f"sessions/{session}/project", json={"project_id": project})
    event = {"event": "GENERIC_EVENT", "event_data": {}}
    about = {"platform": "", "sdk_version": "", "session_id": session, "process_uuid": "p"}
    await careless.post("telemetry", events=[event], **about)
    await careless.post("get_info", model_id=model)
    await careless.post("tokenize", model=MODEL, items=[{"prompt": "a", "completion": "b"}])
    assert (await careless.post("weights_info", tinker_path=path))["base_model"] == MODEL
    promise = await careless.post(
        "asample", sampling_session_id=sampler, seq_id=1, prompt=[5], sampling_params={"max_tokens": 1}
    )
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    found = await careless.post("retrieve_futures", target=target, prev_cursor=1)
    assert [each["request_id"] for each in found["completions"]] == [promise["request_id"]]
    assert len((await careless.post("retrieve_future", request_id=promise["request_id"]))["sequences"]) == 1
    await careless.post("cancel_future", request_id=promise["request_id"])
    message = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    await careless.send("POST", f"{ROOT}/anthropic/api/v1/messages/count_tokens", json=message)


async def _what_is_new_each_time(careless: Careless, api: Api, sampler: str) -> None:
    """A repeat gets something of its own, and what was lost keeps nobody from anything."""
    await careless.lose("POST", "auth/token", json={})
    assert (await api.post("auth/token")).json()["jwt"]
    await careless.lose("POST", "join_sampling_session", json={"sampling_session_id": sampler})
    numbers = [(await api.post("join_sampling_session", sampling_session_id=sampler)).json() for _ in range(2)]
    assert numbers[0] != numbers[1]
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    plain = {"model": MODEL, "prompt": "Hi", "max_tokens": 3, "temperature": 0}
    for route, body, answer in (
        ("anthropic/api/v1/messages", chat, "content"),
        ("oai/api/v1/chat/completions", chat, "choices"),
        ("oai/api/v1/completions", plain, "choices"),
    ):
        await careless.lose("POST", f"{ROOT}/{route}", json=body)
        first, second = [await api.client.post(f"{ROOT}/{route}", json=body) for _ in range(2)]
        assert first.json()[answer] == second.json()[answer]
        assert first.json()["id"] != second.json()["id"]


async def _base_models(careless: Careless, api: Api, folder: Path) -> None:
    """Added once, removed once; the repeat says that it is so."""
    await careless.lose("POST", "admin/models", json={"name": "acme/second", "path": str(folder)})
    again = await api.client.post("admin/models", json={"name": "acme/second", "path": str(folder)})
    assert again.json()["error"]["code"] == "already_exists"
    served = [model["name"] for model in (await api.client.get("admin/models")).json()["models"]]
    assert served == [MODEL, "acme/second"]
    await careless.lose("DELETE", "admin/models/acme/second")
    assert (await api.client.delete("admin/models/acme/second")).status_code == 404
    assert len((await api.client.get("admin/models")).json()["models"]) == 1


async def _tenants(careless: Careless, api: Api) -> None:
    """Made once, by name; a key whose reply was lost is in the list, and revoked or rotated from there."""
    client = api.client
    for kind in ("projects", "users"):
        await careless.lose("POST", f"admin/{kind}", json={"name": "acme"})
        again = await client.post(f"admin/{kind}", json={"name": "acme"})
        assert again.json()["error"]["code"] == "already_exists"
    [project] = [
        each["project_id"] for each in (await client.get("admin/projects")).json()["projects"] if each["name"] == "acme"
    ]
    [user] = [each["user_id"] for each in (await client.get("admin/users")).json()["users"]]
    member = f"admin/projects/{project}/members/{user}"
    await careless.send("PUT", member, json={"role": "member"})
    for route in ("keys", f"admin/projects/{project}/keys"):
        await careless.lose("POST", route, json={"name": "lost"})
        made = (await client.post(route, json={"name": "lost"})).json()["info"]["key_id"]
        [lost] = [
            each["key_id"]
            for each in (await client.get(route)).json()["keys"]
            if each["name"] == "lost" and each["key_id"] != made
        ]
        await careless.lose("POST", f"{route}/{lost}/rotate", json={})
        again = await client.post(f"{route}/{lost}/rotate", json={})
        assert again.status_code == 400
        [replacement] = [
            each["replaced_by"] for each in (await client.get(route)).json()["keys"] if each["key_id"] == lost
        ]
        assert replacement in again.json()["detail"]
        assert (await client.post(f"{route}/{replacement}/rotate", json={})).status_code == 200
        await _limits(careless, api, f"admin/keys/{made}/limits")
        await careless.send("DELETE", f"{route}/{made}")
    await _limits(careless, api, f"admin/projects/{project}/limits")
    for route in (member, f"admin/users/{user}"):
        await careless.lose("DELETE", route)
        assert (await client.delete(route)).status_code == 404
    await careless.send("DELETE", f"admin/projects/{project}")


async def _limits(careless: Careless, api: Api, route: str) -> None:
    """Set to the same value at another time, which the reply tells; cleared once."""
    await careless.lose("PUT", route, json={"lora_rank": 8})
    again = (await api.client.put(route, json={"lora_rank": 8})).json()
    assert [(each["name"], each["value"]) for each in again["limits"] if "set_at" in each] == [("lora_rank", 8)]
    await careless.send("DELETE", route)


async def _adapter_from_elsewhere(careless: Careless, api: Api) -> None:
    """Brought in once for each idempotency key."""
    config = next((api.edge.settings.data_dir / "checkpoints").rglob("adapter_config.json"))
    form = {"name": "brought", "base_model": MODEL, "adapter_config": config.read_text()}
    file = {"adapter_model": ("adapter_model.safetensors", (config.parent / "adapter_model.safetensors").read_bytes())}
    key = {"X-Idempotency-Key": "one adapter"}
    brought = await careless.send("POST", "checkpoints/import", data=form, files=file, headers=key)
    run, kind, name = brought["tinker_path"].removeprefix("tinker://").split("/")
    assert (await api.client.delete(f"training_runs/{run}/checkpoints/{kind}/{name}")).status_code == 204


async def _ending(careless: Careless, api: Api, session: str, model: str) -> None:
    """What is deleted, unloaded, over and revoked stays so; the repeat of a deletion says that there is nothing."""
    folders = api.edge.settings.data_dir / "checkpoints"
    before = len(list(folders.iterdir()))
    route = f"training_runs/{model}/checkpoints/weights/a"
    await careless.lose("DELETE", route)
    again = await api.client.delete(route)
    assert (again.status_code, again.json()["error"]["code"]) == (404, "not_found")
    assert len(list(folders.iterdir())) == before - 1
    assert (await api.client.get("checkpoints")).json()["cursor"]["total_count"] == 3  # s, e and the copy
    await careless.do("unload_model", model_id=model)
    await careless.post(f"sessions/{session}/finish", reason={"type": "success"})
    assert (await api.client.post("keys", json={"name": "another", "role": "admin"})).status_code == 200
    await careless.lose("DELETE", "auth/apikey/me")
    assert (await api.client.delete("auth/apikey/me")).status_code == 401
