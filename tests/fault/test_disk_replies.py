"""The connection is cut just when the reply is to be sent, after everything is committed: a repeat gives that reply.

For every route that changes something. The reply of the first request is lost on its way; the client sends the same
again, twice, and what happened on the server is what one request does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.main import API
from tests.app.conftest import BASE, MODEL
from tests.app.test_custom_losses import loss
from tests.support.api import DATA, Api, serving
from tests.support.disk_program import calm_settings
from tests.support.tiny_model import make_tiny_model

COVERED = {
    "create_session",
    "create_model",
    "forward",
    "forward_backward",
    "optim_step",
    "zero_grad",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
    "copy_weights",
    "create_sampling_session",
    "asample",
    "create_custom_loss",
    "unload_model",
    "sessions/{session_id}/finish",
    "training_runs/{training_run_id}/checkpoints/{checkpoint_id}/ttl",
    "training_runs/{training_run_id}/checkpoints/{segment}/{name}/publish",
    "training_runs/{training_run_id}/checkpoints/{checkpoint_id}",
}
HARMLESS = {
    "client/config",
    "client/dynamic_config",
    "auth/token",
    "session_heartbeat",
    "sessions/search",
    "telemetry",
    "get_info",
    "weights_info",
    "retrieve_future",
    "retrieve_futures",
    "cancel_future",
    "sessions/{session_id}/project",
    "join_sampling_session",
    "auth/apikey/me",
}
"""Routes that change nothing, whose repeat says the same by itself, or (a new number, an ended key) cannot matter."""
STEP = {"learning_rate": 0.01}


class Cut(Exception):
    """The connection is gone."""


class CutsReplies:
    """The application behind a connection that breaks when the first byte of a reply is to go."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def cut(message: Message) -> None:
            raise Cut

        await self._app(scope, receive, cut)


class Careless:
    """A client whose first reply to everything is lost."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._cutting = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=CutsReplies(api.edge.app)), base_url=BASE, headers=api.client.headers
        )

    async def send(self, method: str, route: str, **options: Any) -> Any:
        """Send, lose the reply, send again twice; returns the reply, which must be the same both times."""
        with pytest.raises(Cut):
            await self._cutting.request(method, route, **options)
        first, second = [await self._api.client.request(method, route, **options) for _ in range(2)]
        assert first.status_code < 300, first.text
        assert (first.status_code, first.content) == (second.status_code, second.content)
        return first.json() if first.content else None

    async def do(self, route: str, **body: Any) -> dict[str, Any]:
        """An operation; returns its result."""
        outcome = await self._api.result((await self.send("POST", route, json=body))["request_id"])
        assert "error" not in outcome, outcome
        return outcome


def test_every_mutating_route_is_named() -> None:
    """A new route has to be put into one of the two lists."""
    from app.main import create_app
    from app.settings import Settings

    paths = create_app(Settings()).openapi()["paths"]
    changing = {path.removeprefix(f"{API}/") for path, verbs in paths.items() if verbs.keys() - {"get"}}
    assert {path for path in changing if not path.startswith("/")} == COVERED | HARMLESS


async def test_a_lost_reply_is_given_again_and_nothing_is_done_twice(tmp_path: Path) -> None:
    settings = calm_settings(tmp_path / "data", make_tiny_model(tmp_path / "tiny"))
    async with serving(settings) as api:
        careless, careful = Careless(api), api
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
        target = {"source_path": saved["path"], "session_id": session, "model_seq_id": 1}
        await careless.send("POST", "copy_weights", json=target)
        load = {"session_id": session, "model_seq_id": 2, "path": saved["path"], "optimizer": True}
        loaded = await careless.do("load_weights", **load)
        opening = {"session_id": session, "sampling_session_seq_id": 0, "model_path": sampled["path"]}
        sampler = (await careless.send("POST", "create_sampling_session", json=opening))["sampling_session_id"]
        drawn = await careless.do(
            "asample", sampling_session_id=sampler, seq_id=0, prompt=[5], sampling_params={"max_tokens": 2}
        )
        assert len(drawn["sequences"]) == 1
        await careless.do("create_custom_loss", **loss(session))
        calls = list(api.groups.made[0].calls)
        assert [calls.count(name) for name in ("optimizer_step", "forward_backward", "save_checkpoint")] == [1, 2, 3]
        other = await careful.model(session, 3)
        await careful.train(other)
        expected = await careful.scores(other)
        assert [row["logprobs"]["data"] for row in scored["loss_fn_outputs"]] == expected
        assert await careful.scores(loaded["model_id"]) == expected
        at = f"training_runs/{model}/checkpoints"
        await careless.send("PUT", f"{at}/weights/a/ttl", json={"ttl_seconds": 4000})
        await careless.send("POST", f"{at}/weights/a/publish")
        await careless.send("DELETE", f"{at}/weights/a/publish")
        assert (await api.client.get("checkpoints")).json()["cursor"]["total_count"] == 4
        await careless.do("unload_model", model_id=loaded["model_id"])
        await careless.send("POST", f"sessions/{session}/finish", json={"reason": {"type": "success"}})


async def test_a_deletion_whose_reply_is_lost_is_done(tmp_path: Path) -> None:
    """Its repeat says that there is nothing to delete any more."""
    settings = calm_settings(tmp_path / "data", make_tiny_model(tmp_path / "tiny"))
    async with serving(settings) as api:
        model = await api.model()
        await api.do("save_weights", model_id=model, path="a")
        route = f"training_runs/{model}/checkpoints/weights/a"
        cutting = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=CutsReplies(api.edge.app)), base_url=BASE, headers=api.client.headers
        )
        with pytest.raises(Cut):
            await cutting.delete(route)
        again = await api.client.delete(route)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "not_found")
        assert list((settings.data_dir / "checkpoints").iterdir()) == []
