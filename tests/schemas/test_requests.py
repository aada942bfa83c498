"""Request models: what the SDK sends is read, friendly forms mean the same, everything else is refused by name."""

from typing import Any

import pytest
from pydantic import ValidationError

from schemas import requests as r
from schemas import responses as s
from schemas.http.base import parse_tinker_path

RUN = "sess-1:train:0"
PATH = f"tinker://{RUN}/weights/ck1"

SDK_BODIES: list[tuple[type[r.RequestModel], dict[str, Any]]] = [
    (r.ClientConfigRequest, {"sdk_version": "0.38.0"}),
    (
        r.CreateSessionRequest,
        {"tags": ["a"], "user_metadata": {"k": "v"}, "sdk_version": "0.38.0", "type": "create_session"},
    ),
    (
        r.CreateModelRequest,
        {
            "session_id": "sess-1",
            "model_seq_id": 0,
            "base_model": "fake/base",
            "user_metadata": {"r": "1"},
            "lora_config": {"rank": 8, "seed": 3, "train_unembed": True, "train_mlp": True, "train_attn": True},
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        },
    ),
    (r.GetInfoRequest, {"model_id": RUN, "type": "get_info"}),
    (
        r.OptimStepRequest,
        {
            "model_id": RUN,
            "seq_id": 8,
            "type": "optim_step",
            "adam_params": {
                "learning_rate": 0.001,
                "beta1": 0.9,
                "beta2": 0.95,
                "eps": 1e-12,
                "weight_decay": 0.0,
                "grad_clip_norm": 1.0,
            },
        },
    ),
    (
        r.SaveWeightsRequest,
        {
            "model_id": RUN,
            "path": "ck1",
            "seq_id": 9,
            "ttl_seconds": 7200,
            "overwrite": False,
            "user_metadata": {"a": "b"},
            "type": "save_weights",
        },
    ),
    (r.SaveWeightsForSamplerRequest, {"model_id": RUN, "path": "s1", "kind": "snapshot", "seq_id": 10}),
    (
        r.SaveWeightsForSamplerRequest,
        {"model_id": RUN, "sampling_session_seq_id": 0, "kind": "inflight", "seq_id": 12},
    ),
    (r.LoadWeightsRequest, {"model_id": RUN, "seq_id": 14, "path": PATH, "optimizer": False, "type": "load_weights"}),
    (r.LoadWeightsRequest, {"session_id": "sess-1", "model_seq_id": 1, "path": PATH, "optimizer": True}),
    (r.CreateSamplingSessionRequest, {"session_id": "sess-1", "sampling_session_seq_id": 2, "model_path": PATH}),
    (
        r.SampleRequest,
        {
            "num_samples": 2,
            "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
            "sampling_params": {
                "max_tokens": 4,
                "seed": 1,
                "stop": ["x", "\n"],
                "temperature": 0.7,
                "top_k": 5,
                "top_p": 0.9,
            },
            "sampling_session_id": "sess-1:sample:0",
            "seq_id": 557397847000000000,
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
            "topk_sample_logprobs": 3,
            "prompt_alt_tokens_k": 0,
            "record_stability_info": False,
            "type": "sample",
        },
    ),
    (r.RetrieveFutureRequest, {"request_id": "req-1", "allow_metadata_only": True}),
    (r.WeightsInfoRequest, {"tinker_path": PATH}),
    (r.FinishSessionRequest, {"reason": {"type": "success"}, "detail": None}),
    (r.SetTtlRequest, {"ttl_seconds": None}),
    (r.SessionHeartbeatRequest, {"session_id": "sess-1", "type": "session_heartbeat"}),
]


@pytest.mark.parametrize(("model", "body"), SDK_BODIES)
def test_what_the_sdk_sends_is_read(model: type[r.RequestModel], body: dict[str, Any]) -> None:
    read = model.model_validate(body).model_dump(exclude_unset=True)
    if model not in (r.OptimStepRequest, r.SampleRequest):
        assert read == body


@pytest.mark.parametrize(("model", "body"), SDK_BODIES)
def test_an_unknown_field_is_refused_by_name(model: type[r.RequestModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="surprise"):
        model.model_validate({**body, "surprise": 1})


@pytest.mark.parametrize(("model", "body"), SDK_BODIES)
def test_another_type_is_refused(model: type[r.RequestModel], body: dict[str, Any]) -> None:
    if "type" in model.model_fields:
        with pytest.raises(ValidationError, match="type"):
            model.model_validate({**body, "type": "other"})


def _optim(**body: Any) -> r.OptimStepRequest:
    return r.OptimStepRequest.model_validate({"model_id": RUN, **body})


@pytest.mark.parametrize(
    "form",
    [
        {"adam_params": {"learning_rate": 0.5, "beta1": 0.1, "beta2": 0.2}},
        {"adam_params": {"lr": 0.5, "betas": [0.1, 0.2]}},
        {"optimizer_params": {"type": "adamw", "lr": 0.5, "beta1": 0.1, "beta2": 0.2}},
        {"lr": 0.5, "betas": [0.1, 0.2]},
        {"learning_rate": 0.5, "beta1": 0.1, "beta2": 0.2},
    ],
)
def test_every_form_of_adam_means_the_same(form: dict[str, Any]) -> None:
    step = _optim(**form)
    assert (step.learning_rate, step.beta1, step.beta2, step.eps) == (0.5, 0.1, 0.2, 1e-12)
    assert step.model_dump() == _optim(learning_rate=0.5, beta1=0.1, beta2=0.2).model_dump()


def test_absent_hyperparameters_have_the_documented_defaults() -> None:
    step = _optim()
    values = (step.learning_rate, step.beta1, step.beta2, step.eps, step.weight_decay, step.grad_clip_norm)
    assert values == (1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"adam_params": {"lr": 1, "learning_rate": 1}}, "one of them"),
        ({"adam_params": {"betas": [0, 0], "beta1": 0}}, "one form"),
        ({"adam_params": {}, "lr": 0.1}, "once"),
        ({"adam_params": {}, "optimizer_params": {"type": "adamw"}}, "once"),
        ({"optimizer_params": {"type": "lion", "learning_rate": 0.1}}, "'adamw', 'dimuon'"),
        ({"optimizer_params": {"type": "dimuon"}}, "optimizer_params.dimuon.learning_rate"),
        ({"optimizer_params": {"learning_rate": 0.1}}, "optimizer_params"),
        ({"lr": -1}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": 1e38}, "lr"),
        ({"lr": "0.1"}, "lr"),
        ({"lr": True}, "lr"),
        ({"betas": [0.9]}, "betas"),
        ({"beta1": 1.0}, "beta1"),
        ({"eps": 0}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"grad_clip_norm": -1.0}, "grad_clip_norm"),
        ({"seq_id": 0}, "seq_id"),
        ({"seq_id": -3}, "seq_id"),
        ({"seq_id": 2**63}, "seq_id"),
        ({"seq_id": 1.0}, "seq_id"),
    ],
)
def test_wrong_steps_are_refused(form: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        _optim(**form)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "-x", "x" * 129, "a b", "ü", "a\n", "a\\b", "C:", "%2e", "a\0", "a "]
)
def test_wrong_names_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="path"):
        r.SaveWeightsRequest.model_validate({"model_id": RUN, "path": name})


@pytest.mark.parametrize("name", ["a", "ck-1", "000010", ".hidden", "x" * 128, "A.b_c-1"])
def test_good_names_are_read(name: str) -> None:
    assert r.SaveWeightsRequest.model_validate({"model_id": RUN, "path": name}).path == name


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://a/weights",
        "tinker://a/weights/b/c",
        "tinker://a/other/b",
        "file:///a/weights/b",
        "tinker:///weights/b",
        "tinker://a/weights/..",
        "a/weights/b",
    ],
)
def test_wrong_checkpoint_paths_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"name|path"):
        parse_tinker_path(path)


def test_checkpoint_path_parts() -> None:
    assert parse_tinker_path(PATH) == (RUN, "weights", "ck1")


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (r.LoadWeightsRequest, {"path": PATH, "optimizer": True}),
        (r.LoadWeightsRequest, {"path": PATH, "optimizer": True, "session_id": "s"}),
        (r.LoadWeightsRequest, {"path": PATH, "optimizer": True, "model_id": RUN, "session_id": "s"}),
        (r.LoadWeightsRequest, {"path": PATH, "optimizer": True, "model_id": RUN, "base_model": "b"}),
        (r.LoadWeightsRequest, {"path": PATH, "optimizer": True, "session_id": "s", "model_seq_id": 0, "seq_id": 1}),
        (r.SaveWeightsForSamplerRequest, {"model_id": RUN}),
        (r.SaveWeightsForSamplerRequest, {"model_id": RUN, "path": "a", "sampling_session_seq_id": 0}),
        (r.SaveWeightsForSamplerRequest, {"model_id": RUN, "sampling_session_seq_id": 0, "ttl_seconds": 3600}),
        (r.CreateSamplingSessionRequest, {"session_id": "s", "sampling_session_seq_id": 0}),
        (r.SaveWeightsRequest, {"model_id": RUN, "path": "a", "ttl_seconds": 3599}),
        (r.SaveWeightsRequest, {"model_id": RUN, "path": "a", "user_metadata": {"k": 1}}),
        (r.SaveWeightsRequest, {"model_id": RUN, "path": "a", "user_metadata": {"k": "\ud800"}}),
        (r.SaveWeightsRequest, {"model_id": RUN, "path": "a", "user_metadata": {"k": "v" * 5000}}),
        (r.CreateSessionRequest, {"tags": ["a\nb"]}),
        (r.CreateSessionRequest, {"display_name": "\x1b[31m"}),
        (r.GetInfoRequest, {"model_id": "a/b"}),
        (r.GetInfoRequest, {"model_id": "x" * 257}),
    ],
)
def test_fields_that_do_not_belong_together_are_refused(model: type[r.RequestModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model.model_validate(body)


@pytest.mark.parametrize(
    "lora", [{"rank": 0}, {"rank": 2**20}, {"train_attn": False, "train_mlp": False, "train_unembed": False}]
)
def test_wrong_geometry_is_refused(lora: dict[str, Any]) -> None:
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": lora}
    with pytest.raises(ValidationError, match="lora_config"):
        r.CreateModelRequest.model_validate(body)


def _sample(**body: Any) -> r.SampleRequest:
    return r.SampleRequest.model_validate({"sampling_session_id": "s", "prompt": [1, 2, 3], **body})


def test_a_plain_list_is_a_prompt() -> None:
    assert _sample() == _sample(prompt={"chunks": [{"tokens": [1, 2, 3]}]})


@pytest.mark.parametrize("stop", [None, "x", [], ["a", "b"], [7, 8]])
def test_every_form_of_stop(stop: Any) -> None:
    assert _sample(sampling_params={"stop": stop}).sampling_params.stop == stop


def test_seed_of_any_size_and_top_k_off() -> None:
    params = _sample(sampling_params={"seed": 2**100, "top_k": 0, "temperature": -0.0}).sampling_params
    assert (params.seed, params.top_k, str(params.temperature)) == (2**100, -1, "0.0")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"base_model": "b"}, "create_sampling_session"),
        ({"model_path": PATH}, "create_sampling_session"),
        ({"prompt": []}, "at least one token"),
        ({"prompt": {"chunks": []}}, "chunks"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "text-only"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 10**6}, "num_samples"),
        ({"seq_id": -1}, "seq_id"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs"),
        ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "can be scored"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"max_tokens": 2**31}}, "max_tokens"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"sampling_params": {"temperature": 1e-30}}, "temperature"),
        ({"sampling_params": {"temperature": 1e38}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"top_p": 2}}, "top_p"),
        ({"sampling_params": {"top_k": -2}}, "top_k"),
        ({"sampling_params": {"seed": -1}}, "seed"),
        ({"sampling_params": {"stop": ["a", 1]}}, "strings alone or token ids alone"),
        ({"sampling_params": {"stop": [""]}}, "1 to 1024 characters"),
        ({"sampling_params": {"stop": ""}}, "1 to 1024 characters"),
        ({"sampling_params": {"stop": [5, -1]}}, "holds -1; a token id is 0 to"),
        ({"sampling_params": {"stop": [5, 1.5]}}, "type float"),
        ({"sampling_params": {"stop": [True]}}, "type bool"),
        ({"sampling_params": {"stop": {"a": 1}}}, "a string, a list of strings"),
        ({"sampling_params": {"stop": "x" * 1025}}, "1 to 1024 characters"),
        ({"sampling_params": {"stop": ["x"] * 65}}, "holds 65 strings; at most 64"),
        ({"sampling_params": {"stop": [5] * 1025}}, "holds 1025 token ids; at most 1024"),
        ({"sampling_params": {"n": 1}}, "n"),
    ],
)
def test_wrong_samples_are_refused(body: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        _sample(**body)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"sampling_params": {"stop": ""}}, ("sampling_params", "stop")),
        ({"sampling_params": {"stop": [""]}}, ("sampling_params", "stop")),
        ({"sampling_params": {"stop": [-1]}}, ("sampling_params", "stop")),
        ({"sampling_params": {"stop": ["x"] * 10_000}}, ("sampling_params", "stop")),
        ({"prompt_logprobs_last_n": 1}, ("prompt_logprobs_last_n",)),
        ({"prompt_logprobs_last_n": 10, "prompt_logprobs": True}, ("prompt_logprobs_last_n",)),
    ],
)
def test_what_is_wrong_is_said_once_and_with_its_field(body: dict[str, Any], place: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        _sample(**body)
    assert [problem["loc"] for problem in caught.value.errors()] == [place]


@pytest.mark.parametrize("name", r.__all__)
def test_every_request_field_is_described(name: str) -> None:
    model = getattr(r, name)
    for field, info in model.model_fields.items():
        assert field == "type" or info.description, f"{name}.{field}"
    assert model.model_config["extra"] == "forbid"
    model.model_json_schema()


@pytest.mark.parametrize("name", s.__all__)
def test_every_result_field_is_described(name: str) -> None:
    model = getattr(s, name)
    for field, info in model.model_fields.items():
        assert field in ("type", "status") or info.description, f"{name}.{field}"
    model.model_json_schema(mode="serialization")


def test_non_finite_metrics_are_words() -> None:
    text = s.OptimStepResult(metrics={"a": float("nan"), "b": float("-inf")}).model_dump_json()
    assert text == '{"metrics":{"a":"NaN","b":"-Infinity"}}'
