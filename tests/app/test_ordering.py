"""Order: by seq_id whatever the order of arrival; a refused request leaves no hole that anything waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.settings import Settings
from tests.support.api import DATA, Api, datum, serving

CHUNKS = [[datum(5, 6, 7)], [datum(9, 10, 11, 12)], [datum(20, 21, 22)]]


async def test_chunks_out_of_order_equal_in_order_bit_for_bit(api: Api) -> None:
    session = await api.session()
    models = [await api.model(session, number) for number in range(3)]
    for model, order in zip(models, [(1, 2, 3), (2, 3, 1), (3, 2, 1)], strict=True):
        promises = {}
        for seq_id in order:
            promises[seq_id] = await api.submit(
                "forward_backward", model_id=model, seq_id=seq_id, data=CHUNKS[seq_id - 1], loss_fn="cross_entropy"
            )
        step = await api.submit("optim_step", model_id=model, seq_id=4, adam_params={"learning_rate": 0.01})
        for promise in (*promises.values(), step):
            assert "error" not in await api.result(promise)
    scores = [await api.scores(model, [chunk[0] for chunk in CHUNKS]) for model in models]
    assert scores[0] == scores[1] == scores[2]


async def test_a_step_that_arrives_first_waits_for_its_gradient(api: Api) -> None:
    model = await api.model()
    step = await api.submit("optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 0.01})
    await asyncio.sleep(0.1)
    assert "optimizer_step" not in api.groups.made[0].calls
    await api.do("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
    assert (await api.result(step))["metrics"]["grad_norm"] > 0


async def test_a_pending_poll_says_what_it_waits_for(tiny_settings: Callable[..., Settings]) -> None:
    async with serving(tiny_settings(poll_hold=0.05)) as api:
        model = await api.model()
        step = await api.submit("optim_step", model_id=model, seq_id=3, adam_params={})
        answer = await api.post("retrieve_future", request_id=step)
        assert answer.status_code == 408
        pending = answer.json()
        assert (pending["type"], pending["request_id"], pending["queue_state"]) == ("try_again", step, "active")
        assert "1" in pending["queue_state_reason"]


async def test_a_refused_request_uses_up_its_number(api: Api) -> None:
    model = await api.model()
    refused = [
        {"data": DATA, "loss_fn": "no_such_loss"},
        {"data": [], "loss_fn": "cross_entropy"},
        {"data": "text", "loss_fn": "cross_entropy"},
        {"data": [datum(5, 6, 70000)], "loss_fn": "cross_entropy"},
    ]
    for number, body in enumerate(refused, start=1):
        answer = await api.post("forward_backward", model_id=model, seq_id=number, **body)
        assert answer.status_code == 400, answer.text
    broken = await api.client.post(
        "forward_backward",
        content=f'{{"model_id": "{model}", "seq_id": 5, "data": ['.encode(),
        headers={"Content-Type": "application/json"},
    )
    assert broken.status_code == 400
    answer = await api.post("optim_step", model_id=model, seq_id=6, adam_params={"learning_rate": -1})
    assert answer.status_code == 400
    answer = await api.post("save_weights", model_id=model, seq_id=7, path="../x")
    assert answer.status_code == 400
    answer = await api.post(
        "load_weights", model_id=model, seq_id=8, path=f"tinker://{model}/weights/absent", optimizer=False
    )
    assert answer.status_code == 404
    await api.do("forward_backward", model_id=model, seq_id=9, data=DATA, loss_fn="cross_entropy")
    step = await api.do("optim_step", model_id=model, seq_id=10, adam_params={"learning_rate": 0.01})
    assert step["metrics"]["grad_norm"] > 0


async def test_a_body_over_the_limit_uses_up_its_number(tiny_settings: Callable[..., Settings]) -> None:
    async with serving(tiny_settings(max_body_mib=1)) as api:
        model = await api.model()
        body = f'{{"model_id": "{model}", "seq_id": 1, "data": [{"1," * 700000}'.encode()
        answer = await api.client.post("forward_backward", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
        await api.do("forward_backward", model_id=model, seq_id=2, data=DATA, loss_fn="cross_entropy")


async def test_a_corrected_request_may_take_the_refused_number(api: Api) -> None:
    model = await api.model()
    later = await api.submit("optim_step", model_id=model, seq_id=3, adam_params={"learning_rate": 0.01})
    answer = await api.post("forward_backward", model_id=model, seq_id=2, data=DATA, loss_fn="no_such_loss")
    assert answer.status_code == 400
    await api.submit("forward_backward", model_id=model, seq_id=2, data=DATA, loss_fn="cross_entropy")
    await api.submit("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
    assert (await api.result(later))["metrics"]["grad_norm"] > 0
    assert api.groups.made[0].calls.count("forward_backward") == 2


async def test_a_gap_that_is_never_filled_fails_what_waits_and_lets_the_next_go_on(
    tiny_settings: Callable[..., Settings],
) -> None:
    async with serving(tiny_settings(seq_gap_timeout=0.2)) as api:
        model = await api.model()
        waits = await api.submit("optim_step", model_id=model, seq_id=5, adam_params={})
        failure = await api.result(waits)
        assert (failure["category"], failure["code"]) == ("user", "seq_id_gap")
        await api.do("forward_backward", model_id=model, seq_id=6, data=DATA, loss_fn="cross_entropy")


async def test_a_failed_operation_does_not_stop_the_ones_behind_it(api: Api) -> None:
    model = await api.model()
    other = await api.model()
    await api.do("save_weights", model_id=other, path="x")
    bad = await api.submit("load_weights", model_id=model, seq_id=1, path=f"tinker://{other}/weights/x", optimizer=True)
    good = await api.submit("forward_backward", model_id=model, seq_id=2, data=DATA, loss_fn="cross_entropy")
    await api.result(bad)
    assert "error" not in await api.result(good)


async def test_numbers_of_64_bits_and_numbers_given_by_the_server(api: Api) -> None:
    model = await api.model()
    for _ in range(3):
        await api.do("forward_backward", model_id=model, data=DATA, loss_fn="cross_entropy")
    session = await api.session()
    answer = await api.post(
        "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="acme/tiny"
    )
    sampler = answer.json()["sampling_session_id"]
    huge = 557397847000000000
    body = {"sampling_session_id": sampler, "prompt": [5, 6], "sampling_params": {"max_tokens": 1, "seed": 2**70}}
    promise = (await api.post("asample", seq_id=huge, **body)).json()
    assert promise["sample_sequence_ids"] == [f"{sampler}:{huge}:0"]
    assert "error" not in await api.result(promise["request_id"])
