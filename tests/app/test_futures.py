"""Polling: what each state answers, who is woken when, what survives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import update

from app.services.futures import Pending
from app.settings import Settings
from schemas.errors import Unavailable
from schemas.proto import tinker_public_pb2 as pb
from store.tables import Operation
from tests.app.conftest import MODEL
from tests.support.api import DATA, Api, serving

PROTO = {"Accept": "application/x-protobuf"}


async def test_a_result_can_be_fetched_again_and_again_in_both_forms(api: Api) -> None:
    model = await api.model()
    promise = await api.submit("forward_backward", model_id=model, data=DATA, loss_fn="cross_entropy")
    first = await api.result(promise)
    assert await api.result(promise) == first
    answers = [await api.client.post("retrieve_future", json={"request_id": promise}, headers=PROTO) for _ in range(2)]
    assert answers[0].content == answers[1].content
    assert answers[0].headers["content-type"] == "application/x-protobuf"
    message = pb.ForwardBackwardOutput.FromString(answers[0].content)
    assert message.metrics["loss:sum"] == first["metrics"]["loss:sum"]
    assert first["loss_fn_outputs"][0]["logprobs"]["shape"] == [4]


async def test_other_results_are_json_whatever_is_accepted(api: Api) -> None:
    model = await api.model()
    step = await api.submit("optim_step", model_id=model, adam_params={})
    await api.result(step)
    answer = await api.client.post("retrieve_future", json={"request_id": step}, headers=PROTO)
    assert answer.headers["content-type"] == "application/json"
    assert "error" not in answer.json()


async def test_a_hundred_waiters_are_woken_at_once(tiny_settings: Callable[..., Settings]) -> None:
    async with serving(tiny_settings(poll_hold=40.0)) as api:
        model = await api.model()
        step = await api.submit("optim_step", model_id=model, seq_id=2, adam_params={})
        polls = [asyncio.create_task(api.post("retrieve_future", request_id=step)) for _ in range(100)]
        await asyncio.sleep(0.5)
        assert not any(poll.done() for poll in polls)
        began = time.monotonic()
        await api.submit("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
        answers = await asyncio.gather(*polls)
        assert {answer.status_code for answer in answers} == {200}
        assert time.monotonic() - began < 30, "woken, not timed out: a poll is held for 40 seconds"
        assert api.edge.app.state.services.futures._waiters.empty


async def test_a_poll_ends_when_its_client_goes_away(api: Api) -> None:
    model = await api.model()
    step = await api.submit("optim_step", model_id=model, seq_id=2, adam_params={})
    services = api.edge.app.state.services
    project_id = (await services.runs.owned(await _project(api), model)).project_id
    async with asyncio.timeout(20):
        outcome = await services.futures.retrieve(project_id, step, 30.0, _nothing)
    assert isinstance(outcome, Pending)
    assert services.futures._waiters.empty


async def test_an_outcome_that_cannot_be_written_is_written_later(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    model = await api.model()
    services = api.edge.app.state.services

    async def full(work: object) -> None:
        raise Unavailable("the disk is full")

    step = await api.submit("optim_step", model_id=model, seq_id=2, adam_params={})
    await api.submit("zero_grad", model_id=model, seq_id=1)
    with monkeypatch.context() as broken:
        broken.setattr(services.operations.settling, "_store", SimpleNamespace(write=full))
        async with asyncio.timeout(10):
            while len(services.operations.settling._unsettled) < 2:  # noqa: ASYNC110 (written in the background)
                await asyncio.sleep(0.02)
    await services.housekeeping.sweep()
    assert "error" not in await api.result(step), "it was done, and must not be done again"
    await api.train(model)


async def test_unknown_futures_are_404_and_malformed_ones_400(api: Api) -> None:
    assert (await api.post("retrieve_future", request_id="0" * 32)).status_code == 404
    for body in ({"request_id": 7}, {}, {"request_id": "a/b"}, {"request_id": "x", "more": 1}):
        assert (await api.post("retrieve_future", **body)).status_code == 400


async def test_a_failed_job_is_a_200_with_an_error(api: Api) -> None:
    small, large = await api.model(rank=4), await api.model(rank=8)
    path = (await api.do("save_weights", model_id=large, path="x"))["path"]
    promise = await api.submit("load_weights", model_id=small, path=path, optimizer=True)
    failure = await api.result(promise)
    assert failure["category"] == "user"
    assert failure["request_id"] == promise
    assert str(api.edge.settings.data_dir) not in str(failure)
    answer = await api.client.post("retrieve_future", json={"request_id": promise}, headers=PROTO)
    assert (answer.status_code, answer.json()) == (200, failure)


async def test_results_expire_some_time_after_delivery_and_their_files_go(api: Api) -> None:
    model = await api.model()
    data = [{"model_input": [5] * 200, "loss_fn_inputs": {"target_tokens": [6] * 200}}] * 100
    promise = await api.submit("forward", model_id=model, data=data, loss_fn="cross_entropy")
    await api.result(promise)
    bodies = api.edge.settings.data_dir / "bodies"
    assert len(list(bodies.iterdir())) == 2
    housekeeping = api.edge.app.state.services.housekeeping
    await housekeeping.sweep()
    assert (await api.post("retrieve_future", request_id=promise)).status_code == 200
    housekeeping._clock = lambda: datetime.now(UTC) + timedelta(hours=2)
    housekeeping._started = housekeeping._clock()
    await housekeeping.sweep()
    answer = await api.post("retrieve_future", request_id=promise)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "gone")
    assert list(bodies.iterdir()) == []


async def test_a_silent_session_ends_and_frees_its_adapter(api: Api) -> None:
    model = await api.model()
    waiting = await api.submit("optim_step", model_id=model, seq_id=5, adam_params={})
    housekeeping = api.edge.app.state.services.housekeeping
    await housekeeping.sweep()
    housekeeping._clock = lambda: datetime.now(UTC) + timedelta(days=1)
    await housekeeping.sweep()
    failure = await api.result(waiting)
    assert failure["code"] == "gone"
    answer = await api.post("optim_step", model_id=model, seq_id=6, adam_params={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_ended")
    async with asyncio.timeout(20):
        while "remove_adapter" not in api.groups.made[0].calls:  # noqa: ASYNC110 (the worker is asked later)
            await asyncio.sleep(0.02)


async def test_a_finished_session_takes_no_new_work_of_any_kind(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    opened = await api.do("save_weights_for_sampler", model_id=model, sampling_session_seq_id=0)
    assert (await api.client.post(f"sessions/{session}/finish", json={})).status_code == 200
    tries = [
        ("optim_step", {"model_id": model}),
        ("forward_backward", {"model_id": model, "data": DATA, "loss_fn": "cross_entropy"}),
        ("create_model", {"session_id": session, "model_seq_id": 1, "base_model": MODEL}),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1, "base_model": MODEL}),
    ]
    for route, body in tries:
        assert (await api.post(route, **body)).status_code == 410, route
    sample = await api.post("asample", sampling_session_id=opened["sampling_session_id"], prompt=[5])
    assert sample.status_code in (404, 410)
    await api.edge.app.state.services.checkpoints.sweep_expired()
    assert list((api.edge.settings.data_dir / "checkpoints").iterdir()) == []


async def test_a_worker_that_dies_loses_nothing(api: Api) -> None:
    model = await api.model()
    await api.train(model)
    scores = await api.scores(model)
    await api.do("forward_backward", model_id=model, data=DATA, loss_fn="cross_entropy")
    api.groups.made[0].die()
    assert await api.scores(model) == scores
    stepped = await api.do("optim_step", model_id=model, adam_params={"learning_rate": 0.01})
    assert stepped["metrics"]["grad_norm"] > 0


async def test_a_model_that_cannot_be_brought_back_is_lost_with_a_clear_error_and_new_ones_work(api: Api) -> None:
    model = await api.model()
    await api.train(model)
    path = (await api.do("save_weights", model_id=model, path="x"))["path"]
    waiting = await api.submit("optim_step", model_id=model, seq_id=9, adam_params={})

    async def forget(db: Any) -> None:
        gone = {"body_inline": None, "body_ref": None}
        await db.execute(update(Operation).where(Operation.kind == "optim_step").values(**gone))

    await api.edge.app.state.store.write(forget)
    api.groups.made[0].die()
    failure = await api.result(waiting)
    assert (failure["code"], failure["category"]) == ("model_lost", "server")
    answer = await api.post("optim_step", model_id=model, seq_id=10, adam_params={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "model_lost")
    body = {"session_id": await api.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    resumed = await api.do("load_weights", **body)
    await api.train(resumed["model_id"])


async def test_what_survives_a_restart(tiny_settings: Callable[..., Settings]) -> None:
    settings = tiny_settings()
    async with serving(settings) as api:
        session = await api.session()
        model = await api.model(session)
        await api.train(model)
        scored = await api.submit("forward", model_id=model, data=DATA, loss_fn="cross_entropy")
        scores = await api.result(scored)
        path = (await api.do("save_weights", model_id=model, path="x"))["path"]
        sampler = (await api.do("save_weights_for_sampler", model_id=model, sampling_session_seq_id=0))[
            "sampling_session_id"
        ]
        await api.do("forward_backward", model_id=model, data=DATA, loss_fn="cross_entropy")
        adam = {"learning_rate": 0.01}
        stepped = await api.submit("optim_step", model_id=model, adam_params=adam)
        cut = await api.submit(
            "asample", sampling_session_id=sampler, prompt=[5], sampling_params={"stop": [], "max_tokens": 250}
        )
        # The process is gone before either could end: nothing more is written.
        api.edge.app.state.services.operations.settling.settle = _nothing
    async with serving(settings) as api:
        assert await api.result(scored) == scores
        assert len((await api.result(cut))["sequences"][0]["tokens"]) == 250
        assert (await api.client.get(f"training_runs/{model}")).json()["corrupted"] is False
        sampled = await api.do(
            "asample",
            sampling_session_id=sampler,
            prompt=[5, 6, 7, 8, 9],
            prompt_logprobs=True,
            sampling_params={"max_tokens": 1},
        )
        trained = scores["loss_fn_outputs"][0]["logprobs"]["data"]
        assert max(abs(a - b) for a, b in zip(trained, sampled["prompt_logprobs"][1:], strict=True)) < 1e-3
        resumed = await api.do("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)
        assert (await api.scores(resumed["model_id"]))[0] == trained
        await api.train(resumed["model_id"])
        assert "error" not in await api.result(stepped)
        assert (await api.scores(resumed["model_id"]))[0] == (await api.scores(model))[0]


async def _project(api: Api) -> str:
    runs = (await api.client.get("training_runs")).json()["training_runs"]
    return str(runs[0]["model_owner"])


async def _nothing(*_: object) -> None:
    """In place of writing an outcome."""
