"""Building blocks of the JSON bodies: strict base models, identifiers, names and paths.

Requests forbid unknown fields, NaN and infinity, and take no value of a neighbouring type (`"8"` or `true` is no
integer): whatever a caller writes is either honoured or refused by name. Not responsible for what only the server's
state can tell (does this model exist?).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MIN_TTL_SECONDS = 3600
MAX_TTL_SECONDS = 10 * 365 * 24 * 3600
"""Ten years of 365 days."""

_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,127}")
_ID = re.compile(r"[!-.0-~]{1,256}")
_NAME_RULE = "1 to 128 characters out of A-Z a-z 0-9 . _ -, not starting with '-', and not '.' or '..'"


class RequestModel(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list of a request. Only its first bad item is reported: an error for each of millions would cost gigabytes."""


def _require_constants(schema: dict[str, Any]) -> None:
    """A constant is in every answer, and tells results of one union apart: the description must say so, for generated
    clients take the first result whose required fields are there."""
    names = [name for name, value in schema.get("properties", {}).items() if "const" in value]
    if names:
        schema["required"] = list(dict.fromkeys([*schema.get("required", []), *names]))


class ResponseModel(BaseModel):
    """Base of every result. A non-finite float is written as the string "NaN", "Infinity" or "-Infinity": the bare
    literals are not JSON, and clients refuse null where a number is due."""

    model_config = ConfigDict(
        extra="forbid", ser_json_inf_nan="strings", protected_namespaces=(), json_schema_extra=_require_constants
    )


def is_identifier(value: str) -> bool:
    """Whether `value` may be an id given out by the server (see `Identifier`)."""
    return _ID.fullmatch(value) is not None


def check_name(value: str) -> str:
    """Returns `value` if it may name a checkpoint, else raises ValueError with the rule."""
    if not _NAME.fullmatch(value) or value in (".", ".."):
        raise ValueError(f"a name is {_NAME_RULE}")
    return value


Segment = Literal["weights", "sampler_weights", "external_weights"]
"""The middle part of a checkpoint path: a training checkpoint, a sampler checkpoint, an export for other programs."""

_SEGMENTS: dict[str, Segment] = {name: name for name in get_args(Segment)}


class TinkerPathParts(NamedTuple):
    """The three parts of `tinker://{training_run_id}/{segment}/{name}`."""

    training_run_id: str
    segment: Segment
    name: str


def parse_tinker_path(value: str) -> TinkerPathParts:
    """Splits a checkpoint path. Raises ValueError (with the accepted form) for every other text."""
    form = f"a checkpoint path is tinker://{{training_run_id}}/{{{'|'.join(_SEGMENTS)}}}/{{name}}"
    prefix = "tinker://"
    parts = value.removeprefix(prefix).split("/")
    if not value.startswith(prefix) or len(parts) != 3 or not _ID.fullmatch(parts[0]):
        raise ValueError(form)
    run, segment, name = parts
    if segment not in _SEGMENTS:
        raise ValueError(f"{form}; {segment[:64]!r} is none of {', '.join(_SEGMENTS)}")
    return TinkerPathParts(run, _SEGMENTS[segment], check_name(name))


def _check_path(value: str) -> str:
    parse_tinker_path(value)
    return value


Identifier = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[!-.0-~]+$")]
"""An id given out by the server: printable ASCII without spaces and slashes."""

Name = Annotated[
    str,
    AfterValidator(check_name),
    WithJsonSchema(
        {
            "type": "string",
            "minLength": 1,
            "maxLength": 128,
            "pattern": r"^(?!\.{1,2}$)[A-Za-z0-9._][A-Za-z0-9._-]*$",
        }
    ),
]
"""The name of a checkpoint."""

TinkerPath = Annotated[
    str,
    StringConstraints(max_length=512),
    AfterValidator(_check_path),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": 512,
            "pattern": r"^tinker://[!-.0-~]{1,256}/(weights|sampler_weights|external_weights)/"
            r"(?!\.{1,2}$)[A-Za-z0-9._][A-Za-z0-9._-]{0,127}$",
        }
    ),
]
"""A checkpoint path, checked for its form only."""

_ONE_LINE = r"^[^\x00-\x1f\x7f]+$"
_STORABLE = r"^[^\x00]*$"
Label = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=_ONE_LINE)]
"""A short text for people, on one line: no control characters (they forge log lines and terminal output)."""

MetadataValue = Annotated[str, StringConstraints(max_length=4096, pattern=_STORABLE)]
UserMetadata = Annotated[
    dict[Label, MetadataValue],
    Field(max_length=64),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": 64,
            "propertyNames": {"minLength": 1, "maxLength": 256, "pattern": _ONE_LINE},
            "additionalProperties": {"type": "string", "maxLength": 4096, "pattern": _STORABLE},
        }
    ),
]
"""Up to 64 pairs of text. Described by hand: as `patternProperties`, names that do not fit would be left open."""

SeqId = Annotated[int, Field(ge=1, le=MAX_INT64)]
"""Order of a training request within its model, from 1."""

SessionCounter = Annotated[int, Field(ge=0, le=MAX_INT64)]
"""A counter within a session (of models, of sampling sessions), from 0."""

TtlSeconds = Annotated[int, Field(ge=MIN_TTL_SECONDS, le=MAX_TTL_SECONDS)]

_TIME = re.compile(r"\d{4}-\d{2}-\d{2}[Tt]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?([Zz]|[+-]\d{2}:\d{2})")


def _check_time(value: object) -> object:
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        raise ValueError(f"{str(value)[:40]!r} is not a time with a zone, as 2026-07-13T00:00:00Z is")
    return value


def _to_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{value.isoformat()!r} is not within the years 1 to 9999 of UTC") from None


Rfc3339 = Annotated[AwareDatetime, Field(strict=False), BeforeValidator(_check_time), AfterValidator(_to_utc)]
"""A time as text, read as UTC: no bare number, no date without time, no time without zone."""

TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]

One = Annotated[Literal[1], WithJsonSchema({"type": "integer", "enum": [1]})]
"""A version of which there is one. Described as a choice: generators write constants that are no text wrongly."""

SEQ_ID_TEXT = (
    "Order within the model, from 1; requests run in this order. Sending the same request again under the same seq_id "
    "returns the same promise. Absent: the server assigns the next one (and cannot recognise a repeat)."
)

JSON = dict[str, Any] | list[Any] | str | int | float | bool | None
