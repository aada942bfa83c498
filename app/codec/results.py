"""Results to bytes, in the form in which they are stored and delivered: protobuf for training and sampling results,
JSON for the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from app.codec.forward_backward import JSON, PROTOBUF
from schemas.errors import EngineFailure
from schemas.http.base import ResponseModel
from schemas.http.training import OptimStepResult, ZeroGradResult
from schemas.operations import (
    Float32,
    Int64,
    OperationResult,
    SampledSequence,
    SampleResult,
    SavedAdapter,
    StepResult,
    TopK,
    TrainResult,
)
from schemas.proto import tinker_public_pb2 as pb

RECORD_TYPE = "ArrayRecord"
EMPTY_LOGPROB = -99999.0
"""Of a top-k cell that holds nothing (its id is 0)."""

_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}


def encode_result(
    kind: str, result: OperationResult | ResponseModel, *, sparse_targets: Int64 | None = None
) -> tuple[bytes, str]:
    """The bytes of a result and their content type.

    Args:
        kind: the kind of the operation, for messages, and to tell the results of those that return nothing.
        result: what the engine returned, or the model of a result that the server puts together itself.
        sparse_targets: the dense `target_prompt_logprobs` of a sample that asked for them in CSR form (-1 = cell not
            listed): the answer then has the same layout.

    Raises:
        EngineFailure: the parts of the result do not fit together.
        ValueError: a result that has no form of its own (a saved adapter: the server says where it is).
    """
    if isinstance(result, TrainResult):
        return _train_result(result), PROTOBUF
    if isinstance(result, SampleResult):
        return _sample_result(result, sparse_targets), PROTOBUF
    if isinstance(result, StepResult):
        result = OptimStepResult(metrics={name: float(value) for name, value in result.metrics.items()})
    elif result is None and kind == "zero_grad":
        result = ZeroGradResult()
    if result is None or isinstance(result, SavedAdapter):
        raise ValueError(f"a result of {kind} is put together by its service as a model from schemas/responses.py")
    return result.model_dump_json(exclude_none=True).encode(), JSON


def _train_result(result: TrainResult) -> bytes:
    """Neighbouring datums whose outputs differ in their first dimension only share a record."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type=RECORD_TYPE)
    for name, value in result.metrics.items():
        message.metrics[name] = float(value)
    for trailing, group in groupby(result.logprobs, key=lambda values: values.shape[1:]):
        outputs = list(group)
        record = message.loss_fn_outputs.add(type_tag=RECORD_TYPE, num_datums=len(outputs))
        _join(record.fields["logprobs"], outputs, trailing)
    return _bytes_of(message)


def _join(joined: pb.BatchedTensor, outputs: Sequence[Float32], trailing: tuple[int, ...]) -> None:
    flat = [np.ascontiguousarray(values, dtype="<f4").tobytes() for values in outputs]
    joined.data = b"".join(flat)
    joined.offsets = np.cumsum([0, *map(len, flat)], dtype="<i8").tobytes()
    joined.dtype = pb.DTYPE_FLOAT32
    joined.trailing_shape.extend(trailing)


def _sample_result(result: SampleResult, sparse_targets: Int64 | None) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        _sequence(message.sequences.add(), sequence)
    if result.prompt_logprobs is not None:
        scores = np.array(result.prompt_logprobs, dtype="<f4")
        scores[:1] = np.nan  # nothing comes before the first token
        message.prompt_logprobs = scores.tobytes()
    if result.topk_prompt_logprobs is not None:
        _topk(message.topk_prompt_logprobs, result.topk_prompt_logprobs, first_is_empty=True)
    if result.target_prompt_logprobs is not None:
        _targets(message.target_prompt_logprobs, result.target_prompt_logprobs, sparse_targets)
    if result.prompt_alt_tokens is not None:
        _dense(message.prompt_alt_tokens.tokens, result.prompt_alt_tokens.ids, pb.DTYPE_INT32, "<i4")
        _dense(message.prompt_alt_tokens.logprobs, result.prompt_alt_tokens.logprobs, pb.DTYPE_FLOAT32, "<f4")
    return _bytes_of(message)


def _sequence(message: pb.SampledSequence, sequence: SampledSequence) -> None:
    if sequence.tokens.shape != sequence.logprobs.shape or sequence.tokens.size == 0:
        raise EngineFailure(
            f"a sample has {sequence.tokens.size} tokens and {sequence.logprobs.size} logprobs; "
            "it must have as many of each, and at least one"
        )
    message.stop_reason = _STOP_REASONS[sequence.stop_reason]
    message.tokens = sequence.tokens.astype("<i4").tobytes()
    message.logprobs = sequence.logprobs.astype("<f4").tobytes()
    if sequence.topk is not None:
        _topk(message.topk_sampled_logprobs, sequence.topk)


def _topk(message: pb.TopkLogprobs, topk: TopK, *, first_is_empty: bool = False) -> None:
    """A cell without a logprob (NaN) is written as an empty one."""
    ids, logprobs = np.array(topk.ids, dtype="<i4"), np.array(topk.logprobs, dtype="<f4")
    empty = np.isnan(logprobs)
    if first_is_empty:
        empty[:1] = True
    ids[empty], logprobs[empty] = 0, EMPTY_LOGPROB
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.length, message.k = ids.shape


def _targets(message: pb.Tensor, scores: Float32, sparse: Int64 | None) -> None:
    """Float32 [L-1, K]; cells that were not asked for are 0, or not listed if the request was sparse."""
    if sparse is None:
        _dense(message, np.nan_to_num(scores, nan=0.0, posinf=np.inf, neginf=-np.inf), pb.DTYPE_FLOAT32, "<f4")
        return
    listed = sparse >= 0
    message.sparse_csr.values = scores[listed].astype("<f4").tobytes()
    message.sparse_csr.crow_indices = np.cumsum([0, *listed.sum(axis=1)], dtype="<i8").tobytes()
    message.sparse_csr.col_indices = np.nonzero(listed)[1].astype("<i8").tobytes()
    message.dtype = pb.DTYPE_FLOAT32
    message.shape.extend(sparse.shape)


def _dense(message: pb.Tensor, values: NDArray[np.float32] | NDArray[np.int32], dtype: pb.DType, packed: str) -> None:
    message.dense = values.astype(packed).tobytes()
    message.dtype = dtype
    message.shape.extend(values.shape)


def _bytes_of(message: pb.ForwardBackwardOutput | pb.SampleResponse) -> bytes:
    data: bytes = message.SerializeToString(deterministic=True)
    return data
