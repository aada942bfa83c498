"""JSON requests to operations, their stored form, and what a repeat is recognised by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.codec import (
    check_tokens,
    decode_context,
    decode_forward_backward,
    decode_operation,
    digest,
    encode_operation,
    encode_request,
    lora_spec,
    optim_step_operation,
    sample_operation,
)
from schemas.errors import InvalidRequest
from schemas.operations import (
    CreateModel,
    LoadWeights,
    LoraSpec,
    Operation,
    OptimStep,
    OptimStepParams,
    SaveWeights,
    ZeroGrad,
)
from schemas.requests import LoraConfig, OptimStepRequest, RequestModel, SampleRequest, SaveWeightsRequest
from tests.app.codec_samples import PROTO, RUN, simple_body


@pytest.mark.parametrize(
    "operation",
    [
        CreateModel(LoraSpec(8, 2**63 - 1, train_mlp=False)),
        LoadWeights("folder", with_optimizer=True, create=False),
        OptimStep(OptimStepParams(1e-4, (0.9, 0.95), 1e-12, 0.1), 1.0),
        OptimStep(OptimStepParams()),
        ZeroGrad(),
        SaveWeights("folder", with_optimizer=False),
    ],
)
def test_stored_operations_are_read_back(operation: Operation) -> None:
    stored = encode_operation("kind", operation, {"name": "ck", "ttl": None})
    assert decode_operation("kind", stored) == operation
    assert decode_context("kind", stored) == {"name": "ck", "ttl": None}
    assert encode_operation("kind", decode_operation("kind", stored), {"ttl": None, "name": "ck"}) == stored
    with pytest.raises(ValueError, match="other"):
        decode_operation("other", stored)


def test_a_batch_has_no_context() -> None:
    batch = decode_forward_backward(simple_body(), PROTO).batch
    with pytest.raises(ValueError, match="context"):
        encode_operation("forward", batch, {"a": 1})
    assert decode_context("forward", encode_operation("forward", batch)) == {}


def _sample(**body: Any) -> SampleRequest:
    return SampleRequest.model_validate({"sampling_session_id": "s", "prompt": [1, 2, 3], **body})


def test_a_sample_is_stored_whole() -> None:
    params = {"max_tokens": 4, "seed": 2**90, "stop": ["x", "é"], "temperature": 0.5, "top_k": 3, "top_p": 0.5}
    target = {"data": [[9, -1], [-1, 8]]}
    request = _sample(
        num_samples=2,
        sampling_params=params,
        prompt_logprobs=True,
        topk_prompt_logprobs=1,
        topk_sample_logprobs=2,
        target_prompt_logprobs=target,
        prompt_alt_tokens_k=1,
        prompt_logprobs_last_n=2,
    )
    sample = sample_operation(request, adapter_folder="f").operation
    stored = encode_operation("sample", sample)
    again = decode_operation("sample", stored)
    assert encode_operation("sample", again) == stored
    assert repr(again) == repr(sample)
    assert sample.params.seed == 2**90
    assert sample.params.stop == ("x", "é")


@pytest.mark.parametrize(("stop", "means"), [(None, None), ([], ()), ("x", ("x",)), ([7], (7,))])
def test_stops(stop: Any, means: Any) -> None:
    request = _sample(sampling_params={"stop": stop})
    operation = sample_operation(request, adapter_folder=None).operation
    assert operation.params.stop == means
    assert decode_operation("sample", encode_operation("sample", operation)).params.stop == means  # type: ignore[union-attr]


def test_sparse_targets_ask_only_for_what_they_list() -> None:
    sparse = {"data": [9, 0], "shape": [2, 3], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [2, 0]}
    parsed = sample_operation(_sample(target_prompt_logprobs=sparse), adapter_folder=None)
    assert parsed.sparse_targets
    assert parsed.operation.target_prompt_logprobs is not None
    assert parsed.operation.target_prompt_logprobs.tolist() == [[-1, -1, 9], [0, -1, -1]]


@pytest.mark.parametrize(
    "target",
    [
        [[1], [2], [3]],
        [1, 2],
        [[1.5], [2]],
        [[-2], [1]],
        [[2**31], [1]],
        [[], []],
        {"data": [-1], "shape": [2, 1], "sparse_crow_indices": [0, 1, 1], "sparse_col_indices": [0]},
    ],
)
def test_targets_that_do_not_fit_are_refused(target: Any) -> None:
    with pytest.raises(InvalidRequest, match="target_prompt_logprobs"):
        sample_operation(_sample(target_prompt_logprobs=target), adapter_folder=None)


def test_steps_and_geometry() -> None:
    request = OptimStepRequest.model_validate({"model_id": RUN, "lr": 0.5, "grad_clip_norm": 2})
    assert optim_step_operation(request) == OptimStep(OptimStepParams(0.5, (0.9, 0.95), 1e-12, 0.0), 2.0)
    assert lora_spec(LoraConfig(rank=4), lambda: 7) == LoraSpec(4, 7)
    assert lora_spec(LoraConfig(rank=4, seed=0), lambda: 7).seed == 0


def test_the_vocabulary_is_checked_by_name() -> None:
    batch = decode_forward_backward(simple_body(4), PROTO).batch
    check_tokens(batch, 4)
    with pytest.raises(InvalidRequest, match="token id 3 at index 3"):
        check_tokens(batch, 3)
    sample = sample_operation(_sample(target_prompt_logprobs=[[9], [-1]]), adapter_folder=None).operation
    check_tokens(sample, 10)
    with pytest.raises(InvalidRequest, match="target_prompt_logprobs"):
        check_tokens(sample, 9)


def _digest(model: type[RequestModel], body: dict[str, Any]) -> str:
    return digest(encode_request(model.model_validate(body)))


def test_a_repeat_is_recognised_in_any_form() -> None:
    forms: list[dict[str, Any]] = [
        {"seq_id": 1, "lr": 1, "betas": [0.5, 0.6]},
        {"type": "optim_step", "adam_params": {"beta2": 0.6, "learning_rate": 1.0, "beta1": 0.5}},
        {"seq_id": 1, "optimizer_params": {"type": "adamw", "lr": 1.0, "beta1": 0.5, "beta2": 0.6, "eps": 1e-12}},
    ]
    assert len({_digest(OptimStepRequest, {"model_id": RUN, **form}) for form in forms}) == 1
    assert _digest(OptimStepRequest, {"model_id": RUN, "lr": 2}) != _digest(OptimStepRequest, {"model_id": RUN})
    save = {"model_id": RUN, "path": "a"}
    assert _digest(SaveWeightsRequest, save) != _digest(SaveWeightsRequest, {**save, "overwrite": True})
    sample = {"sampling_session_id": "s", "prompt": [1, 2], "sampling_params": {"seed": 2**90}}
    chunked = {**sample, "prompt": {"chunks": [{"tokens": [1, 2]}]}, "seq_id": 4}
    assert _digest(SampleRequest, sample) == _digest(SampleRequest, chunked)


def test_protobuf_map_order_does_not_change_the_digest() -> None:
    body = simple_body(3)
    batch = decode_forward_backward(body, PROTO).batch
    reordered = type(batch)(
        batch.adapter_id,
        tuple(type(d)(d.tokens, dict(reversed(list(d.inputs.items())))) for d in batch.datums),
        batch.loss_fn,
    )
    assert encode_operation("forward_backward", batch) == encode_operation("forward_backward", reordered)
    assert np.array_equal(batch.datums[0].tokens, [0, 1, 2])
