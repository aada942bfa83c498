"""Bodies off the wire: limits of size and time hold with and without a declared length."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import zstandard
from starlette.requests import Request
from starlette.types import Message

from app.codec import BodyTooLarge, BodyUnreadable, CodecLimits, read_body
from schemas.errors import UnsupportedMediaType

LIMITS = CodecLimits(max_body_bytes=100, body_timeout_seconds=0.2)


def _request(parts: list[bytes], headers: dict[str, str] | None = None, *, stall: bool = False) -> Request:
    async def messages() -> AsyncIterator[Message]:
        for part in parts:
            yield {"type": "http.request", "body": part, "more_body": True}
        if stall:
            await asyncio.sleep(30)
        yield {"type": "http.request", "body": b"", "more_body": False}

    stream = messages()
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": raw}
    return Request(scope, stream.__anext__)


async def test_a_body_in_parts_and_a_compressed_one() -> None:
    assert await read_body(_request([b"ab", b"", b"c"]), LIMITS) == b"abc"
    frame = zstandard.ZstdCompressor().compress(b"x" * 90)
    parts = [frame[:5], frame[5:]]
    assert await read_body(_request(parts, {"Content-Encoding": "ZSTD"}), LIMITS) == b"x" * 90


async def test_too_large_without_and_with_a_declared_length() -> None:
    with pytest.raises(BodyTooLarge) as caught:
        await read_body(_request([b"a" * 60] * 1000), LIMITS)
    assert caught.value.prefix == b"a" * 120
    with pytest.raises(BodyTooLarge) as caught:
        await read_body(_request([b"abc"], {"Content-Length": "9" * 30}), LIMITS)
    assert caught.value.prefix == b"abc"
    with pytest.raises(BodyTooLarge):
        await read_body(
            _request([zstandard.ZstdCompressor().compress(b"x" * 101)], {"Content-Encoding": "zstd"}), LIMITS
        )


async def test_too_slow() -> None:
    with pytest.raises(BodyUnreadable, match=r"0\.2 seconds") as caught:
        await read_body(_request([b"abc"], stall=True), LIMITS)
    assert caught.value.prefix == b"abc"


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd, zstd", "identity, zstd", "x" * 999])
async def test_other_encodings_are_refused(encoding: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="zstd"):
        await read_body(_request([b"abc"], {"Content-Encoding": encoding}), LIMITS)


async def test_a_broken_frame_keeps_its_prefix() -> None:
    with pytest.raises(BodyUnreadable) as caught:
        await read_body(_request([b"not zstd"], {"Content-Encoding": "zstd"}), LIMITS)
    assert caught.value.prefix == b"not zstd"
