"""Callers that never finish a request: endless, countless and slow headers, trailers, and things that are no HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from app import connection
from app.connection import MAX_HEAD_BYTES, MAX_HEADERS
from tests.support.sockets import listening


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and answers with its length."""
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length += len(message.get("body", b""))
        more = message.get("more_body", False)
    text = str(length).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with listening(echo) as number:
        yield number


class Caller:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def dial(cls, port: int) -> Caller:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data: bytes) -> None:
        with suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer."""
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 20)
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head.split()[1]), await self._reader.readexactly(length)

    async def closed(self) -> bool:
        """Whether the server has closed the connection, within a while."""
        try:
            return await asyncio.wait_for(self._reader.read(), 20) == b""
        except ConnectionError:
            return True


async def refusal(caller: Caller) -> tuple[int, str]:
    status, body = await caller.answer()
    shape: dict[str, Any] = json.loads(body)
    assert shape["detail"]
    return status, shape["error"]["code"]


async def stopped(caller: Caller) -> bool:
    """Whether a flood was refused. Closing with unread data resets the connection, which may overtake the answer."""
    with suppress(ConnectionError):
        assert (await refusal(caller))[0] in (400, 431)
    return await caller.closed()


async def test_an_endless_header_is_stopped(port: int) -> None:
    caller = await Caller.dial(port)
    await caller.send(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
    for _ in range(40):
        await caller.send(b"a" * 8192)
    assert await stopped(caller)


async def test_an_endless_address_is_stopped(port: int) -> None:
    caller = await Caller.dial(port)
    await caller.send(b"GET /")
    for _ in range(40):
        await caller.send(b"a" * 8192)
    assert await stopped(caller)


async def test_countless_headers_are_stopped(port: int) -> None:
    caller = await Caller.dial(port)
    await caller.send(b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * (MAX_HEADERS + 1) + b"\r\n")
    assert await refusal(caller) == (431, "head_too_large")
    assert await caller.closed()


async def test_endless_trailers_and_chunk_extensions_are_stopped(port: int) -> None:
    for tail in (b"0\r\nX: ", b"1;x="):
        caller = await Caller.dial(port)
        await caller.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n" + tail)
        for _ in range(40):
            await caller.send(b"a" * 8192)
        assert await stopped(caller)


async def test_countless_trailers_are_stopped(port: int) -> None:
    caller = await Caller.dial(port)
    head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    await caller.send(head + b"a:b\r\n" * MAX_HEADERS + b"\r\n")
    assert await refusal(caller) == (431, "head_too_large")
    assert await caller.closed()


async def test_large_bodies_and_large_heads_within_the_bounds_pass_on_one_connection(port: int) -> None:
    caller = await Caller.dial(port)
    for _ in range(3):
        await caller.send(
            b"POST / HTTP/1.1\r\nX: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\nContent-Length: 1000000\r\n\r\n"
        )
        await caller.send(b"b" * 1_000_000)
        assert await caller.answer() == (200, b"1000000")
    chunk = b"2710\r\n" + b"c" * 10_000 + b"\r\n"
    await caller.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 100 + b"0\r\n\r\n")
    assert await caller.answer() == (200, b"1000000")


async def test_a_head_that_does_not_come_ends_the_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    later, busy = [await Caller.dial(port) for _ in range(2)]
    await busy.send(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\na")
    await later.send(b"GET / HTTP/1.1\r\n\r\n")
    assert await later.answer() == (200, b"0")
    monkeypatch.setattr(connection, "HEAD_SECONDS", 1.5)
    silent, slow = [await Caller.dial(port) for _ in range(2)]
    await later.send(b"GET / HT")
    for letter in (b"G", b"E", b"T"):
        await slow.send(letter)
        await asyncio.sleep(0.05)
    for caller in (silent, later, slow):
        assert await refusal(caller) == (408, "head_too_slow")
        assert await caller.closed()
    await busy.send(b"bc")  # a body in progress has limits of its own
    assert await busy.answer() == (200, b"3")


async def test_what_is_no_http_is_told_so_in_the_usual_shape(port: int) -> None:
    for nonsense in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"FOO / HTTP/1.1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX : y\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: y\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\nX: \x00\r\n\r\n",
    ):
        caller = await Caller.dial(port)
        await caller.send(nonsense)
        assert await refusal(caller) == (400, "invalid_http"), nonsense
        assert await caller.closed()


async def test_a_caller_that_leaves_in_the_middle_of_a_head_leaves_no_timer(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HT")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert reader.at_eof() or await reader.read() == b""
    caller = await Caller.dial(port)
    await caller.send(b"GET / HTTP/1.1\r\n\r\n")
    assert await caller.answer() == (200, b"0")
