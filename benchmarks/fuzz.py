"""Wild bodies for the decoders: bits flipped, pieces cut out, repeated and mixed, lengths and fields replaced.

    python -m benchmarks fuzz --minutes 10

Each input goes through everything that reads a body before anybody's model is touched: decompression, protobuf and JSON
batches, sparse tensors, the JSON of every other route, the look at a refused body's number, and the form in which an
operation is stored. Only errors of the project's own may leave, with a 4xx status; what is accepted must come back from
its stored form; no input may take long, or leave memory behind. An input that breaks this is written to a file and the
run fails; the same `--seed` makes the same inputs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import zstandard

from app.codec import (
    CodecLimits,
    decode_forward_backward,
    decode_operation,
    decompress,
    encode_operation,
    parse_request,
    peek_identity,
)
from benchmarks.fuzz_changes import Form, changed_bytes, changed_fields
from schemas import requests
from schemas.errors import TinsmithError
from schemas.http.anthropic import MessagesRequest
from schemas.http.base import RequestModel
from schemas.http.openai import ChatCompletionRequest, CompletionRequest
from schemas.proto import tinker_public_pb2 as pb
from tests.app.codec_samples import JSON, PROTO, RUN, datum, sdk_body, tensor

LIMITS = CodecLimits(max_body_bytes=1 << 20, max_tensor_cells=1 << 20, max_datum_tokens=1 << 16)
"""Small, so that what gets past them shows in the memory."""
MOST_SECONDS = 2.0
"""For one input, on a machine that may do much else at the time."""
MOST_MEMORY = 128 << 20
"""Bytes that decoding one input may hold at once: what the limits above allow, several times over."""
GROWTH_MIB = 32
"""How much the process may grow from its first tenth to its end."""
TRACED = 200
"""Every so many-th input is measured by tracemalloc, which makes it slow."""


@dataclass
class Figures:
    """What a run found."""

    inputs: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    most_memory: int = 0
    early_mib: float = 0.0
    late_mib: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A body that is sound, what reads it, and what it is before it is put into a frame, so that fields can change."""

    body: bytes
    read: Callable[[bytes], None]
    form: Form
    frame: zstandard.ZstdCompressor | None = None

    def changed(self, draw: random.Random, other: bytes) -> bytes:
        """The body with one to five bytes, pieces or fields changed."""
        if draw.random() < 0.5:
            body = changed_fields(self.body if self.frame is None else decompress(self.body, LIMITS), self.form, draw)
            return body if self.frame is None else self.frame.compress(body)
        return changed_bytes(self.body, draw, other)


class Broken(Exception):
    """An input did what no input may; `body` is the input."""

    def __init__(self, what: str, body: bytes) -> None:
        super().__init__(what)
        self.body = body


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failure.bin"), help="where an input that fails goes")


def run(given: argparse.Namespace) -> Figures:
    """Fuzz, print a table; exits with 1 at the first input that breaks a rule, and keeps it."""
    try:
        figures = fuzz(60 * given.minutes, given.seed)
    except Broken as broken:
        given.keep.write_bytes(broken.body)
        sys.stderr.write(f"{broken}; the input of {len(broken.body)} bytes is in {given.keep}\n")
        raise SystemExit(1) from broken.__cause__
    sys.stdout.write(table(figures) + "\n")
    return figures


def fuzz(seconds: float, seed: int) -> Figures:
    """Changed inputs for so long. Raises `Broken`."""
    draw = random.Random(seed)
    stock = samples()
    for sample in stock:
        sample.read(sample.body)  # sound as it is
    figures, began, process = Figures(), time.monotonic(), psutil.Process()
    while (elapsed := time.monotonic() - began) < seconds:
        sample = draw.choice(stock)
        body = sample.changed(draw, draw.choice(stock).body)
        _once(sample.read, body, figures, traced=figures.inputs % TRACED == 0)
        if figures.early_mib == 0 and elapsed > seconds / 10:
            gc.collect()
            figures.early_mib = process.memory_info().rss / 2**20
    gc.collect()
    figures.late_mib, figures.seconds = process.memory_info().rss / 2**20, time.monotonic() - began
    if figures.late_mib - figures.early_mib > GROWTH_MIB:
        raise Broken(f"the process grew from {figures.early_mib:.0f} to {figures.late_mib:.0f} MiB", b"")
    return figures


def table(figures: Figures) -> str:
    """The figures as Markdown."""
    rows = [
        ("inputs", f"{figures.inputs:,} in {figures.seconds / 60:.1f} minutes"),
        ("accepted", f"{figures.accepted:,}"),
        *((f"refused as `{code}`", f"{count:,}") for code, count in figures.refused.most_common()),
        ("other exceptions", "0"),
        ("slowest input", f"{1000 * figures.slowest:.0f} ms"),
        ("most memory of one input", f"{figures.most_memory / 2**20:.1f} MiB"),
        ("memory of the process, early and at the end", f"{figures.early_mib:.0f}, {figures.late_mib:.0f} MiB"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _once(read: Callable[[bytes], None], body: bytes, figures: Figures, *, traced: bool) -> None:
    if traced:
        tracemalloc.start()
    began = time.thread_time()
    try:
        read(body)
        figures.accepted += 1
    except TinsmithError as error:
        if not 400 <= error.status < 500:
            raise Broken(f"an input is the server's fault: {error.status} {error.message}", body) from error
        error.message.encode()
        figures.refused[error.code] += 1
    except Exception as error:
        raise Broken(f"{type(error).__name__} left a decoder", body) from error
    took = time.thread_time() - began
    figures.inputs += 1
    figures.slowest = max(figures.slowest, took if not traced else 0.0)
    if took > MOST_SECONDS and not traced:
        raise Broken(f"an input took {took:.1f} s", body)
    if traced:
        figures.most_memory = max(figures.most_memory, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        if figures.most_memory > MOST_MEMORY:
            raise Broken(f"an input held {figures.most_memory / 2**20:.0f} MiB", body)


# -- what is read ------------------------------------------------------------------------------------------------------
def samples() -> Sequence[Sample]:
    """Sound bodies of every kind."""
    return [*_batches(), *_texts(), *_frames()]


def _batches() -> Iterator[Sample]:
    tokens = [5, 6, 7, 8]
    dense = {"target_tokens": tensor(tokens, "int64"), "weights": tensor([1.0, 0.0, 0.5, 1.0], "float32")}
    policy = {
        "target_tokens": tensor(tokens, "int64"),
        "logprobs": tensor([-1.0] * 4, "float32"),
        "advantages": tensor([0.5] * 4, "float32"),
    }
    sparse = pb.ForwardBackwardRequest.FromString(sdk_body([datum(tokens, **dense)]))
    given = sparse.data[0].loss_fn_inputs["weights"]
    given.shape[:] = [4, 3]
    given.sparse_csr.values = np.array([1, 2, 3], "<f4").tobytes()
    given.sparse_csr.crow_indices = np.array([0, 1, 1, 3, 3], "<i8").tobytes()
    given.sparse_csr.col_indices = np.array([2, 0, 1], "<i8").tobytes()
    targets = sparse.data[0].loss_fn_inputs["target_tokens"]
    targets.shape[:] = [4, 3]
    targets.dense = np.arange(12, dtype="<i8").tobytes()
    spans = pb.ForwardBackwardRequest.FromString(sdk_body([datum(tokens, **policy)], "stable_reinforce"))
    for name in ("model_input_spans", "loss_fn_input_spans"):
        span = getattr(spans.data[0], name).add().prompt_tokens
        span.sequence_id, span.length = "s:0:1:0", 4
    bodies = (
        sdk_body([datum(tokens, **dense)] * 3, seq_id=7),
        sdk_body([datum(tokens, **policy)], "ppo", {"clip_high_threshold": 1.2}),
        sparse.SerializeToString(),
        spans.SerializeToString(),
    )
    for body in bodies:
        yield Sample(body, _read_protobuf, "protobuf")
    csr = {"data": [1.0, 2.0], "shape": [4, 1], "sparse_crow_indices": [0, 1, 1, 2, 2], "sparse_col_indices": [0, 0]}
    inputs = {"target_tokens": {"data": [[token] for token in tokens], "dtype": "int64"}, "weights": csr}
    whole = {"model_id": RUN, "seq_id": 3, "data": [{"model_input": tokens, "loss_fn_inputs": inputs}]}
    yield Sample(json.dumps({**whole, "loss_fn": "cross_entropy"}).encode(), _read_json, "json")


def _texts() -> Iterator[Sample]:
    chat = {"model": "a/b", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "n", "target": "sum", "args": [{"ref": "logprobs"}], "kwargs": {}},
        {"op": "output", "name": "o", "target": "output", "args": [{"tuple": [{"ref": "n"}, {"dict": {}}]}]},
    ]
    loss = {"session_id": "s", "custom_loss_seq_id": 0, "name": "l", "inputs": [{"name": "logprobs", "rank": 1}],
            "graph": {"nodes": nodes}}  # fmt: skip
    prompt = {"sampling_session_id": "s", "seq_id": 1, "prompt": [1, 2, 3], "num_samples": 2}
    params = {"max_tokens": 5, "temperature": 0.5, "stop": ["a"], "seed": 123456789012345678901234567890}
    bodies: tuple[tuple[type[RequestModel], dict[str, Any]], ...] = (
        (requests.OptimStepRequest, {"model_id": RUN, "seq_id": 2, "adam_params": {"learning_rate": 1e-4}}),
        (requests.SampleRequest, {**prompt, "sampling_params": params}),
        (requests.CreateModelRequest, {"session_id": "s", "model_seq_id": 0, "base_model": "a/b",
                                       "lora_config": {"rank": 8}, "user_metadata": {"k": "v"}}),
        (requests.LoadWeightsRequest, {"model_id": RUN, "path": f"tinker://{RUN}/weights/x", "optimizer": True}),
        (requests.SessionSearchRequest, {"owner": {"type": "own"}, "statuses": [{"type": "active"}], "limit": 5}),
        (requests.CreateCustomLossRequest, loss),
        (CompletionRequest, {"model": "a/b", "prompt": ["x", "y"], "stop": ["z"], "logprobs": 2}),
        (ChatCompletionRequest, {**chat, "tools": [{"type": "function", "function": {"name": "f"}}]}),
        (MessagesRequest, {**chat, "system": "s", "stop_sequences": ["x"]}),
    )  # fmt: skip
    for model, body in bodies:
        yield Sample(json.dumps(body).encode(), _reader(model), "json")


def _frames() -> Iterator[Sample]:
    body = sdk_body([datum(list(range(500)), target_tokens=tensor(list(range(500)), "int64"))], seq_id=9)
    for options in ({"level": 3}, {"write_content_size": False}, {"write_checksum": True}):
        frame = zstandard.ZstdCompressor(**options)
        yield Sample(frame.compress(body), _read_frame, "protobuf", frame)


def _read_protobuf(body: bytes) -> None:
    peek_identity(body, PROTO)
    _stored(decode_forward_backward(body, PROTO, LIMITS).batch)


def _read_json(body: bytes) -> None:
    peek_identity(body, JSON)
    _stored(decode_forward_backward(body, JSON, LIMITS).batch)


def _read_frame(body: bytes) -> None:
    peek_identity(body, PROTO, "zstd")
    _read_protobuf(decompress(body, LIMITS))


def _stored(batch: Any) -> None:
    kind = "forward_backward" if batch.backward else "forward"
    stored = encode_operation(kind, batch)
    again = encode_operation(kind, decode_operation(kind, stored))
    if again != stored:
        raise AssertionError("what is stored is read back as something else")


def _reader(model: type[RequestModel]) -> Callable[[bytes], None]:
    def read(body: bytes) -> None:
        peek_identity(body, JSON)
        parse_request(body, model).model_dump_json()

    return read
