"""Large results are announced with their size before they are sent, to clients that allow it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from app.settings import Settings
from tests.app.conftest import MODEL
from tests.support.api import DATA, Api, serving

PROTO = {"Accept": "application/x-protobuf"}


@pytest.fixture
async def api(tiny_settings: Callable[..., Settings]) -> AsyncIterator[Api]:
    async with serving(tiny_settings(metadata_only_above_kib=1)) as client:
        yield client


async def _large(api: Api) -> str:
    """A sample whose result has some KiB."""
    body = {"session_id": await api.session(), "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = (await api.post("create_sampling_session", **body)).json()["sampling_session_id"]
    promise = await api.submit(
        "asample",
        sampling_session_id=sampler,
        prompt=[5] * 100,
        topk_prompt_logprobs=20,
        sampling_params={"max_tokens": 1},
    )
    await api.result(promise)
    return promise


async def _ask(api: Api, promise: str, allowed: bool) -> Any:
    body = {"request_id": promise, "allow_metadata_only": allowed}
    return await api.client.post("retrieve_future", json=body, headers=PROTO)


async def test_first_the_size_then_the_result(api: Api) -> None:
    promise = await _large(api)
    announced = await _ask(api, promise, allowed=True)
    assert announced.status_code == 200
    assert announced.headers["content-type"] == "application/json"
    size = announced.json().pop("response_payload_size")
    assert announced.json() == {"status": "complete_metadata", "response_payload_size": size}
    result = await _ask(api, promise, allowed=False)
    assert result.headers["content-type"] == PROTO["Accept"]
    assert len(result.content) == size > 1024


async def test_the_size_never_comes_twice_in_a_row(api: Api) -> None:
    promise = await _large(api)
    assert (await _ask(api, promise, allowed=True)).json()["status"] == "complete_metadata"
    assert (await _ask(api, promise, allowed=True)).headers["content-type"] == PROTO["Accept"]
    assert (await _ask(api, promise, allowed=True)).json()["status"] == "complete_metadata"


async def test_who_does_not_allow_it_never_gets_it(api: Api) -> None:
    promise = await _large(api)
    for _ in range(2):
        assert (await _ask(api, promise, allowed=False)).headers["content-type"] == PROTO["Accept"]
    assert "sequences" in (await api.post("retrieve_future", request_id=promise)).json()


async def test_small_results_failures_and_what_is_pending_are_answered_as_ever(api: Api) -> None:
    model = await api.model()
    small = await api.submit("optim_step", model_id=model, adam_params={})
    await api.result(small)
    assert "metrics" in (await _ask(api, small, allowed=True)).json()
    failed = await api.submit("load_weights", model_id=model, path=await _other_rank(api), optimizer=True)
    await api.result(failed)
    assert "error" in (await _ask(api, failed, allowed=True)).json()
    waiting = await api.submit("forward", model_id=model, seq_id=9, data=DATA, loss_fn="cross_entropy")
    object.__setattr__(api.edge.settings, "poll_hold", 0.1)
    assert (await _ask(api, waiting, allowed=True)).status_code == 408


async def test_an_announced_result_is_not_delivered_yet(api: Api) -> None:
    promise = await _large(api)
    futures = api.edge.app.state.services.futures
    futures.take_delivered()
    await _ask(api, promise, allowed=True)
    assert not futures.take_delivered()
    await _ask(api, promise, allowed=False)
    assert list(futures.take_delivered()) == [promise]


async def _other_rank(api: Api) -> str:
    return str((await api.do("save_weights", model_id=await api.model(rank=8), path="x"))["path"])
