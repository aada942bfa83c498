"""The training primitives through HTTP: sums, accumulation, zeroing, every hyperparameter, all wire forms."""

from __future__ import annotations

import zstandard

from schemas.proto import tinker_public_pb2 as pb
from tests.support.api import DATA, Api, datum


def packed(model_id: str, seq_id: int, *, forward_only: bool = False) -> bytes:
    """`DATA` as the SDK sends it."""
    import numpy as np

    message = pb.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy", forward_only=forward_only
    )
    row = message.data.add()
    row.model_input.add().encoded_text.tokens = np.array(DATA[0]["model_input"], dtype="<i4").tobytes()
    for name, dtype, kind in (("target_tokens", "<i8", pb.DTYPE_INT64), ("weights", "<f4", pb.DTYPE_FLOAT32)):
        values = np.array(DATA[0]["loss_fn_inputs"][name], dtype=dtype)
        tensor = row.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), kind
        tensor.shape.extend(values.shape)
    return message.SerializeToString()


async def test_gradients_add_up_over_calls_until_the_step(api: Api) -> None:
    session = await api.session()
    whole, parts = await api.model(session, 0), await api.model(session, 1)
    data = [datum(5, 6, 7), datum(9, 10, 11, 12), datum(20, 21)]
    await api.do("forward_backward", model_id=whole, data=data, loss_fn="cross_entropy")
    for example in data:
        await api.do("forward_backward", model_id=parts, data=[example], loss_fn="cross_entropy")
    steps = [
        await api.do("optim_step", model_id=model, adam_params={"learning_rate": 0.01}) for model in (whole, parts)
    ]
    assert abs(steps[0]["metrics"]["grad_norm"] - steps[1]["metrics"]["grad_norm"]) < 1e-4
    one, two = await api.scores(whole, data), await api.scores(parts, data)
    assert max(abs(a - b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True)) < 1e-4


async def test_losses_are_sums_scaled_by_the_weights(api: Api) -> None:
    model = await api.model()
    one = await api.do("forward", model_id=model, data=[datum(5, 6, 7, 8)], loss_fn="cross_entropy")
    half = await api.do("forward", model_id=model, data=[datum(5, 6, 7, 8, weight=0.5)], loss_fn="cross_entropy")
    assert abs(one["metrics"]["loss:sum"] - 2 * half["metrics"]["loss:sum"]) < 1e-4
    total = -sum(one["loss_fn_outputs"][0]["logprobs"]["data"])
    assert abs(one["metrics"]["loss:sum"] - total) < 1e-4


async def test_zero_grad_forgets_the_gradient(api: Api) -> None:
    session = await api.session()
    cleared, fresh = await api.model(session, 0), await api.model(session, 1)
    await api.do("forward_backward", model_id=cleared, data=[datum(40, 41, 42)], loss_fn="cross_entropy")
    assert await api.do("zero_grad", model_id=cleared) == {"type": "zero_grad"}
    for model in (cleared, fresh):
        await api.train(model)
    assert await api.scores(cleared) == await api.scores(fresh)


async def test_every_hyperparameter_counts(api: Api) -> None:
    session = await api.session()
    tried = [
        {"learning_rate": 0.01},
        {"learning_rate": 0.02},
        {"learning_rate": 0.01, "beta1": 0.5},
        {"learning_rate": 0.01, "beta2": 0.5},
        {"learning_rate": 0.01, "eps": 1e-1},
        {"learning_rate": 0.01, "weight_decay": 0.5},
        {"learning_rate": 0.01, "grad_clip_norm": 1e-4, "eps": 1e-4},
    ]
    seen = []
    for number, params in enumerate(tried):
        model = await api.model(session, number)
        for data in ([datum(5, 6, 7)], [datum(9, 10, 11, 12)]):
            await api.do("forward_backward", model_id=model, data=data, loss_fn="cross_entropy")
            await api.do("optim_step", model_id=model, adam_params=params)
        seen.append(await api.scores(model))
    assert all(seen.count(scores) == 1 for scores in seen)


async def test_a_learning_rate_of_zero_moves_nothing(api: Api) -> None:
    model = await api.model()
    before = await api.scores(model)
    await api.train(model, lr=0.0)
    assert await api.scores(model) == before


async def test_forward_leaves_no_gradient(api: Api) -> None:
    model = await api.model()
    before = await api.scores(model)
    step = await api.do("optim_step", model_id=model, adam_params={"learning_rate": 0.5})
    assert step["metrics"]["grad_norm"] == 0
    assert await api.scores(model) == before


async def test_protobuf_zstd_and_json_are_one_request(api: Api) -> None:
    model = await api.model()
    body = packed(model, 1)
    proto = {"Content-Type": "application/x-protobuf"}
    first = await api.client.post("forward_backward", content=body, headers=proto)
    assert first.status_code == 200, first.text
    zstd = {**proto, "Content-Encoding": "zstd"}
    again = await api.client.post("forward_backward", content=zstandard.compress(body), headers=zstd)
    as_json = await api.post("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
    assert first.json() == again.json() == as_json.json()
    result = await api.result(first.json()["request_id"])
    assert result["metrics"]["loss:sum"] > 0
    assert api.groups.made[0].calls.count("forward_backward") == 1


async def test_forward_only_in_protobuf_is_a_forward(api: Api) -> None:
    model = await api.model()
    headers = {"Content-Type": "application/x-protobuf"}
    answer = await api.client.post("forward_backward", content=packed(model, 1, forward_only=True), headers=headers)
    await api.result(answer.json()["request_id"])
    assert api.groups.made[0].calls.count("infer_batch") == 1
    assert "forward_backward" not in api.groups.made[0].calls


async def test_every_loss_returns_logprobs_for_every_example(api: Api) -> None:
    model = await api.model()
    policy = {"target_tokens": [6, 7, 8], "logprobs": [-1.0, -2.0, -3.0], "advantages": [1.0, -0.5, 0.25]}
    for loss_fn in ("importance_sampling", "ppo", "cispo", "dro"):
        data = [{"model_input": [5, 6, 7], "loss_fn_inputs": policy}] * 2
        outcome = await api.do("forward_backward", model_id=model, data=data, loss_fn=loss_fn)
        assert [len(output["logprobs"]["data"]) for output in outcome["loss_fn_outputs"]] == [3, 3]
        assert "loss:sum" in outcome["metrics"]
        assert all(name.count(":") == 1 for name in outcome["metrics"])


async def test_clip_thresholds_of_the_client_are_used(api: Api) -> None:
    model = await api.model()
    policy = {"target_tokens": [6, 7], "logprobs": [-9.0, -9.0], "advantages": [1.0, 1.0]}
    data = [{"model_input": [5, 6], "loss_fn_inputs": policy}]
    default = await api.do("forward", model_id=model, data=data, loss_fn="ppo")
    config = {"clip_high_threshold": 1.01}
    tight = await api.do("forward", model_id=model, data=data, loss_fn="ppo", loss_fn_config=config)
    assert default["metrics"]["loss:sum"] != tight["metrics"]["loss:sum"]
