"""Requests that cannot be honoured: a 4xx that names the field, at once, and nothing has changed."""

from __future__ import annotations

from typing import Any

from tests.app.conftest import MODEL
from tests.support.api import DATA, Api, datum


def _policy(**inputs: Any) -> list[dict[str, Any]]:
    given = {"target_tokens": [6, 7], "logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0], **inputs}
    return [{"model_input": [5, 6], "loss_fn_inputs": given}]


def _weighted(**inputs: Any) -> list[dict[str, Any]]:
    return [{"model_input": [5, 6], "loss_fn_inputs": {"target_tokens": [6, 7], **inputs}}]


CE = {"loss_fn": "cross_entropy"}
IMAGE = {"type": "image", "data": "iVBORw==", "format": "png"}

TRAINING: list[tuple[str, dict[str, Any], str]] = [
    ("forward_backward", {"data": DATA, "loss_fn": "no_such"}, "loss_fn"),
    ("forward_backward", {"data": DATA, "loss_fn": "stable_reinforce"}, "data[0].loss_fn_inputs"),
    ("forward_backward", {"data": [], **CE}, "data"),
    ("forward_backward", {"data": "text", **CE}, "data"),
    ("forward_backward", {"data": [datum(5, 300)], **CE}, "data[0].loss_fn_inputs.target_tokens"),
    ("forward_backward", {"data": [datum(300, 5)], **CE}, "data[0].model_input"),
    ("forward_backward", {"data": [datum(*[5] * 300)], **CE}, "data[0].model_input"),
    ("forward_backward", {"data": _weighted(weights=[1.0]), **CE}, "data[0].loss_fn_inputs.weights"),
    ("forward_backward", {"data": _weighted(advantages=[1.0, 1.0]), **CE}, "data[0].loss_fn_inputs.advantages"),
    ("forward_backward", {"data": _weighted(weights=[1.0, 1e39]), **CE}, "data[0].loss_fn_inputs.weights"),
    ("forward_backward", {"data": _weighted(target_tokens=[-6, 7]), **CE}, "data[0].loss_fn_inputs.target_tokens"),
    ("forward_backward", {"data": _weighted(), "loss_fn": "ppo"}, "data[0].loss_fn_inputs"),
    (
        "forward_backward",
        {"data": _policy(), "loss_fn": "ppo", "loss_fn_config": {"kl_beta": 1.0}},
        "loss_fn_config.kl_beta",
    ),
    (
        "forward_backward",
        {"data": _policy(), "loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 2.0}},
        "loss_fn_config.clip_low_threshold",
    ),
    ("forward_backward", {"data": DATA, **CE, "temperature": 0.7}, "temperature"),
    (
        "forward_backward",
        {"data": [{**DATA[0], "model_input": {"chunks": [IMAGE]}}], **CE},
        "data[0].model_input.chunks[0]",
    ),
    ("forward_backward", {"data": DATA, **CE, "seq_id": -1}, "seq_id"),
    ("forward_backward", {"data": DATA, **CE, "seq_id": 2**63}, "seq_id"),
    ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "adam_params.learning_rate"),
    ("optim_step", {"adam_params": {"learning_rate": "fast"}}, "adam_params.learning_rate"),
    ("optim_step", {"adam_params": {"beta1": 1.0}}, "adam_params.beta1"),
    ("optim_step", {"adam_params": {"eps": 0.0}}, "adam_params.eps"),
    ("optim_step", {"adam_params": {"grad_clip_norm": -1.0}}, "adam_params.grad_clip_norm"),
    ("optim_step", {"adam_params": {"momentum": 0.9}}, "adam_params.momentum"),
    ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}, "optimizer_params.type"),
    ("zero_grad", {"all": True}, "all"),
    ("save_weights", {"path": "../x"}, "path"),
    ("save_weights", {"path": "x", "ttl_seconds": 10}, "ttl_seconds"),
    ("save_weights", {"path": "x", "user_metadata": {"a": 1}}, "user_metadata.a"),
    ("save_weights_for_sampler", {"sampling_session_seq_id": 0, "kind": "mirror"}, "kind"),
    ("load_weights", {"path": "/etc/passwd", "optimizer": False}, "path"),
    ("load_weights", {"path": "tinker://a/b", "optimizer": False}, "path"),
    ("load_weights", {"path": "tinker://a/elsewhere/b", "optimizer": False}, "path"),
]  # fmt: skip

OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("create_model", {"base_model": "acme/absent"}, "base_model"),
    ("create_model", {"base_model": "/etc"}, "base_model"),
    ("create_model", {"base_model": "../x"}, "base_model"),
    ("create_model", {"base_model": "https://hub/x"}, "base_model"),
    ("create_model", {"lora_config": {"rank": 0}}, "lora_config.rank"),
    ("create_model", {"lora_config": {"rank": 257}}, "lora_config.rank"),
    ("create_model", {"lora_config": {"rank": 4, "alpha": 8}}, "lora_config.alpha"),
    (
        "create_model",
        {"lora_config": {"train_attn": False, "train_mlp": False, "train_unembed": False}},
        "lora_config",
    ),
    ("create_model", {"optimizer_config": {"type": "sgd"}}, "optimizer_config.type"),
    ("create_model", {"model_seq_id": -1}, "model_seq_id"),
    ("create_sampling_session", {"base_model": "acme/absent", "sampling_session_seq_id": 7}, "base_model"),
    ("create_sampling_session", {"model_path": "x", "sampling_session_seq_id": 7}, "model_path"),
]

SAMPLES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [300]}, "prompt"),
    ({"prompt": [-1]}, "prompt.chunks[0].tokens[0]"),
    ({"num_samples": 0}, "num_samples"),
    ({"num_samples": 10**6}, "num_samples"),
    ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    ({"sampling_params": {"max_tokens": 256}}, "sampling_params.max_tokens"),
    ({"sampling_params": {"temperature": -1.0}}, "sampling_params.temperature"),
    ({"sampling_params": {"top_p": 0.0}}, "sampling_params.top_p"),
    ({"sampling_params": {"top_p": 2.0}}, "sampling_params.top_p"),
    ({"sampling_params": {"top_k": -2}}, "sampling_params.top_k"),
    ({"sampling_params": {"stop": [300]}}, "sampling_params.stop"),
    ({"sampling_params": {"presence_penalty": 1.0}}, "sampling_params.presence_penalty"),
    ({"topk_prompt_logprobs": 260, "prompt_logprobs": True}, "topk_prompt_logprobs"),
    ({"target_prompt_logprobs": {"data": [5, 6], "dtype": "int64", "shape": [2, 1]}}, "target_prompt_logprobs"),
]


def _refused(answer: Any, field: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["category"] == "user"
    named = error["field"] or ""
    assert named == field or named.startswith((f"{field}.", f"{field}[")), (named, field, answer.json()["detail"])
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_bad_training_requests_are_refused_by_name_and_change_nothing(api: Api) -> None:
    model = await api.model()
    await api.train(model)
    await api.do("forward_backward", model_id=model, data=DATA, loss_fn="cross_entropy")
    calls = list(api.groups.made[0].calls)
    for route, body, field in TRAINING:
        _refused(await api.post(route, model_id=model, **body), field)
    assert api.groups.made[0].calls == calls
    twin = await api.model()
    await api.train(twin)
    await api.do("forward_backward", model_id=twin, data=DATA, loss_fn="cross_entropy")
    assert await api.scores(model) == await api.scores(twin)
    steps = [await api.do("optim_step", model_id=each, adam_params={"learning_rate": 0.01}) for each in (model, twin)]
    assert steps[0] == steps[1]
    assert await api.scores(model) == await api.scores(twin)
    assert (await api.client.get("checkpoints")).json()["checkpoints"] == []


async def test_bad_requests_for_models_and_samplers_make_none(api: Api) -> None:
    session = await api.session()
    usual = {"session_id": session}
    for route, body, field in OTHERS:
        if route == "create_model":
            body = {"model_seq_id": 0, "base_model": MODEL, **body}
        _refused(await api.post(route, **usual, **body), field)
    made = (await api.client.get(f"sessions/{session}")).json()
    assert (made["training_run_ids"], made["sampler_ids"]) == ([], [])
    assert await api.model(session) == f"{session}:train:0"


async def test_bad_samples_are_refused_by_name(api: Api) -> None:
    session = await api.session()
    opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = (await api.post("create_sampling_session", **opened)).json()["sampling_session_id"]
    for body, field in SAMPLES:
        _refused(await api.post("asample", **{"sampling_session_id": sampler, "prompt": [5, 6], **body}), field)
    assert "sample_turn" not in api.groups.made[0].calls


async def test_bodies_that_are_not_what_they_say(api: Api) -> None:
    model = await api.model()
    proto, text = {"Content-Type": "application/x-protobuf"}, {"Content-Type": "application/json"}
    tries = [
        ("forward_backward", b"\xff\xfe\xfd", proto, 400),
        ("forward_backward", b"", proto, 400),
        ("forward_backward", b"{", text, 400),
        ("forward_backward", b'{"a": NaN}', text, 400),
        ("forward_backward", b"\x0a\x05abc", {"Content-Type": "text/plain"}, 415),
        ("forward_backward", b"garbage", {**proto, "Content-Encoding": "zstd"}, 400),
        ("forward_backward", b"{}", {**proto, "Content-Encoding": "gzip"}, 415),
        ("optim_step", b"x=1", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("optim_step", b"[" * 100000, text, 400),
        ("optim_step", b"null", text, 400),
        ("optim_step", f'{{"model_id": "{model}", "model_id": "b"}}'.encode(), text, 400),
        ("optim_step", f'{{"model_id": "{model}", "adam_params": {{"eps": NaN}}}}'.encode(), text, 400),
        ("asample", b"\xc3\x28", text, 400),
        ("retrieve_future", b"", text, 400),
    ]
    for route, body, headers, status in tries:
        answer = await api.client.post(route, content=body, headers=headers)
        assert answer.status_code == status, (route, body[:40], answer.text)
        assert answer.json()["detail"]
    await api.train(model)
