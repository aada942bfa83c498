"""The canonical stored form of operations: protobuf for training batches, JSON for the rest, never pickle.

The same request always gives the same bytes, whatever wire form, map order or compression it came in: that is what a
repeat is recognised by. Not responsible for where the bytes are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from app.codec.json_text import canonical_json
from schemas.http.base import JSON, RequestModel
from schemas.operations import (
    CreateModel,
    Datum,
    DimuonStepParams,
    LoadWeights,
    LoraSpec,
    Operation,
    OptimStep,
    OptimStepParams,
    Sample,
    SamplingParams,
    SaveWeights,
    TrainBatch,
    ZeroGrad,
)
from schemas.proto import tinker_public_pb2 as pb

Fields = dict[str, Any]

_GRAPH = "graph"
"""Where a stored batch keeps the graph of its custom loss: it can then run whatever becomes of the loss."""


def digest(data: bytes) -> str:
    """SHA-256 of a canonical form, in hex."""
    return hashlib.sha256(data).hexdigest()


def encode_request(request: RequestModel) -> bytes:
    """Canonical JSON of what a client asked for, without the seq_id that it is compared under. Only to be digested:
    it may hold an access token."""
    return canonical_json(request.model_dump(exclude={"seq_id"}, exclude_none=True))


def encode_operation(kind: str, payload: Operation, context: Mapping[str, JSON] | None = None) -> bytes:
    """The bytes to store.

    Args:
        kind: what the operation log calls it; one kind of payload each time it is used.
        context: what finishing the operation needs beside it (a checkpoint's name, say); none for a training batch.
    """
    if isinstance(payload, TrainBatch):
        if context:
            raise ValueError("a training batch is stored as protobuf, which has no room for a context")
        return _batch_to_proto(payload)
    name = type(payload).__name__
    return canonical_json({"kind": kind, "operation": {"is": name, **_dump(payload)}, "context": dict(context or {})})


def decode_operation(kind: str, data: bytes) -> Operation:
    """The inverse of `encode_operation`. Raises ValueError if the bytes are of another kind."""
    if not data.startswith(b"{"):
        return _batch_from_proto(data)
    stored = _load(kind, data)["operation"]
    return _READERS[stored.pop("is")](stored)


def decode_context(kind: str, data: bytes) -> dict[str, JSON]:
    """The context that was stored with an operation."""
    if not data.startswith(b"{"):
        return {}
    context: dict[str, JSON] = _load(kind, data)["context"]
    return context


def _load(kind: str, data: bytes) -> Fields:
    stored: Fields = json.loads(data)  # and not orjson: a seed may be larger than 64 bits
    if stored["kind"] != kind:
        raise ValueError(f"stored as {stored['kind']!r}, read as {kind!r}")
    return stored


def _dump(payload: Operation) -> Fields:
    fields = asdict(payload)
    for name in ("prompt", "target_prompt_logprobs"):
        if isinstance(fields.get(name), np.ndarray):
            fields[name] = fields[name].tolist()
    return fields


def _read_sample(fields: Fields) -> Sample:
    params = fields.pop("params")
    stop = params.pop("stop")
    targets = fields.pop("target_prompt_logprobs")
    return Sample(
        prompt=np.array(fields.pop("prompt"), dtype=np.int64),
        params=SamplingParams(**params, stop=None if stop is None else tuple(stop)),
        target_prompt_logprobs=None if targets is None else np.array(targets, dtype=np.int64),
        **fields,
    )


def _read_optim_step(fields: Fields) -> OptimStep:
    params = fields["params"]
    if "beta1" in params:
        return OptimStep(DimuonStepParams(**params), fields["grad_clip_norm"])
    betas = params.pop("betas")
    given = OptimStepParams(**params, betas=None if betas is None else (betas[0], betas[1]))
    return OptimStep(given, fields["grad_clip_norm"])


_READERS: Mapping[str, Callable[[Fields], Operation]] = {
    "CreateModel": lambda fields: CreateModel(LoraSpec(**fields["lora"]), fields["optimizer"]),
    "LoadWeights": lambda fields: LoadWeights(**fields),
    "OptimStep": _read_optim_step,
    "ZeroGrad": lambda fields: ZeroGrad(),
    "SaveWeights": lambda fields: SaveWeights(**fields),
    "Sample": _read_sample,
}


def _batch_to_proto(batch: TrainBatch) -> bytes:
    message = pb.ForwardBackwardRequest(
        model_id=batch.adapter_id, loss_fn=batch.loss_fn, forward_only=not batch.backward
    )
    for name, value in batch.loss_config.items():
        message.loss_fn_config[name] = value
    if batch.loss_graph is not None:
        message.loss_fn_config_v2[_GRAPH].text = batch.loss_graph
    for datum in batch.datums:
        stored = message.data.add()
        stored.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
        for name, values in datum.inputs.items():
            integers = values.dtype.kind == "i"
            tensor = stored.loss_fn_inputs[name]
            tensor.dense = values.astype("<i8" if integers else "<f4", copy=False).tobytes()
            tensor.dtype = pb.DTYPE_INT64 if integers else pb.DTYPE_FLOAT32
            tensor.shape.extend(values.shape)
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def _batch_from_proto(data: bytes) -> TrainBatch:
    message = pb.ForwardBackwardRequest.FromString(data)
    return TrainBatch(
        message.model_id,
        tuple(_datum_from_proto(datum) for datum in message.data),
        message.loss_fn,
        dict(message.loss_fn_config),
        backward=not message.forward_only,
        loss_graph=message.loss_fn_config_v2[_GRAPH].text if _GRAPH in message.loss_fn_config_v2 else None,
    )


def _datum_from_proto(datum: pb.Datum) -> Datum:
    inputs = {}
    for name, tensor in datum.loss_fn_inputs.items():
        stored, native = ("<i8", np.int64) if tensor.dtype == pb.DTYPE_INT64 else ("<f4", np.float32)
        inputs[name] = np.frombuffer(tensor.dense, stored).astype(native).reshape(tensor.shape)
    tokens = np.frombuffer(datum.model_input[0].encoded_text.tokens, "<i4").astype(np.int64)
    return Datum(tokens, inputs)
