"""Bodies of `forward_backward` and `forward`, protobuf or JSON, to a validated `TrainBatch`.

Pure functions over bytes, made to run in a thread: the numbers are converted in bulk, never one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError

from app.codec.batch import CUSTOM_LOSS, build_batch, check_count, checked_config, checked_tokens, loss_id_of
from app.codec.json_text import parse_request
from app.codec.limits import CodecLimits
from app.codec.provenance import ProvenanceSpan, SampledRun, sampled_runs
from app.codec.tensors import CellBudget, tensor_from_json, tensor_from_proto
from schemas.errors import InvalidRequest, UnsupportedMediaType
from schemas.http.base import is_identifier
from schemas.http.training import Datum as JsonDatum
from schemas.http.training import ForwardBackwardRequest
from schemas.http.training import ProvenanceSpan as JsonSpan
from schemas.operations import Datum, Int64, TrainBatch
from schemas.proto import tinker_public_pb2 as pb

PROTOBUF = "application/x-protobuf"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class ParsedForwardBackward:
    """A request: `seq_id` None = not given."""

    model_id: str
    seq_id: int | None
    batch: TrainBatch
    forward_only: bool
    loss_id: str | None = None
    """The custom loss that the batch names; its graph and the check of its inputs are still missing."""
    sampled: tuple[tuple[SampledRun, ...], ...] = ()
    """For a loss that compares with the sampler: which targets of each datum were sampled, where it says so."""


def decode_forward_backward(
    body: bytes, content_type: str, limits: CodecLimits | None = None, *, forward: bool = False
) -> ParsedForwardBackward:
    """A body that `read_body` returned.

    Args:
        content_type: the header of that name; protobuf and JSON are read.
        forward: the route is `forward`, so that no gradient is wanted whatever the body says by default.

    Raises:
        UnsupportedMediaType: another content type.
        InvalidRequest: naming the field, its value and what is accepted.
    """
    limits = limits or CodecLimits()
    kind = media_type(content_type)
    if kind == PROTOBUF:
        return _from_proto(body, limits, forward)
    if kind == JSON:
        return _from_json(body, limits, forward)
    raise UnsupportedMediaType(
        f"Content-Type {kind[:64]!r} is not read here; send {PROTOBUF} or {JSON}", field="Content-Type"
    )


def media_type(content_type: str | None) -> str:
    """`Application/JSON; charset=utf-8` -> `application/json`."""
    return (content_type or "").partition(";")[0].strip().lower()


def _from_proto(body: bytes, limits: CodecLimits, forward: bool) -> ParsedForwardBackward:
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise InvalidRequest(
            "the body is not a ForwardBackwardRequest in protobuf: it is cut off or of another kind",
            code="invalid_protobuf",
        ) from None
    _refuse_unknown_fields(message)
    if not is_identifier(message.model_id):
        raise InvalidRequest(f"model_id {message.model_id[:64]!r} is no id of a model", field="model_id")
    if message.seq_id < 0:
        raise InvalidRequest(f"seq_id is {message.seq_id}; it counts from 1 (0 = not given)", field="seq_id")
    config = _proto_config(message)
    checked_config(message.loss_fn, config)
    check_count(len(message.data), limits)
    budget = CellBudget(limits.max_tensor_cells)
    datums = [_proto_datum(datum, f"data[{i}]", limits, budget) for i, datum in enumerate(message.data)]
    forward_only = forward or message.forward_only
    batch = build_batch(message.model_id, datums, message.loss_fn, config, forward_only=forward_only)
    spans = [(_proto_spans(datum.model_input_spans), _proto_spans(datum.loss_fn_input_spans)) for datum in message.data]
    return ParsedForwardBackward(
        message.model_id,
        message.seq_id or None,
        batch,
        forward_only,
        _loss_id(batch, config),
        _sampled_runs(batch, spans),
    )


def _refuse_unknown_fields(message: Any) -> None:
    """A newer client's field might change what it wants, so it is refused and not dropped."""
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        raise InvalidRequest(
            "the body holds protobuf fields that this server does not know",
            code="unknown_field",
            hint="use a client version that this server supports",
        )


def _proto_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Clients write numbers into both maps, text only into the second, which therefore rules when it is not empty."""
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    config: dict[str, float | str] = {}
    for name, value in message.loss_fn_config_v2.items():
        which = value.WhichOneof("value")
        if which is None:
            field = f"loss_fn_config.{name[:64]}"
            raise InvalidRequest(f"{field} has no value; a number is due", field=field)
        config[name] = value.number if which == "number" else value.text
    return config


def _proto_datum(datum: pb.Datum, where: str, limits: CodecLimits, budget: CellBudget) -> Datum:
    tokens = checked_tokens(_proto_tokens(datum.model_input, where), f"{where}.model_input", limits)
    inputs = {
        name: tensor_from_proto(tensor, f"{where}.loss_fn_inputs.{name[:64]}", budget)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return Datum(tokens, inputs)


def _loss_id(batch: TrainBatch, config: Mapping[str, float | str]) -> str | None:
    return loss_id_of(config) if batch.loss_fn == CUSTOM_LOSS else None


def _sampled_runs(
    batch: TrainBatch, spans: Sequence[tuple[list[ProvenanceSpan], list[ProvenanceSpan]]]
) -> tuple[tuple[SampledRun, ...], ...]:
    """For `stable_reinforce`; to every other loss spans are a record of where the tokens came from that changes no
    number, so they are accepted and not looked at."""
    if batch.loss_fn != "stable_reinforce" or not any(one or other for one, other in spans):
        return ()
    datums = enumerate(zip(batch.datums, spans, strict=True))
    return tuple(sampled_runs(*pair, datum.tokens.size, f"data[{i}]") for i, (datum, pair) in datums)


def _proto_spans(spans: Sequence[pb.ProvenanceSpan]) -> list[ProvenanceSpan]:
    read = []
    for span in spans:
        sampled = span.WhichOneof("span") == "sampled_tokens"
        arm = span.sampled_tokens if sampled else span.prompt_tokens
        kind: Literal["sampled_tokens", "prompt_tokens"] = "sampled_tokens" if sampled else "prompt_tokens"
        read.append(ProvenanceSpan(kind, arm.sequence_id, arm.offset, arm.length))
    return read


def _json_spans(spans: Sequence[JsonSpan] | None) -> list[ProvenanceSpan]:
    return [ProvenanceSpan(span.type, span.sequence_id, span.offset, span.length) for span in spans or ()]


def _proto_tokens(chunks: Sequence[pb.Chunk], where: str) -> Int64:
    parts: list[bytes] = []
    for i, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        field = f"{where}.model_input.chunks[{i}]"
        if kind != "encoded_text":
            raise InvalidRequest(
                f"{field} is of type {kind or 'none'}; this server is text-only and reads encoded_text", field=field
            )
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise InvalidRequest(
                f"{field}.tokens has {len(data)} bytes, which is no multiple of 4 (int32)", field=field
            )
        parts.append(data)
    return np.frombuffer(b"".join(parts), "<i4").astype(np.int64)


def _from_json(body: bytes, limits: CodecLimits, forward: bool) -> ParsedForwardBackward:
    request = parse_request(body, ForwardBackwardRequest)
    nested = request.forward_backward_input or request.forward_input
    data = (nested.data if nested else request.data or request.datums) or []
    loss_fn = (nested.loss_fn if nested else request.loss_fn) or ""
    config = (nested.loss_fn_config if nested else request.loss_fn_config) or {}
    if forward and (request.forward_only is False or request.type == "forward_backward"):
        raise InvalidRequest("this is the route of forward, but the body asks for gradients", field="forward_only")
    forward_only = forward or bool(request.forward_only) or request.type == "forward"
    forward_only = forward_only or request.forward_input is not None
    checked_config(loss_fn, config)
    check_count(len(data), limits)
    budget = CellBudget(limits.max_tensor_cells)
    datums = [_json_datum(datum, f"data[{i}]", limits, budget) for i, datum in enumerate(data)]
    batch = build_batch(request.model_id, datums, loss_fn, config, forward_only=forward_only)
    spans = [(_json_spans(datum.model_input_spans), _json_spans(datum.loss_fn_input_spans)) for datum in data]
    return ParsedForwardBackward(
        request.model_id, request.seq_id, batch, forward_only, _loss_id(batch, config), _sampled_runs(batch, spans)
    )


def _json_datum(datum: JsonDatum, where: str, limits: CodecLimits, budget: CellBudget) -> Datum:
    tokens = np.concatenate([np.array(chunk.tokens, dtype=np.int64) for chunk in datum.model_input.chunks])
    inputs = {
        name: tensor_from_json(tensor, f"{where}.loss_fn_inputs.{name[:64]}", budget)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return Datum(checked_tokens(tokens, f"{where}.model_input", limits), inputs)
