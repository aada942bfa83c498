"""Results: the SDK's own decoder reads back what was encoded; the JSON form says the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker.proto.response_conv import deserialize_proto_response
from tinker.types.forward_backward_output import ForwardBackwardOutput as SdkOutput
from tinker.types.sample_response import SampleResponse as SdkSample

from app.codec import encode_result, proto_result_to_json
from schemas.errors import EngineFailure
from schemas.operations import SampledSequence, SampleResult, StepResult, TopK, TrainResult
from schemas.proto import tinker_public_pb2 as pb
from schemas.responses import ForwardBackwardOutput, LoadWeightsResult, SampleResponse

PROTO = "application/x-protobuf"
F, I32 = np.float32, np.int32

_arrays = st.sampled_from([(1,), (3,), (2, 1), (3, 2), (1, 5)]).map(
    lambda shape: -np.arange(1, 1 + int(np.prod(shape)), dtype=F).reshape(shape) / 7
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_arrays, max_size=6), st.floats(allow_nan=False, allow_infinity=False))
def test_training_results_round_trip(logprobs: list[np.ndarray[Any, Any]], loss: float) -> None:
    data, kind = encode_result("forward_backward", TrainResult(tuple(logprobs), {"loss:sum": loss}))
    assert kind == PROTO
    read = deserialize_proto_response(data, SdkOutput)
    assert isinstance(read, SdkOutput)
    assert read.metrics == {"loss:sum": loss}
    assert read.loss_fn_output_type == "ArrayRecord"
    assert len(read.loss_fn_outputs) == len(logprobs)
    said = proto_result_to_json("forward_backward", data)
    ForwardBackwardOutput.model_validate(orjson.loads(orjson.dumps(said)))
    for output, text, expected in zip(read.loss_fn_outputs, said["loss_fn_outputs"], logprobs, strict=True):
        assert output["logprobs"].shape == list(expected.shape) == text["logprobs"]["shape"]
        np.testing.assert_array_equal(output["logprobs"].to_numpy(), expected)
        assert text["logprobs"]["data"] == expected.ravel().tolist()


def test_records_offsets_and_counts() -> None:
    outputs = tuple(np.zeros(shape, F) for shape in [(2,), (3,), (2, 4), (1,)])
    message = pb.ForwardBackwardOutput.FromString(encode_result("forward", TrainResult(outputs, {}))[0])
    assert [record.num_datums for record in message.loss_fn_outputs] == [2, 1, 1]
    joined = [record.fields["logprobs"] for record in message.loss_fn_outputs]
    assert np.frombuffer(joined[0].offsets, "<i8").tolist() == [0, 8, 20]
    assert [list(part.trailing_shape) for part in joined] == [[], [4], []]
    assert {part.dtype for part in joined} == {pb.DTYPE_FLOAT32}


def test_non_finite_numbers_in_json_are_words() -> None:
    result = TrainResult((np.array([-np.inf, np.nan, 1], F),), {"loss:sum": float("inf")})
    said = proto_result_to_json("forward", encode_result("forward", result)[0])
    assert said["loss_fn_outputs"][0]["logprobs"]["data"] == ["-Infinity", "NaN", 1.0]
    assert said["metrics"] == {"loss:sum": "Infinity"}


def _sample_result() -> SampleResult:
    top = TopK(np.array([[5, 6], [7, 0]], I32), np.array([[-0.1, -2], [-0.5, np.nan]], F))
    prompt_top = TopK(np.arange(6, dtype=I32).reshape(3, 2), -np.arange(6, dtype=F).reshape(3, 2))
    return SampleResult(
        sequences=(
            SampledSequence(np.array([5, 7], I32), np.array([-0.1, -0.5], F), "stop", top),
            SampledSequence(np.array([9], I32), np.array([-3], F), "length"),
        ),
        prompt_logprobs=np.array([0, -1, np.nan], F),
        topk_prompt_logprobs=prompt_top,
        target_prompt_logprobs=np.array([[-1, np.nan], [np.nan, -2]], F),
        prompt_alt_tokens=TopK(np.array([[1], [2]], I32), np.array([[-1], [-2]], F)),
        prompt_cache_hit_tokens=2,
    )


def test_samples_round_trip() -> None:
    data, kind = encode_result("sample", _sample_result())
    assert kind == PROTO
    read = deserialize_proto_response(data, SdkSample)
    assert isinstance(read, SdkSample)
    first, second = read.sequences
    assert (first.stop_reason, first.tokens, second.stop_reason, second.tokens) == ("stop", [5, 7], "length", [9])
    np.testing.assert_array_equal(first.logprobs_np, np.array([-0.1, -0.5], F))
    assert [[token for token, _ in row or []] for row in first.topk_logprobs or []] == [[5, 6], [7]]
    assert second.topk_logprobs is None
    assert read.prompt_logprobs == [None, -1.0, None]
    assert read.topk_prompt_logprobs is not None
    assert read.topk_prompt_logprobs[0] is None
    assert read.topk_prompt_logprobs[2] == [(4, -4.0), (5, -5.0)]
    assert read.target_prompt_logprobs is not None
    assert read.target_prompt_logprobs.to_numpy().tolist() == [[-1, 0], [0, -2]]
    assert read.prompt_alt_tokens is not None
    assert (read.prompt_alt_tokens.tokens.shape, read.prompt_alt_tokens.tokens.data) == ([2, 1], [1, 2])
    assert read.prompt_cache_hit_tokens == 2


def test_a_sparse_request_gets_a_sparse_answer() -> None:
    asked = np.array([[8, -1], [-1, 9]], np.int64)
    data, _ = encode_result("sample", _sample_result(), sparse_targets=asked)
    read = deserialize_proto_response(data, SdkSample)
    assert isinstance(read, SdkSample)
    target = read.target_prompt_logprobs
    assert target is not None
    assert (target.data, target.shape) == ([-1, -2], [2, 2])
    assert (target.sparse_crow_indices, target.sparse_col_indices) == ([0, 1, 2], [0, 1])
    said = proto_result_to_json("sample", data)["target_prompt_logprobs"]
    assert (said["data"], said["sparse_crow_indices"]) == ([-1, -2], [0, 1, 2])


def test_samples_as_json() -> None:
    said = proto_result_to_json("sample", encode_result("sample", _sample_result())[0])
    SampleResponse.model_validate(orjson.loads(orjson.dumps(said)))
    assert said["prompt_logprobs"] == [None, -1.0, None]
    assert said["topk_prompt_logprobs"][0] is None
    assert said["sequences"][0]["tokens"] == [5, 7]
    assert [[token for token, _ in row] for row in said["sequences"][0]["topk_logprobs"]] == [[5, 6], [7]]
    assert said["prompt_alt_tokens"]["tokens"] == {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}


def test_what_was_not_asked_for_is_absent() -> None:
    result = SampleResult((SampledSequence(np.array([1], I32), np.array([0], F), "stop"),))
    data, _ = encode_result("sample", result)
    read = deserialize_proto_response(data, SdkSample)
    assert isinstance(read, SdkSample)
    assert read.prompt_logprobs is None
    assert read.topk_prompt_logprobs is None
    assert read.target_prompt_logprobs is None
    assert read.prompt_alt_tokens is None
    assert read.sequences[0].logprobs == [0.0]
    assert proto_result_to_json("sample", data).keys() == {"sequences", "prompt_cache_hit_tokens", "type"}


@pytest.mark.parametrize(("tokens", "logprobs"), [([], []), ([1, 2], [0])])
def test_a_broken_sample_is_the_engines_fault(tokens: list[int], logprobs: list[float]) -> None:
    sequence = SampledSequence(np.array(tokens, I32), np.array(logprobs, F), "stop")
    with pytest.raises(EngineFailure):
        encode_result("sample", SampleResult((sequence,)))


def test_small_results_are_json() -> None:
    step = encode_result("optim_step", StepResult({"grad_norm": 1.5, "x": float("nan")}))
    assert step == (b'{"metrics":{"grad_norm":1.5,"x":"NaN"}}', "application/json")
    assert encode_result("zero_grad", None)[0] == b'{"type":"zero_grad"}'
    assert encode_result("load_weights", LoadWeightsResult(path="p"))[0] == b'{"path":"p","type":"load_weights"}'
    with pytest.raises(ValueError, match="save_weights"):
        encode_result("save_weights", None)
