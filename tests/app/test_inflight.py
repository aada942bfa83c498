"""Inflight samplers follow the newest inflight weights of their model; everything else stays what it was."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.settings import Settings
from engines.sampling.base import SampleStep
from store.slots import slot_checkpoint
from tests.support.api import DATA, Api, serving

PROMPT = [5, 6, 7, 8, 9]


async def _save(api: Api, model: str, number: int, kind: str = "inflight") -> str:
    body = {"model_id": model, "sampling_session_seq_id": number, "kind": kind}
    return str((await api.do("save_weights_for_sampler", **body))["sampling_session_id"])


async def _scores(api: Api, sampler: str) -> list[float]:
    outcome = await api.do(
        "asample",
        sampling_session_id=sampler,
        prompt=PROMPT,
        prompt_logprobs=True,
        sampling_params={"max_tokens": 1},
    )
    return list(outcome["prompt_logprobs"][1:])


def _near(one: list[float], other: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-3


def _folders(api: Api) -> list[str]:
    return sorted(path.name for path in (api.edge.settings.data_dir / "checkpoints").iterdir())


async def test_a_later_save_moves_old_and_new_inflight_samplers_and_no_snapshot(api: Api) -> None:
    model = await api.model()
    old, snapshot = await _save(api, model, 0), await _save(api, model, 1, "snapshot")
    start = (await api.scores(model))[0]
    await api.train(model, steps=3)
    assert _near(await _scores(api, old), start), "training alone moves nobody"
    new = await _save(api, model, 2)
    trained = (await api.scores(model))[0]
    assert not _near(start, trained)
    assert _near(await _scores(api, old), trained)
    assert _near(await _scores(api, new), trained)
    assert _near(await _scores(api, snapshot), start)
    await api.train(model, steps=3)
    named = (await api.do("save_weights_for_sampler", model_id=model, path="x"))["path"]
    await _save(api, model, 3, "snapshot")
    assert named.endswith("/x")
    assert _near(await _scores(api, old), trained), "other saves move nobody"
    assert len(_folders(api)) == 5
    await api.edge.app.state.services.housekeeping.sweep()
    assert len(_folders(api)) == 4, "the weights that the slot left are gone, and no others"
    assert _near(await _scores(api, new), trained)


async def test_models_have_slots_of_their_own(api: Api) -> None:
    session = await api.session()
    one, other = await api.model(session), await api.model(session, 1, seed=2)
    await api.train(one, steps=2)
    first, second = await _save(api, one, 0), await _save(api, other, 1)
    await api.train(other, steps=2)
    before = await _scores(api, first)
    await _save(api, other, 2)
    assert await _scores(api, first) == before
    assert _near(await _scores(api, second), (await api.scores(other))[0])


def _pause(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, nothing is drawn after three more steps; everything else goes on."""
    goes_on, step, steps = threading.Event(), sampler.step, itertools.count()
    monkeypatch.setattr(sampler, "step", lambda: step() if next(steps) < 3 or goes_on.wait(0.005) else SampleStep())
    return goes_on


async def test_a_request_keeps_the_weights_that_it_began_with(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    object.__setattr__(api.edge.settings, "poll_hold", 0.1)
    model = await api.model()
    sampler = await _save(api, model, 0)
    body = {
        "sampling_session_id": sampler,
        "prompt": PROMPT,
        "sampling_params": {"max_tokens": 200, "seed": 4, "stop": []},
    }
    expected = (await api.do("asample", **body))["sequences"]
    sampler_engine = api.groups.made[0].worker.rollout
    goes_on = _pause(sampler_engine, monkeypatch)
    running = await api.submit("asample", **body)
    async with asyncio.timeout(20):
        while not sampler_engine.load.rows:  # noqa: ASYNC110 (the worker is asked later)
            await asyncio.sleep(0.001)
    assert len(_folders(api)) == 1
    for _ in range(2):
        await api.submit("forward_backward", model_id=model, data=DATA, loss_fn="cross_entropy")
        await api.submit("optim_step", model_id=model, adam_params={"learning_rate": 0.1})
    await _save(api, model, 1)
    assert (await api.post("retrieve_future", request_id=running)).status_code == 408
    await api.edge.app.state.services.housekeeping.sweep()
    goes_on.set()
    assert (await api.result(running))["sequences"] == expected
    assert (await api.do("asample", **body))["sequences"] != expected
    await api.edge.app.state.services.housekeeping.sweep()
    assert len(_folders(api)) == 1


async def test_weights_that_a_waiting_request_reads_are_kept_also_over_a_restart(
    tiny_settings: Callable[..., Settings],
) -> None:
    settings = tiny_settings()
    params = {"max_tokens": 100, "seed": 4, "stop": []}
    async with serving(settings) as api:
        model = await api.model()
        sampler = await _save(api, model, 0)
        expected = (await api.do("asample", sampling_session_id=sampler, prompt=PROMPT, sampling_params=params))[
            "sequences"
        ]
        services = api.edge.app.state.services
        settle = services.operations.settling.settle

        async def never(record: Any, *rest: Any) -> None:
            if record.kind != "sample":
                await settle(record, *rest)

        services.operations.settling.settle = never  # samples run, and the process is gone before it could write them
        cut = await api.submit("asample", sampling_session_id=sampler, prompt=PROMPT, sampling_params=params)
        await api.train(model, steps=2, lr=0.1)
        await _save(api, model, 1)
        await services.housekeeping.sweep()
        assert len(_folders(api)) == 2
    async with serving(settings) as api:
        assert (await api.result(cut))["sequences"] == expected
        await api.edge.app.state.services.housekeeping.sweep()
        assert len(_folders(api)) == 1
        later = await api.do("asample", sampling_session_id=sampler, prompt=PROMPT, sampling_params=params)
        assert later["sequences"] != expected, "the slot survives as well"


async def test_requests_accepted_while_the_slot_moves_all_succeed(api: Api) -> None:
    model = await api.model()
    sampler = await _save(api, model, 0)
    body = {"sampling_session_id": sampler, "prompt": PROMPT, "sampling_params": {"max_tokens": 2}}
    sweep = api.edge.app.state.services.housekeeping.sweep

    async def move() -> None:
        for number in range(1, 9):
            await _save(api, model, number)
            await sweep()

    async def sample() -> None:
        for _ in range(12):
            await api.do("asample", **body)

    await asyncio.gather(move(), *(sample() for _ in range(4)))
    await sweep()
    assert len(_folders(api)) == 1


async def test_weights_that_are_swept_just_before_a_request_is_accepted_are_not_used(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await api.model()
    sampler = await _save(api, model, 0)
    services = api.edge.app.state.services
    accept, moves = services.operations.accept, iter([True])

    async def late(submission: Any) -> Any:
        if submission.kind == "sample" and next(moves, False):
            await api.train(model, steps=3)
            await _save(api, model, 1)
            await services.housekeeping.sweep()
            assert len(_folders(api)) == 1
        return await accept(submission)

    monkeypatch.setattr(services.operations, "accept", late)
    assert _near(await _scores(api, sampler), (await api.scores(model))[0])
    assert next(moves, None) is None


async def test_the_slot_ends_with_the_session(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    sampler = await _save(api, model, 0)
    assert await api.edge.app.state.services.store.read(lambda db: slot_checkpoint(db, model))
    await api.client.post(f"sessions/{session}/finish", json={})
    answer = await api.post("asample", sampling_session_id=sampler, prompt=PROMPT)
    assert answer.status_code in (404, 410)
    housekeeping = api.edge.app.state.services.housekeeping
    housekeeping._clock = lambda: datetime.now(UTC) + timedelta(seconds=1)
    await housekeeping.sweep()
    assert _folders(api) == []


async def test_an_inflight_sampler_is_what_it_is(api: Api) -> None:
    model = await api.model()
    sampler = await _save(api, model, 0)
    shown = (await api.client.get(f"samplers/{sampler}")).json()
    assert shown == {"sampler_id": sampler, "base_model": "acme/tiny"}
    body = {"model_id": model, "path": "x", "kind": "inflight"}
    answer = await api.post("save_weights_for_sampler", **body)
    assert answer.status_code == 400
    assert "inflight" in answer.json()["detail"]
    assert (await api.client.get("checkpoints")).json()["checkpoints"] == []
