"""Bodies off the wire: streamed under a limit of size and time, decompressed under a limit of output.

Not responsible for what is in them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import zstandard
from starlette.requests import Request

from app.codec.limits import CodecLimits
from schemas.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType

PREFIX_BYTES = 64 * 1024
"""How much of a refused body is kept to find out whose it was."""

_SLICE = 1024
"""Compressed bytes fed at a time: zstd can blow up 4 bytes to 128 KiB, so one slice stays below 32 MiB."""


class BodyTooLarge(PayloadTooLarge):
    """Over the limit; `prefix` is the beginning of what arrived, as on the wire."""

    prefix: bytes = b""


class BodyUnreadable(InvalidRequest):
    """Not what its Content-Encoding says, or too slow; `prefix` is the beginning of what arrived."""

    default_code = "unreadable_body"
    prefix: bytes = b""


async def read_body(request: Request, limits: CodecLimits) -> bytes:
    """The decompressed body.

    Raises:
        BodyTooLarge, BodyUnreadable: both carry `prefix`, for `peek_identity`.
        UnsupportedMediaType: a Content-Encoding other than identity and zstd.
    """
    encoding = content_encoding(request.headers.get("content-encoding"))
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limits.max_body_bytes:
        raise await _refuse_declared(request, limits)
    data = await _receive(request, limits)
    if encoding == "identity":
        return data
    return await asyncio.to_thread(decompress, data, limits)


def content_encoding(header: str | None) -> str:
    """`identity` or `zstd`. Raises UnsupportedMediaType for anything else, several encodings included."""
    value = (header or "identity").strip().lower()
    if value not in ("identity", "zstd"):
        raise UnsupportedMediaType(
            f"Content-Encoding {value[:64]!r} is not read here; send zstd, or no encoding", field="Content-Encoding"
        )
    return value


def decompress(data: bytes, limits: CodecLimits) -> bytes:
    """One whole zstd frame, with bounded memory. Raises BodyTooLarge or BodyUnreadable."""
    prefix = data[:PREFIX_BYTES]
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size != zstandard.CONTENTSIZE_UNKNOWN and size > limits.max_body_bytes:
            raise _too_large(limits, prefix)
        frame = zstandard.ZstdDecompressor(max_window_size=limits.max_window_bytes).decompressobj()
        parts: list[bytes] = []
        total = at = 0
        while at < len(data) and not frame.eof:
            part = frame.decompress(data[at : at + _SLICE])
            at += _SLICE
            total += len(part)
            if total > limits.max_body_bytes:
                raise _too_large(limits, prefix)
            parts.append(part)
        complete = frame.eof and not frame.unused_data and at >= len(data)
    except zstandard.ZstdError:
        complete = False
    if not complete:
        raise _unreadable("the body is not one complete zstd frame (or needs too large a window)", prefix)
    return b"".join(parts)


async def _receive(request: Request, limits: CodecLimits) -> bytes:
    received = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_seconds):
            async for part in request.stream():
                received += part
                if len(received) > limits.max_body_bytes:
                    raise _too_large(limits, bytes(received[:PREFIX_BYTES]))
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout_seconds:g} seconds"
        raise _unreadable(message, bytes(received[:PREFIX_BYTES])) from None
    return bytes(received)


async def _refuse_declared(request: Request, limits: CodecLimits) -> BodyTooLarge:
    """Read only as much of a body that says it is too large as tells whose it is."""
    received = bytearray()
    with suppress(TimeoutError):  # the answer is the same: the prefix is whatever arrived
        async with asyncio.timeout(min(5.0, limits.body_timeout_seconds)):
            async for part in request.stream():
                received += part
                if len(received) >= PREFIX_BYTES:
                    break
    return _too_large(limits, bytes(received[:PREFIX_BYTES]))


def _too_large(limits: CodecLimits, prefix: bytes) -> BodyTooLarge:
    error = BodyTooLarge(
        f"the body is over the limit of {limits.max_body_bytes} bytes", hint="send the examples in smaller batches"
    )
    error.prefix = prefix
    return error


def _unreadable(message: str, prefix: bytes) -> BodyUnreadable:
    error = BodyUnreadable(message)
    error.prefix = prefix
    return error
