"""A request that is sent again gives the same promise and runs once; another body under its number is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.app.conftest import MODEL
from tests.support.api import DATA, Api, datum


async def test_a_repeated_step_and_gradient_count_once(api: Api) -> None:
    session = await api.session()
    once, repeated = await api.model(session, 0), await api.model(session, 1)
    for model, times in ((once, 1), (repeated, 3)):
        for seq_id, route, body in (
            (1, "forward_backward", {"data": DATA, "loss_fn": "cross_entropy"}),
            (2, "optim_step", {"adam_params": {"learning_rate": 0.01}}),
            (3, "forward_backward", {"data": DATA, "loss_fn": "cross_entropy"}),
            (4, "optim_step", {"adam_params": {"learning_rate": 0.01}}),
        ):
            promises = [await api.submit(route, model_id=model, seq_id=seq_id, **body) for _ in range(times)]
            assert len(set(promises)) == 1
            assert "error" not in await api.result(promises[0])
            assert await api.submit(route, model_id=model, seq_id=seq_id, **body) == promises[0]
    assert await api.scores(once) == await api.scores(repeated)
    assert api.groups.made[0].calls.count("optimizer_step") == 4


async def test_concurrent_duplicates_run_once(api: Api) -> None:
    model = await api.model()
    promises = await asyncio.gather(
        *(
            api.submit("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
            for _ in range(10)
        )
    )
    assert len(set(promises)) == 1
    await api.result(promises[0])
    assert api.groups.made[0].calls.count("forward_backward") == 1


async def test_another_body_under_a_used_number_is_refused_and_changes_nothing(api: Api) -> None:
    model = await api.model()
    first = await api.submit("optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": 0.01})
    answer = await api.post("optim_step", model_id=model, seq_id=1, adam_params={"learning_rate": 0.02})
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["field"]) == ("seq_id_conflict", "seq_id")
    answer = await api.post("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
    assert answer.json()["error"]["code"] == "seq_id_conflict"
    assert "error" not in await api.result(first)
    await api.do("forward_backward", model_id=model, seq_id=2, data=DATA, loss_fn="cross_entropy")


async def test_the_same_training_request_as_forward_is_another_request(api: Api) -> None:
    model = await api.model()
    await api.submit("forward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
    answer = await api.post("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
    assert answer.json()["error"]["code"] == "seq_id_conflict"


@pytest.mark.parametrize("form", ["named", "ephemeral"])
async def test_repeated_saves_save_once(api: Api, form: str) -> None:
    model = await api.model()
    extra: dict[str, Any] = {"path": "x"} if form == "named" else {"sampling_session_seq_id": 0}
    body = {"model_id": model, "seq_id": 1, **extra}
    promises = [await api.submit("save_weights_for_sampler", **body) for _ in range(2)]
    assert promises[0] == promises[1]
    first = await api.result(promises[0])
    assert first == await api.result(promises[0])
    assert await api.submit("save_weights_for_sampler", **body) == promises[0]
    assert api.groups.made[0].calls.count("save_checkpoint") == 1


async def test_an_ephemeral_save_is_recognised_whatever_number_its_sampler_has(api: Api) -> None:
    """The official client draws a new number of the sampler for every try of one request."""
    model = await api.model()
    body = {"model_id": model, "seq_id": 1}
    promises = [await api.submit("save_weights_for_sampler", **body, sampling_session_seq_id=n) for n in (4, 5)]
    assert promises[0] == promises[1]
    assert (await api.result(promises[0]))["sampling_session_id"].endswith(":sample:4")
    answer = await api.post("save_weights_for_sampler", **body, sampling_session_seq_id=4, kind="inflight")
    assert answer.json()["error"]["code"] == "seq_id_conflict"


async def test_sampling_sessions_and_samples_are_recognised(api: Api) -> None:
    session = await api.session()
    body = {"session_id": session, "sampling_session_seq_id": 4, "base_model": MODEL}
    samplers = [(await api.post("create_sampling_session", **body)).json() for _ in range(2)]
    assert samplers[0] == samplers[1]
    assert samplers[0]["sampling_session_id"] == f"{session}:sample:4"
    sample = {
        "sampling_session_id": f"{session}:sample:4",
        "seq_id": 0,
        "prompt": [5, 6],
        "num_samples": 3,
        "sampling_params": {"max_tokens": 2},
    }
    promises = [(await api.post("asample", **sample)).json() for _ in range(2)]
    assert promises[0] == promises[1]
    assert len(set(promises[0]["sample_sequence_ids"])) == 3
    await api.result(promises[0]["request_id"])
    other = {**sample, "prompt": [5, 7]}
    assert (await api.post("asample", **other)).json()["error"]["code"] == "seq_id_conflict"


async def test_create_via_load_is_recognised_and_shares_the_numbers_of_models(api: Api) -> None:
    session = await api.session()
    model = await api.model(session, 0)
    saved = await api.do("save_weights", model_id=model, path="x")
    body = {"session_id": session, "model_seq_id": 1, "path": saved["path"], "optimizer": False}
    promises = [(await api.post("load_weights", **body)).json() for _ in range(2)]
    assert promises[0] == promises[1]
    assert promises[0]["model_id"] == f"{session}:train:1"
    await api.result(promises[0]["request_id"])
    answer = await api.post("create_model", session_id=session, model_seq_id=1, base_model=MODEL)
    assert answer.json()["error"]["code"] == "seq_id_conflict"


async def test_large_bodies_are_recognised_too(api: Api) -> None:
    model = await api.model()
    data = [datum(*range(5, 205)) for _ in range(60)]
    body = {"model_id": model, "seq_id": 1, "data": data, "loss_fn": "cross_entropy"}
    promises = {await api.submit("forward_backward", **body) for _ in range(2)}
    assert len(promises) == 1
    result = await api.result(promises.pop())
    assert len(result["loss_fn_outputs"]) == 60
