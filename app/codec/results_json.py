"""Stored protobuf results to JSON, for clients that do not ask for protobuf.

The shapes are `ForwardBackwardOutput` and `SampleResponse` in `schemas/responses.py`. What was not computed is null;
a number that is not finite is the string "NaN", "Infinity" or "-Infinity", since JSON has no word for it.
"""

from __future__ import annotations

from math import isfinite, isnan
from typing import Any

import numpy as np

from app.codec.results import EMPTY_LOGPROB
from schemas.proto import tinker_public_pb2 as pb

Json = dict[str, Any]

_PACKED = {pb.DTYPE_FLOAT32: "<f4", pb.DTYPE_INT64: "<i8", pb.DTYPE_INT32: "<i4"}


def proto_result_to_json(kind: str, data: bytes) -> Json:
    """The JSON object of a result that `encode_result` wrote as protobuf; `kind` is that of the operation."""
    if kind in ("sample", "asample"):
        return _sample(pb.SampleResponse.FromString(data))
    return _train(pb.ForwardBackwardOutput.FromString(data))


def _train(message: pb.ForwardBackwardOutput) -> Json:
    outputs: list[Json] = []
    for record in message.loss_fn_outputs:
        columns = {name: _split(joined) for name, joined in record.fields.items()}
        outputs.extend({name: column[i] for name, column in columns.items()} for i in range(record.num_datums))
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": {name: _number(value) for name, value in sorted(message.metrics.items())},
    }


def _split(joined: pb.BatchedTensor) -> list[Json]:
    values = np.frombuffer(joined.data, _PACKED[joined.dtype])
    ends = np.frombuffer(joined.offsets, "<i8") // values.itemsize
    trailing = tuple(joined.trailing_shape)
    parts = [values[ends[i] : ends[i + 1]] for i in range(len(ends) - 1)]
    return [_tensor(part.reshape(part.size // int(np.prod(trailing)), *trailing)) for part in parts]


def _tensor(values: np.ndarray[Any, Any]) -> Json:
    dtype = "int64" if values.dtype.kind == "i" else "float32"
    return {"data": _numbers(values), "dtype": dtype, "shape": list(values.shape)}


def _sample(message: pb.SampleResponse) -> Json:
    result: Json = {
        "sequences": [_sequence(sequence) for sequence in message.sequences],
        "prompt_cache_hit_tokens": message.prompt_cache_hit_tokens,
        "type": "sample",
    }
    if message.HasField("prompt_logprobs"):
        scores = np.frombuffer(message.prompt_logprobs, "<f4").tolist()
        result["prompt_logprobs"] = [None if isnan(score) else _number(score) for score in scores]
    if message.HasField("topk_prompt_logprobs"):
        result["topk_prompt_logprobs"] = _topk(message.topk_prompt_logprobs)
    if message.HasField("target_prompt_logprobs"):
        result["target_prompt_logprobs"] = _proto_tensor(message.target_prompt_logprobs)
    if message.HasField("prompt_alt_tokens"):
        result["prompt_alt_tokens"] = {
            "tokens": _proto_tensor(message.prompt_alt_tokens.tokens),
            "logprobs": _proto_tensor(message.prompt_alt_tokens.logprobs),
        }
    return result


def _sequence(sequence: pb.SampledSequence) -> Json:
    found: Json = {
        "stop_reason": "length" if sequence.stop_reason == pb.STOP_REASON_LENGTH else "stop",
        "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
        "logprobs": _numbers(np.frombuffer(sequence.logprobs, "<f4")),
    }
    if sequence.HasField("topk_sampled_logprobs"):
        found["topk_logprobs"] = _topk(sequence.topk_sampled_logprobs)
    return found


def _topk(topk: pb.TopkLogprobs) -> list[list[tuple[int, float | str]] | None]:
    ids = np.frombuffer(topk.token_ids, "<i4").reshape(topk.length, topk.k).tolist()
    logprobs = np.frombuffer(topk.logprobs, "<f4").reshape(topk.length, topk.k).tolist()
    rows: list[list[tuple[int, float | str]] | None] = []
    for row_ids, row_logprobs in zip(ids, logprobs, strict=True):
        cells = [
            (token, _number(score))
            for token, score in zip(row_ids, row_logprobs, strict=True)
            if (token, score) != (0, EMPTY_LOGPROB)
        ]
        rows.append(cells or None)
    return rows


def _proto_tensor(tensor: pb.Tensor) -> Json:
    packed = _PACKED[tensor.dtype]
    if tensor.WhichOneof("encoding") != "sparse_csr":
        return _tensor(np.frombuffer(tensor.dense, packed).reshape(tuple(tensor.shape)))
    csr = tensor.sparse_csr
    found = _tensor(np.frombuffer(csr.values, packed))
    found["shape"] = list(tensor.shape)
    found["sparse_crow_indices"] = np.frombuffer(csr.crow_indices, "<i8").tolist()
    found["sparse_col_indices"] = np.frombuffer(csr.col_indices, "<i8").tolist()
    return found


def _numbers(values: np.ndarray[Any, Any]) -> list[float | int | str]:
    flat: list[float | int | str] = values.ravel().tolist()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return [_number(float(value)) for value in flat]
    return flat


def _number(value: float) -> float | str:
    if isfinite(value):
        return value
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
