"""Unloading a model: after all it was asked for, for good, and without its checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.support.api import Api, serving


async def test_what_was_asked_before_is_done_and_the_adapter_is_freed(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    save = await api.submit("save_weights", model_id=model, path="x")
    promise = (await api.post("unload_model", model_id=model, type="unload_model")).json()
    assert promise["model_id"] == model
    assert await api.result(promise["request_id"]) == {"model_id": model, "type": "unload_model"}
    path = (await api.result(save))["path"]
    async with asyncio.timeout(10):
        while "remove_adapter" not in api.groups.made[0].calls:  # noqa: ASYNC110 (a test, not the product)
            await asyncio.sleep(0.01)
    repeat = await api.post("unload_model", model_id=model)
    assert repeat.json() == promise
    refused = await api.post("zero_grad", model_id=model)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "model_unloaded")
    loaded = await api.do("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)
    await api.train(loaded["model_id"])
    assert (await api.client.get(f"training_runs/{model}")).json()["corrupted"] is False


async def test_the_place_of_an_unloaded_model_can_be_taken(tiny_settings: Callable[..., Any]) -> None:
    async with serving(tiny_settings(max_adapters=1)) as api:
        first = await api.model()
        full = await api.fails(
            "create_model",
            session_id=await api.session(),
            model_seq_id=0,
            base_model="acme/tiny",
            lora_config={"rank": 4},
        )
        assert full["category"] == "user"
        await api.do("unload_model", model_id=first)
        fresh = await api.model()
        assert fresh != first


async def test_another_projects_model_is_not_unloaded(api: Api) -> None:
    model = await api.model()
    assert (await (await api.other()).post("unload_model", model_id=model)).status_code == 404
    await api.train(model)
