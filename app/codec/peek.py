"""Whose was a body that was refused? Best effort on a prefix, so that its seq_id counts as consumed.

The SDK goes on with the next seq_id after a refusal; a server that kept waiting for the refused one would hang the
model. Nothing here raises, whatever the bytes are.
"""

from __future__ import annotations

import re

import orjson
import zstandard

from app.codec.body import PREFIX_BYTES
from app.codec.forward_backward import JSON, PROTOBUF, media_type
from schemas.http.base import MAX_INT64, is_identifier

_MODEL_ID = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,256})"')
_SEQ_ID = re.compile(rb'"seq_id"\s*:\s*([0-9]{1,19})\b')
_MAX_INT32 = 2**31 - 1

Identity = tuple[str, int]


def peek_identity(prefix: bytes, content_type: str | None, encoding: str | None = None) -> Identity | None:
    """`(model_id, seq_id)` of a training request, if both can be told from its beginning.

    Args:
        prefix: the body or its beginning, as on the wire (not decompressed if `encoding` says zstd).
        content_type: the header of that name.
        encoding: the Content-Encoding header.
    """
    if (encoding or "").strip().lower() == "zstd":
        prefix = _first_block(prefix)
    kind = media_type(content_type)
    found = _of_proto(prefix) if kind == PROTOBUF else _of_json(prefix) if kind == JSON else None
    if found is None or not is_identifier(found[0]) or not 1 <= found[1] <= MAX_INT64:
        return None
    return found


def _first_block(data: bytes) -> bytes:
    """What can be decompressed of a frame's beginning; a few slices at most, since a frame can blow up."""
    parts = bytearray()
    try:
        frame = zstandard.ZstdDecompressor(max_window_size=2**25).decompressobj()
        for at in range(0, min(len(data), PREFIX_BYTES), 1024):
            parts += frame.decompress(data[at : at + 1024])
            if len(parts) >= PREFIX_BYTES or frame.eof:
                break
    except zstandard.ZstdError:
        return bytes(parts)
    return bytes(parts[:PREFIX_BYTES])


def _of_proto(data: bytes) -> Identity | None:
    """Walks the top-level fields: 1 is model_id (text), 2 is seq_id (varint)."""
    model_id, seq_id, at = "", 0, 0
    while at < len(data) and not (model_id and seq_id):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            seq_id = value if number == 2 else seq_id
        elif wire == 2:
            size, at = _varint(data, at)
            if number == 1 and at + size <= len(data):
                model_id = data[at : at + size].decode("utf-8", "replace")
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            return None
    return (model_id, seq_id) if 1 <= seq_id <= _MAX_INT32 else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at` and the place after it; cut off = place after the end."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    return 0, len(data)


def _of_json(data: bytes) -> Identity | None:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return _of_json_text(data)
    if not isinstance(value, dict):
        return None
    model_id, seq_id = value.get("model_id"), value.get("seq_id")
    return (model_id, seq_id) if isinstance(model_id, str) and type(seq_id) is int else None


def _of_json_text(data: bytes) -> Identity | None:
    """Of a text that is cut off or broken: the first of each key, which no tensor of a request can hold."""
    model_id, seq_id = _MODEL_ID.search(data), _SEQ_ID.search(data)
    if model_id is None or seq_id is None:
        return None
    return model_id[1].decode("utf-8", "replace"), int(seq_id[1])
