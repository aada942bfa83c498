"""Whatever the bytes are: a batch, or a TinsmithError with a 4xx status. Never another exception, never much memory."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from app.codec import (
    BodyTooLarge,
    CodecLimits,
    decode_forward_backward,
    decompress,
    encode_operation,
    parse_json,
    parse_request,
    peek_identity,
)
from schemas.errors import InvalidRequest, TinsmithError
from schemas.requests import OptimStepRequest, SampleRequest
from tests.app.codec_samples import JSON, PROTO, RUN, datum, sdk_body, simple_body, tensor

JSON_BODY = orjson.dumps(
    {
        "model_id": RUN,
        "seq_id": 12,
        "data": [{"model_input": [1, 2], "loss_fn_inputs": {"target_tokens": {"data": [1, 2], "dtype": "int64"}}}],
        "loss_fn": "cross_entropy",
    }
)
PROTO_BODY = sdk_body(
    [datum([1, 2], target_tokens=tensor([1, 2], "int64"), weights=tensor([0.5, 1], "float32"))], seq_id=12
)


def _survives(body: bytes, content_type: str) -> None:
    refused: TinsmithError | None = None
    try:
        parsed = decode_forward_backward(body, content_type)
        encode_operation("forward_backward", parsed.batch)
    except TinsmithError as error:
        refused = error
    if refused is not None:
        assert 400 <= refused.status < 500
        refused.message.encode()
    for encoding in (None, "zstd"):
        peek_identity(body, content_type, encoding)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from([PROTO, JSON, "", "text/html", "application/json;;"]))
def test_random_bytes(body: bytes, content_type: str) -> None:
    _survives(body, content_type)


@pytest.mark.parametrize(("body", "content_type"), [(PROTO_BODY, PROTO), (JSON_BODY, JSON)])
def test_cut_off_at_every_byte(body: bytes, content_type: str) -> None:
    decode_forward_backward(body, content_type)
    for end in range(len(body)):
        _survives(body[:end], content_type)


@pytest.mark.parametrize(("body", "content_type"), [(PROTO_BODY, JSON), (JSON_BODY, PROTO)])
def test_the_wrong_content_type(body: bytes, content_type: str) -> None:
    with pytest.raises(TinsmithError):
        decode_forward_backward(body, content_type)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_changed_bytes(data: st.DataObject) -> None:
    body, content_type = data.draw(st.sampled_from([(PROTO_BODY, PROTO), (JSON_BODY, JSON)]))
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    _survives(bytes(changed), content_type)


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["model_input", "target_tokens", "data", "loss_fn_config", "seq_id", "weights"]), _json_values)
def test_any_json_value_in_any_place(place: str, value: Any) -> None:
    inputs = {"target_tokens": [1, 2]}
    one: dict[str, Any] = {"model_input": [1, 2], "loss_fn_inputs": inputs}
    body: dict[str, Any] = {"model_id": RUN, "data": [one], "loss_fn": "cross_entropy"}
    target: dict[str, Any] = one if place == "model_input" else inputs if "t" in place[-7:] else body
    target[place] = value
    _survives(json.dumps(body).encode(), JSON)


HOSTILE_JSON = [
    b"[" * 1000 + b"]" * 1000,
    b"[" * 100_000,
    b'{"a":' * 1000 + b"1" + b"}" * 1000,
    b'{"model_id":"a","model_id":"b"}',
    b'{"model_id":"a","x":{"k":1,"k":2}}',
    b'{"model_id":"a","lr":[1,{"k":1,"k":2}]}',
    b'{"model_id":"a","lr":NaN}',
    b'{"model_id":"a","lr":-Infinity}',
    b'{"model_id":"a","lr":1e999}',
    b'{"model_id":"a","seq_id":' + b"9" * 5000 + b"}",
    b'{"model_id":"a","seq_id":123456789012345678901234567890}',
    b'{"model_id":"\\ud800"}',
    b'{"model_id":"\xff"}',
    b'\xff\xfe{\x00"\x00',
    b"null",
    b"3",
    b'"text"',
    b"",
    b"{} {}",
    b"{'a': 1}",
]


@pytest.mark.parametrize("body", HOSTILE_JSON)
def test_hostile_json(body: bytes) -> None:
    for model in (OptimStepRequest, SampleRequest):
        with pytest.raises(InvalidRequest) as caught:
            parse_request(body, model)
        caught.value.message.encode()
    _survives(body, JSON)


def test_repeated_keys_are_named_and_integers_are_exact() -> None:
    with pytest.raises(InvalidRequest, match="'k' is given twice"):
        parse_json(b'{"a": [{"j": 0, "k": "\\"k\\": 1", "k" : 2}]}')
    assert parse_json(b'{"a": [1, {"k": "k\\":"}], "seed": 1234567890123456789012}') == {
        "a": [1, {"k": 'k":'}],
        "seed": 1234567890123456789012,
    }


def test_a_flood_of_strings_is_refused_before_it_costs_time() -> None:
    with pytest.raises(InvalidRequest, match="strings"):
        parse_json(b"[" + b",".join([b'""'] * 600_000) + b"]")


def test_a_zstd_bomb_is_stopped_early() -> None:
    limits = CodecLimits(max_body_bytes=1_000_000)
    zeros = bytes(50_000_000)
    with_size = zstandard.ZstdCompressor().compress(zeros)
    without = zstandard.ZstdCompressor(write_content_size=False).compress(zeros)
    for bomb in (with_size, without):
        with pytest.raises(BodyTooLarge) as caught:
            decompress(bomb, limits)
        assert caught.value.prefix == bomb[: 64 * 1024]


def test_zstd_frames() -> None:
    limits = CodecLimits()
    for options in ({}, {"write_content_size": False}, {"write_checksum": True}):
        frame = zstandard.ZstdCompressor(**options).compress(PROTO_BODY)
        assert decompress(frame, limits) == PROTO_BODY
        for broken in (frame[:-1], frame + b"x", frame + frame, frame[1:], b"", PROTO_BODY):
            with pytest.raises(InvalidRequest, match="zstd"):
                decompress(broken, limits)
    big = zstandard.ZstdCompressor().compress(bytes(range(256)) * 20_000)
    assert decompress(big, limits) == bytes(range(256)) * 20_000


@pytest.mark.parametrize("extra", [b"", b"\x00"])
def test_whose_a_refused_body_was(extra: bytes) -> None:
    assert peek_identity(PROTO_BODY[:30] + extra, PROTO) == (RUN, 12)
    assert peek_identity(JSON_BODY[:40] + extra, JSON + "; charset=utf-8") == (RUN, 12)
    assert peek_identity(JSON_BODY + extra, JSON) == (RUN, 12)
    big = sdk_body([datum(list(range(5000)), target_tokens=tensor([1] * 5000, "int64"))], seq_id=7)
    frame = zstandard.ZstdCompressor().compress(big)
    assert peek_identity(frame, PROTO, "zstd") == (RUN, 7)
    # Of a frame that is cut off, whole blocks can be read.
    noisy = sdk_body([datum([(i * 7919) % 99991 for i in range(200_000)])], seq_id=7)
    assert peek_identity(zstandard.ZstdCompressor().compress(noisy)[:400_000], PROTO, "zstd") in ((RUN, 7), None)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (simple_body()[:10], PROTO),
        (b"", PROTO),
        (sdk_body([], seq_id=None), PROTO),
        (b'{"seq_id": 1}', JSON),
        (b'{"model_id": "a", "seq_id": 0}', JSON),
        (b'{"model_id": "a", "seq_id": true}', JSON),
        (b'{"model_id": "a/b", "seq_id": 1}', JSON),
        (b"[1]", JSON),
        (JSON_BODY, "text/plain"),
    ],
)
def test_a_body_that_does_not_tell_whose_it_is(body: bytes, content_type: str) -> None:
    assert peek_identity(body, content_type) is None
