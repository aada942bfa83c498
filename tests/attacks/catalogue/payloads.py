"""Bodies that are not what they say: broken, cut off, too large, nested, compressed twice, of another type."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import partial

import zstandard

from schemas.proto import tinker_public_pb2 as pb
from tests.attacks.catalogue.case import JSON, PROTOBUF, Case, Targets

ZSTD = {"Content-Encoding": "zstd"}
SMALL = ("optim_step", "create_session", "create_model", "asample", "retrieve_future", "save_weights", "load_weights")
TRAINING = {
    "model_id": "$model",
    "data": [{"model_input": [5, 6], "loss_fn_inputs": {"target_tokens": [6, 7]}}],
    "loss_fn": "cross_entropy",
}

TEXTS = {
    "nothing": b"",
    "half an object": b'{"model_id": "$model"',
    "an object twice": b"{} {}",
    "null": b"null",
    "a number": b"5",
    "a text": b'"text"',
    "a list": b"[1]",
    "single quotes": b"{'model_id': '$model'}",
    "a comment": b'{"model_id": "$model" /* */}',
    "a comma at the end": b'{"model_id": "$model",}',
    "NaN": b'{"model_id": "$model", "x": NaN}',
    "an infinite number": b'{"model_id": "$model", "x": -Infinity}',
    "a number beyond doubles": b'{"model_id": "$model", "x": 1e999}',
    "an integer of 5,000 digits": b'{"model_id": "$model", "x": ' + b"9" * 5000 + b"}",
    "a lone surrogate": b'{"model_id": "\\ud800"}',
    "bytes that are no UTF-8": b'{"model_id": "\xff\xfe"}',
    "an overlong encoding": b'{"model_id": "\xc0\xae"}',
    "UTF-16": '{"model_id": "x"}'.encode("utf-16"),
    "a byte-order mark": b"\xef\xbb\xbf{}x",
    "a raw line break in a text": b'{"model_id": "a\nb"}',
    "a key twice": b'{"model_id": "$model", "model_id": "other"}',
    "a key twice, once escaped": b'{"model_id": "$model", "model\\u005fid": "other"}',
    "a thousand lists in each other": b'{"model_id": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    "a hundred thousand open lists": b"[" * 100_000,
    "a thousand objects in each other": b'{"a":' * 1000 + b"1" + b"}" * 1000,
    "two thousand keys": json.dumps({f"k{i}": 0 for i in range(2000)}).encode(),
    "an unknown field": b'{"model_id": "$model", "admin": true}',
    "a field of the interpreter": b'{"model_id": "$model", "__class__": "x"}',
    "protobuf": b"\x0a\x05abcde",
    "a page": b"<html><script>alert(1)</script></html>",
    "YAML that makes objects": b"!!python/object/apply:os.system ['id']",
    "a pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
}


def cases() -> Iterator[Case]:
    """Every broken text at several routes, and what a body can be besides."""
    for what, text in TEXTS.items():
        for route in SMALL:
            if what == "nothing" and route == "create_session":
                continue
            yield Case(f"{what} as body of {route}", route, content=text)
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/html",
        "*",
    ):
        for route in (*SMALL, "forward_backward", "create_custom_loss"):
            headers = {"Content-Type": kind}
            yield Case(f"{kind} at {route}", route, content=b"{}", headers=headers, status=(415,), field="Content-Type")
    yield from _protobuf()
    yield from _encodings()
    yield from _sizes()
    yield from _queries()


def _whole(targets: Targets) -> bytes:
    """A sound batch."""
    whole = pb.ForwardBackwardRequest(model_id=targets.model, loss_fn="cross_entropy")
    datum = whole.data.add()
    datum.model_input.add().encoded_text.tokens = b"\x05\0\0\0\x06\0\0\0"
    target = datum.loss_fn_inputs["target_tokens"]
    target.dtype, target.dense = pb.DTYPE_INT64, bytes([6, *[0] * 7, 7, *[0] * 7])
    return whole.SerializeToString()


def _protobuf() -> Iterator[Case]:
    for missing in range(1, 112, 3):
        yield Case(f"a batch without its last {missing} bytes", "forward_backward", headers=PROTOBUF,
                   content=partial(_cut, missing))  # fmt: skip
    yield Case("JSON that says it is protobuf", "forward_backward", content=b'{"model_id": "x"}', headers=PROTOBUF)
    yield Case("protobuf that says it is JSON", "forward_backward", content=_whole, headers=JSON)
    yield Case("an unknown field of protobuf", "forward_backward", headers=PROTOBUF,
               content=lambda targets: _whole(targets) + b"\xfa\x3f\x01x")  # fmt: skip
    yield Case("protobuf where only JSON is read", "optim_step", content=_whole, headers=PROTOBUF, status=(415,))
    nested = b""
    for _ in range(200):
        nested = b"\x0b" + nested + b"\x0c"
    yield Case("groups of protobuf in each other", "forward_backward", content=nested, headers=PROTOBUF)
    yield Case("a length beyond the body", "forward_backward", content=b"\x0a\xff\xff\xff\xff\x0f" + b"x" * 10,
               headers=PROTOBUF)  # fmt: skip


def _cut(missing: int, targets: Targets) -> bytes:
    return _whole(targets)[:-missing]


def _encodings() -> Iterator[Case]:
    body = json.dumps(TRAINING).encode()
    compressor = zstandard.ZstdCompressor()
    for what, content in (
        ("no frame", b"garbage"),
        ("nothing", b""),
        ("a frame that is cut off", lambda _: compressor.compress(body)[:-3]),
        ("two frames", lambda _: compressor.compress(body) * 2),
        ("a frame in a frame", lambda _: compressor.compress(compressor.compress(body))),
        ("a skippable frame", b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"),
        ("a frame that needs a dictionary", b"\x28\xb5\x2f\xfd\x23\x01\x00\x00\x00\x02\x00\x00"),
        ("a frame with a window of terabytes", b"\x28\xb5\x2f\xfd\x00\xf8\x01\x00\x00"),
    ):
        yield Case(f"{what} as zstd", "forward_backward", content=content, headers=ZSTD)
    yield Case("a frame of 10 GB in 1 MB", "forward_backward", content=lambda _: _bomb(), headers=ZSTD, status=(413,))
    yield Case(
        "a frame of 10 GB that does not tell its size",
        "forward_backward",
        content=lambda _: _bomb(told=False),
        headers=ZSTD,
        status=(413,),
    )
    for encoding in ("gzip", "br", "deflate", "zstd, zstd", "gzip, zstd", "identity, zstd", "compress", "x" * 500):
        headers = {"Content-Encoding": encoding}
        yield Case(
            f"Content-Encoding {encoding[:20]}",
            "forward_backward",
            content=lambda _: gzip.compress(body),
            headers=headers,
            status=(415,),
            field="Content-Encoding",
        )


def _bomb(*, told: bool = True) -> bytes:
    """Zeros of 10 GB as zstd, put together from repeated blocks: compressing them would take longer than the attack."""
    header = b"\x28\xb5\x2f\xfd" + (b"\xe0" + (10 * 2**30).to_bytes(8, "little") if told else b"\x00\x38")
    block = ((128 * 1024) << 3 | 1 << 1).to_bytes(3, "little") + b"\x00"  # 128 KiB of one byte
    last = ((128 * 1024) << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\x00"
    return header + block * (10 * 2**30 // (128 * 1024) - 1) + last


def _sizes() -> Iterator[Case]:
    for route in ("create_session", "retrieve_future", "create_custom_loss", "/v1/completions", "/v1/messages"):
        large = b'{"tags": ["' + b"x" * 4_300_000 + b'"]}'
        yield Case(f"4 MB at {route}", route, content=large, status=(413,))
    yield Case("70 MB in a batch", "forward_backward", content=lambda _: b" " * (70 * 2**20), status=(413,))
    yield Case(
        "half a million texts", "asample", content=lambda _: b"[" + b",".join([b'""'] * 500_001) + b"]", says="strings"
    )
    yield Case(
        "a hundred thousand bad tokens",
        "asample",
        content=lambda _: b'{"sampling_session_id":"$sampler","prompt":[' + b",".join([b"-1"] * 100_000) + b"]}",
        field="prompt",
    )


def _queries() -> Iterator[Case]:
    for route in ("sessions", "training_runs", "checkpoints"):
        for what, query, field in (
            ("a limit of 0", "limit=0", "limit"),
            ("a negative limit", "limit=-1", "limit"),
            ("a limit of a billion", "limit=1000000000", "limit"),
            ("a limit that is no number", "limit=x", "limit"),
            ("a limit of 5,000 digits", "limit=" + "9" * 5000, "limit"),
        ):
            yield Case(f"{what} at {route}", f"{route}?{query}", method="GET", field=field)
    for route in ("sessions", "training_runs", "checkpoints"):
        for offset in ("-1", "9999999999999999999", "1e3", "%00"):
            yield Case(f"offset {offset} at {route}", f"{route}?offset={offset}", method="GET", field="offset")
