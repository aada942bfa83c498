"""multipart/form-data as it streams in: small fields into memory, one file to disk, everything under a limit.

`python-multipart` parses; here is what may be in a form, and how much of it. Not responsible for what it means.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from schemas.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType

MULTIPART = "multipart/form-data"
IDLE_SECONDS = 60.0
"""A sender that is silent for so long is given up."""
WHOLE_SECONDS = 3600.0
MAX_BOUNDARY = 70
logging.getLogger("python_multipart").setLevel(logging.ERROR)
"""It warns of each broken form, and clients may send many: they are told, and the log has the request's line."""


@dataclass(frozen=True, slots=True)
class FormRules:
    """What a form may hold: fields by name with their largest size in bytes, and one file."""

    fields: Mapping[str, int]
    file: str
    max_file_bytes: int


@dataclass(slots=True)
class Form:
    """What a form held. The file's bytes are on disk; `file_sha256` is None if there was no file."""

    fields: dict[str, bytes] = field(default_factory=dict)
    file_sha256: str | None = None


async def receive_form(request: Request, rules: FormRules, into: BinaryIO) -> Form:
    """Read a whole form; the file goes to `into` as it arrives.

    Raises:
        UnsupportedMediaType: the body is not such a form, or is compressed.
        PayloadTooLarge: a field or the file is over its limit.
        InvalidRequest: a field is unknown, given twice or without a name, or the form is broken or too slow.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("a form is read without Content-Encoding only", field="Content-Encoding")
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind.decode("latin-1") != MULTIPART or not 0 < len(boundary) <= MAX_BOUNDARY:
        sent = request.headers.get("content-type", "")[:100]
        accepted = f"{MULTIPART} with a boundary of 1 to {MAX_BOUNDARY} characters"
        raise UnsupportedMediaType(f"Content-Type {sent!r} is not read here; send {accepted}", field="Content-Type")
    reader = _Reader(rules, into)
    parser = MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(WHOLE_SECONDS):
            stream = request.stream()
            while True:
                async with asyncio.timeout(IDLE_SECONDS):
                    part = await anext(stream, None)
                if part is None:
                    break
                if part:
                    await asyncio.to_thread(parser.write, part)
    except TimeoutError:
        raise InvalidRequest("the body did not arrive in time", code="unreadable_body") from None
    except MultipartParseError as error:
        raise InvalidRequest(f"the form is broken: {str(error)[:200]}", code="unreadable_body") from None
    if not reader.complete:
        raise InvalidRequest("the form is broken: its end did not arrive", code="unreadable_body")
    return reader.form()


class _Reader:
    """Takes the parser's events. What a callback raises reaches whoever writes into the parser."""

    def __init__(self, rules: FormRules, into: BinaryIO) -> None:
        self._rules = rules
        self._into = into
        self._fields: dict[str, bytearray] = {}
        self._digest = hashlib.sha256()
        self._file_bytes: int | None = None
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._name = ""
        self.complete = False

    def callbacks(self) -> dict[str, object]:
        """By the parser's names of events."""
        return {
            "on_part_begin": self._begin,
            "on_header_begin": self._header_begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header_end,
            "on_headers_finished": self._named,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def form(self) -> Form:
        """What there was."""
        sha256 = None if self._file_bytes is None else self._digest.hexdigest()
        return Form({name: bytes(value) for name, value in self._fields.items()}, sha256)

    def _begin(self) -> None:
        self._disposition, self._name = b"", ""

    def _header_begin(self) -> None:
        self._header.clear()
        self._value.clear()

    def _header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        elif bytes(self._header).lower() == b"content-transfer-encoding":
            raise InvalidRequest("the form has a part with Content-Transfer-Encoding, which is not read here")

    def _named(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = name = options.get(b"name", b"").decode("utf-8", "replace")
        known = (*self._rules.fields, self._rules.file)
        if name not in known:
            raise InvalidRequest(
                f"the form has a field {name[:100]!r}; {', '.join(known)} are accepted", field=name[:100] or None
            )
        if name in self._fields or (name == self._rules.file and self._file_bytes is not None):
            raise InvalidRequest(f"{name} is given twice", field=name)
        if name == self._rules.file:
            self._file_bytes = 0
        else:
            self._fields[name] = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        chunk, name = data[start:end], self._name
        if name == self._rules.file:
            self._file_bytes = (self._file_bytes or 0) + len(chunk)
            if self._file_bytes > self._rules.max_file_bytes:
                raise PayloadTooLarge(f"{name} is over the limit of {self._rules.max_file_bytes} bytes", field=name)
            self._digest.update(chunk)
            self._into.write(chunk)
            return
        self._fields[name] += chunk
        if len(self._fields[name]) > self._rules.fields[name]:
            raise PayloadTooLarge(f"{name} is over the limit of {self._rules.fields[name]} bytes", field=name)

    def _end(self) -> None:
        self.complete = True
