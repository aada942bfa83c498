"""Polls while the server stops: held as before, not sent away to come back hundreds of times a second."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from app.settings import Settings
from tests.support.api import Api, serving

DATA = [{"model_input": [5] * 200, "loss_fn_inputs": {"target_tokens": [6] * 200}}] * 40


async def test_polls_are_held_while_accepted_work_is_finished(tiny_settings: Callable[..., Settings]) -> None:
    async with serving(tiny_settings(shutdown_grace=60.0)) as api:
        model = await api.model()
        promises = [
            await api.submit("forward_backward", model_id=model, data=DATA, loss_fn="cross_entropy") for _ in range(6)
        ]
        polls = [asyncio.create_task(_poll(api, promise)) for promise in promises]
        began = time.monotonic()
        stopping = asyncio.create_task(api.edge.app.state.lifecycle.drain())
        await asyncio.sleep(0)
        refused = await api.post("optim_step", model_id=model)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        asked = await asyncio.gather(*polls)
        await stopping
        held = (time.monotonic() - began) / api.edge.settings.poll_hold
        assert sum(asked) <= (2 + held) * len(promises)


async def test_polls_that_cannot_end_are_let_go_when_the_work_is_over(
    tiny_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_settings(shutdown_grace=0.2, poll_hold=30.0)) as api:
        sampler = await api.post(
            "create_sampling_session",
            session_id=await api.session(),
            sampling_session_seq_id=0,
            base_model="acme/tiny",
        )
        over = threading.Event()
        sampler_of_the_worker = api.groups.made[0].worker.rollout
        step, under_way = sampler_of_the_worker.step, threading.Event()

        def endless() -> Any:
            under_way.set()
            over.wait(60)
            return step()

        monkeypatch.setattr(sampler_of_the_worker, "step", endless)
        promise = await api.submit(
            "asample",
            sampling_session_id=sampler.json()["sampling_session_id"],
            prompt=[5],
            sampling_params={"stop": [], "max_tokens": 250},
        )
        poll = asyncio.create_task(api.post("retrieve_future", request_id=promise))
        assert await asyncio.to_thread(under_way.wait, 30)
        async with asyncio.timeout(15):
            await api.edge.app.state.lifecycle.drain()
            assert (await poll).status_code == 408
        over.set()


async def _poll(api: Api, promise: str) -> int:
    """Polls until there is a success; how often that took."""
    asked = 0
    while True:
        asked += 1
        answer = await api.post("retrieve_future", request_id=promise)
        if answer.status_code != 408:
            assert "error" not in answer.json()
            return asked
