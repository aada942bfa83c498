"""Bytes that two programs on the way could read as different requests: the server reads one of them, or none.

A proxy in front may count the body of a request in another way than the server behind it; what the one takes for the
end of a body is then a request of its own for the other. Here nothing that can be counted in two ways is counted at
all: it is refused and the connection closed, so the rest is never read as a request.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

import pytest

from tests.attacks.conftest import Attacked
from tests.attacks.sweep import footprint

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMUGGLED = (
    b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-API-Key: KEY\r\n"
    b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
)
"""Behind the body of another request. If it were read as a request, there would be a session."""

HEAD = (
    b"POST /api/v1/session_heartbeat HTTP/1.1\r\nHost: localhost\r\nX-API-Key: KEY\r\n"
    b"Content-Type: application/json\r\n"
)
BODY = b'{"session_id": "x"}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)

TWO_WAYS = {
    "a length and chunks": HEAD + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "chunks and a length": HEAD + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "a length of nothing and chunks": HEAD + b"Content-Length: 0\r\n" + CHUNKED + b"\r\n" + CHUNKS,
    "two lengths": HEAD + LENGTH + b"Content-Length: 0\r\n\r\n" + BODY,
    "the same length twice": HEAD + LENGTH + LENGTH + b"\r\n" + BODY,
    "two lengths in one line": HEAD + b"Content-Length: %d, 0\r\n\r\n" % len(BODY) + BODY,
    "a length with a sign": HEAD + b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "a length in hexadecimal": HEAD + b"Content-Length: 0x13\r\n\r\n" + BODY,
    "a length with a fraction": HEAD + b"Content-Length: 19.0\r\n\r\n" + BODY,
    "a length beyond 64 bits": HEAD + b"Content-Length: 18446744073709551617\r\n\r\n" + BODY,
    "an empty length": HEAD + b"Content-Length: \r\n\r\n" + BODY,
    "a length in other digits": HEAD + "Content-Length: ١٩\r\n\r\n".encode() + BODY,
    "a blank before the colon": HEAD + b"Content-Length : 0\r\n" + CHUNKED + b"\r\n" + CHUNKS,
    "chunks that are not the last coding": HEAD + b"Transfer-Encoding: chunked, identity\r\n" + LENGTH + b"\r\n" + BODY,
    "chunks twice": HEAD + CHUNKED + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "chunks twice, and no length": HEAD + CHUNKED + CHUNKED + b"\r\n" + CHUNKS,
    "chunks in chunks": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + CHUNKS,
    "a coding before the chunks": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "a coding that resembles chunks": HEAD + b"Transfer-Encoding: xchunked\r\n" + LENGTH + b"\r\n" + BODY,
    "a coding behind a vertical tab": HEAD + b"Transfer-Encoding: \x0bchunked\r\n" + LENGTH + b"\r\n" + BODY,
    "a coding in a folded line": HEAD + b"Transfer-Encoding:\r\n chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "a header in a folded line": HEAD + b"X: a\r\n " + LENGTH + b"\r\n" + BODY,
    "a carriage return in a header": HEAD + b"X: a\r" + LENGTH + b"\r\n" + BODY,
    "a NUL in a header": HEAD + b"X: a\x00b\r\n" + LENGTH + b"\r\n" + BODY,
    "a NUL in the name of a header": HEAD + b"Content-Length\x00: 0\r\n" + LENGTH + b"\r\n" + BODY,
    "a header without a name": HEAD + b": x\r\n" + LENGTH + b"\r\n" + BODY,
    "a header without a colon": HEAD + b"chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "a chunk with a sign": HEAD + CHUNKED + b"\r\n+13\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk of a negative size": HEAD + CHUNKED + b"\r\n-1\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk with a prefix": HEAD + CHUNKED + b"\r\n0x13\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk beyond 64 bits": HEAD + CHUNKED + b"\r\n10000000000000013\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a chunk that is longer than its size": HEAD + CHUNKED + b"\r\n5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "a version that is none": HEAD.replace(b"HTTP/1.1", b"HTTP/9.9") + LENGTH + b"\r\n" + BODY,
    "a blank in the address": HEAD.replace(b"/session_heartbeat", b"/session_ heartbeat") + LENGTH + b"\r\n" + BODY,
    "the beginning of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "the beginning of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40),
    "a request of the first version": b"GET /api/v1/sessions\r\n\r\n",
}
"""Each is followed by a request that must not be read: refused, and the connection closed."""

UPGRADES = {
    "HTTP/2": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "a socket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n",
    "TLS": b"Connection: upgrade\r\nUpgrade: TLS/1.0\r\n",
    "something else": b"Connection: close, Upgrade\r\nUpgrade: x\r\n",
}
"""None is done here."""

ONE_WAY = {
    "another method by header": b"X-HTTP-Method-Override: DELETE\r\n",
    "another address by header": b"X-Original-URL: /api/v1/admin/models\r\nX-Rewrite-URL: /api/v1/admin/models\r\n",
    "another host by header": b"X-Forwarded-Host: evil.example\r\nForwarded: host=evil.example\r\n",
}
"""What some programs obey, and this server does not: the request is answered as if the lines were not there."""


async def _exchange(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """Everything that the server sends until it closes the connection, or nothing comes any more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    with suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
    with suppress(TimeoutError, ConnectionError):
        while part := await asyncio.wait_for(reader.read(65536), 2 if received else 20):
            received += part
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return received


async def _sent(attacked: Attacked, port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    key = attacked.attacker.key.encode()
    return await _exchange(port, *(part.replace(b"KEY", key) for part in parts), pause=pause)


async def test_what_can_be_counted_in_two_ways_is_refused_and_nothing_behind_it_read(
    attacked: Attacked, port: int
) -> None:
    before = footprint(attacked.data_dir)
    answers = await asyncio.gather(*(_sent(attacked, port, data + SMUGGLED) for data in TWO_WAYS.values()))
    for what, answer in zip(TWO_WAYS, answers, strict=True):
        assert answer.count(b"HTTP/1.") <= 1, (what, answer)
        assert not answer or answer.startswith(b"HTTP/1.1 400 "), (what, answer)
        assert b"connection: close" in answer.lower() or not answer, what
        assert not list(attacked.attacker.leaks(answer.decode("latin-1"))), what
    assert sum(bool(answer) for answer in answers) >= len(answers) - 2, "the refusals are told"
    assert footprint(attacked.data_dir) == before


async def test_headers_that_other_programs_obey_change_nothing(attacked: Attacked, port: int) -> None:
    before = footprint(attacked.data_dir)
    for what, lines in ONE_WAY.items():
        data = HEAD + b"Connection: close\r\n" + lines + LENGTH + b"\r\n" + BODY
        answer = await _sent(attacked, port, data)
        assert answer.startswith(b"HTTP/1.1 404 "), (what, answer)
        assert answer.count(b"HTTP/1.") == 1, what
        assert b"evil.example" not in answer
    assert footprint(attacked.data_dir) == before


async def test_what_trails_a_body_is_no_header(attacked: Attacked, port: int) -> None:
    closing, chunks = HEAD + b"Connection: close\r\n" + CHUNKED + b"\r\n", CHUNKS.removesuffix(b"\r\n")
    others = b"X-API-Key: tml-another\r\nHost: evil.example\r\nContent-Type: text/plain\r\n\r\n"
    assert (await _sent(attacked, port, closing + chunks + others)).startswith(b"HTTP/1.1 404 ")
    keyless = closing.replace(b"X-API-Key: KEY\r\n", b"")
    answer = await _sent(attacked, port, keyless + chunks + b"X-API-Key: KEY\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 401 "), answer


@pytest.mark.parametrize("pause", [0.0, 0.1])
async def test_a_body_behind_an_upgrade_is_no_request(attacked: Attacked, port: int, pause: float) -> None:
    before = footprint(attacked.data_dir)
    for what, lines in UPGRADES.items():
        for length in (b"Content-Length: %d\r\n" % (len(SMUGGLED) + 61), CHUNKED):
            answer = await _sent(attacked, port, HEAD + lines + length + b"\r\n", SMUGGLED, pause=pause)
            assert answer.startswith(b"HTTP/1.1 400 "), (what, answer)
            assert answer.count(b"HTTP/1.") == 1, what
            assert b"Upgrade" in answer
        asked = b"GET /api/v1/session_heartbeat HTTP/1.1\r\nHost: localhost\r\nX-API-Key: KEY\r\n" + lines + b"\r\n"
        answer = await _sent(attacked, port, asked, SMUGGLED, pause=pause)
        assert answer.startswith(b"HTTP/1.1 405 "), "without a body the request is answered as if it did not ask"
        assert answer.count(b"HTTP/1.") == 1, what
        assert b"connection: close" in answer.lower()
    assert footprint(attacked.data_dir) == before


async def test_whole_requests_on_one_connection_are_separate_requests(attacked: Attacked, port: int) -> None:
    other = b"GET /api/v1/sessions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = await _sent(attacked, port, HEAD + LENGTH + b"\r\n" + BODY + HEAD + CHUNKED + b"\r\n" + CHUNKS + other)
    statuses = re.findall(rb"HTTP/1\.1 (\d+) ", answer)
    assert statuses == [b"404", b"404", b"401"], "a key of one request is not that of the next"


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (b"/healthz", b"Host: evil.example\r\n"),
        (b"/healthz", b"Host: localhost\r\nHost: evil.example\r\n"),
        (b"/healthz", b"Host: localhost, evil.example\r\n"),
        (b"/healthz", b"Host: localhost/evil\r\n"),
        (b"/healthz", b"Host: localhost:80@evil.example\r\n"),
        (b"/healthz", b""),
        (b"http://evil.example/healthz", b"Host: evil.example\r\n"),
    ],
)
async def test_requests_for_other_hosts(attacked: Attacked, port: int, target: bytes, host: bytes) -> None:
    answer = await _sent(attacked, port, b"GET " + target + b" HTTP/1.1\r\n" + host + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert b"unknown_host" in answer
    assert b"location" not in answer.lower()


async def test_ways_out_that_a_client_would_not_send(attacked: Attacked, port: int) -> None:
    for target in (
        b"/../../../etc/passwd",
        b"/api/v1/../../etc/passwd",
        b"/api/v1/files/../../dev_key",
        b"//etc/passwd",
        b"/api/v1/healthz/../sessions",
        b"/healthz/../api/v1/sessions",
        b"/healthz;/../api/v1/sessions",
        b"/healthz%2f..%2fapi%2fv1%2fsessions",
        b"/docs/../api/v1/sessions",
        b"/api/v1/files/../sessions",
        b"/api/v1/files/%2e%2e/sessions",
        b"/API/V1/sessions",
        b"/api/v1/sessions/",
        b"/api/v1//sessions",
        b"*",
    ):
        answer = await _exchange(port, b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer.split()[1] in (b"400", b"401", b"404"), (target, answer)
        assert b"root:" not in answer
        assert b'"sessions"' not in answer
