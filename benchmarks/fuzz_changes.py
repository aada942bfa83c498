"""Changes of sound bodies: bytes and pieces without regard to what they are, or fields of a message that stays one."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any, Literal

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from schemas.proto import tinker_public_pb2 as pb

Form = Literal["json", "protobuf"]
_WORDS = (b"\x00", b"\xff" * 8, b"\xff\xff\xff\xff\x0f", b"\x80" * 10 + b"\x01", b"\x7f", b"NaN", b"null", b"-0.0",
          b"1e999", b"9" * 30, b"-1", b"[[[[", b'{"a":', b'"\\ud800"', b"\\u0000", b'"', b"true", b"[]", b"{}",
          b"9223372036854775808", b"\xed\xa0\x80", b"\n", b",", b":")  # fmt: skip


def changed_bytes(body: bytes, draw: random.Random, other: bytes) -> bytes:
    """One to five changes."""
    data = bytearray(body)
    for _ in range(draw.choice((1, 1, 2, 3, 5))):
        draw.choice(_CHANGES)(data, draw, other)
    return bytes(data[: 1 << 18])


def _flip(data: bytearray, draw: random.Random, other: bytes) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _set(data: bytearray, draw: random.Random, other: bytes) -> None:
    if data:
        data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))


def _insert(data: bytearray, draw: random.Random, other: bytes) -> None:
    at = draw.randint(0, len(data))
    data[at:at] = draw.choice(_WORDS)


def _overwrite(data: bytearray, draw: random.Random, other: bytes) -> None:
    word = draw.choice(_WORDS)
    at = draw.randint(0, len(data))
    data[at : at + len(word)] = word


def _remove(data: bytearray, draw: random.Random, other: bytes) -> None:
    at = draw.randint(0, len(data))
    del data[at : at + draw.choice((1, 1, 4, 16, len(data)))]


def _repeat(data: bytearray, draw: random.Random, other: bytes) -> None:
    at = draw.randint(0, len(data))
    piece = data[at : at + draw.randint(1, 64)]
    data[at:at] = piece * draw.choice((1, 2, 10, 200))


def _splice(data: bytearray, draw: random.Random, other: bytes) -> None:
    start = draw.randint(0, len(other))
    at = draw.randint(0, len(data))
    data[at : at + draw.randint(0, 64)] = other[start : start + draw.randint(1, 64)]


_CHANGES = (_flip, _flip, _set, _set, _insert, _overwrite, _remove, _repeat, _splice)


# -- fields ------------------------------------------------------------------------------------------------------------
_INTEGERS = (0, 1, -1, 2, 3, 255, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e39, 1.8e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "x", "../x", "a\x00b", "a\nb", "\u202e", "x" * 300, "cross_entropy", "ppo", "tinker://a/weights/b", "1")
_VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, [[]], [{}], {"": None}, [1, "x"], [1.5, None], 10**30, -(10**30)),
    *_INTEGERS, *_FLOATS, *_TEXTS,
)  # fmt: skip


def changed_fields(body: bytes, form: Form, draw: random.Random) -> bytes:
    """One to three fields of the message changed, added, doubled or taken away."""
    if form == "json":
        value = json.loads(body)
        for _ in range(draw.choice((1, 1, 2, 3))):
            value = _json_change(value, draw)
        return json.dumps(value).encode()
    message = pb.ForwardBackwardRequest.FromString(body)
    for _ in range(draw.choice((1, 1, 2, 3))):
        _protobuf_change(message, draw)
    return message.SerializeToString()


def _json_change(value: Any, draw: random.Random) -> Any:
    """The value with something in it changed."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        what = draw.random()
        if what < 0.7:
            value[key] = _json_change(value[key], draw)
        elif what < 0.85:
            del value[key]
        else:
            value[draw.choice(_TEXTS)] = value[key]
        return value
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        what = draw.random()
        if what < 0.6:
            value[at] = _json_change(value[at], draw)
        elif what < 0.75:
            del value[at]
        else:
            value[at:at] = [value[at]] * draw.choice((1, 2, 100))
        return value
    return deepcopy(draw.choice(_VALUES))


def _protobuf_change(message: Message, draw: random.Random) -> None:
    """Something in the message, or in one inside it, changed."""
    field = draw.choice(message.DESCRIPTOR.fields)
    if draw.random() < 0.1:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        _map_change(getattr(message, field.name), field, draw)
    elif field.is_repeated:
        _repeated_change(getattr(message, field.name), field, draw)
    elif field.message_type is not None:
        inner = getattr(message, field.name)
        inner.SetInParent()
        _protobuf_change(inner, draw)
    else:
        setattr(message, field.name, _scalar(field, getattr(message, field.name), draw))


def _map_change(mapping: Any, field: FieldDescriptor, draw: random.Random) -> None:
    inside = field.message_type.fields_by_name["value"]
    known = sorted(mapping)
    key = draw.choice(known) if known and draw.random() < 0.7 else draw.choice(_TEXTS)
    if inside.message_type is not None:
        _protobuf_change(mapping[key], draw)
    else:
        mapping[key] = _scalar(inside, inside.default_value, draw)


def _repeated_change(values: Any, field: FieldDescriptor, draw: random.Random) -> None:
    if field.message_type is not None:
        if len(values) and draw.random() < 0.8:
            _protobuf_change(draw.choice(list(values)), draw)
        else:
            values.add()
    elif len(values) and draw.random() < 0.5:
        values[draw.randrange(len(values))] = _scalar(field, field.default_value or 0, draw)
    else:
        values.append(_scalar(field, 0, draw))


_RANGES = {
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32),
}


def _scalar(field: FieldDescriptor, present: Any, draw: random.Random) -> Any:
    """A value of the field's type."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return changed_bytes(present, draw, bytes(draw.randrange(256) for _ in range(16)))
        return draw.choice(_TEXTS)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return draw.choice(_FLOATS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return draw.random() < 0.5
    low, high = _RANGES.get(field.cpp_type, (-(2**31), 2**31))
    return draw.choice([each for each in _INTEGERS if low <= each < high])
