"""One HTTP connection, with bounds on what comes before a request is a request.

uvicorn's parser collects a head (request line and headers) of any length, for any time, before the application and its
key check see anything: without these bounds one caller without a key could fill the memory or the descriptor table.
Not responsible for bodies (`app/middleware.py`, `app/codec/body.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from app.errors import error_body
from app.security_headers import raw_headers
from schemas.errors import InvalidRequest

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers, and again of what trails a chunked body."""
MAX_HEADERS = 256
HEAD_SECONDS = 30.0
"""From the connection, or the first byte of a later request, to the end of the head."""


def _announces_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0") for name, value in headers
    )


def _has_other_coding(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the body is coded otherwise than in chunks: the parser would take what it cannot read for the body."""
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    return codings not in ([], [b"chunked"])


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol that refuses heads which are too long, too many lines or too slow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread = 0
        """Bytes that came since the last piece of a body or the last whole head."""
        self._head_ended = False
        self._trailers = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; its first head is due."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over."""
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, then see whether a head is still open that is too long by now."""
        self._unread += len(data)
        super().data_received(data)
        if self._unread > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the head of a request is at most {MAX_HEAD_BYTES} bytes", code="head_too_large")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._head_ended, self._trailers = False, 0
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """One more header, or trailer.

        What trails a body is counted and dropped. Among the headers it would be taken for one, although a proxy in
        front has looked at (and set, and removed) those only that came before the body.
        """
        if len(self.headers) + self._trailers >= MAX_HEADERS:
            self._refuse(431, f"a request has at most {MAX_HEADERS} headers", code="head_too_large")
            raise ValueError("too many headers")  # ends the parsing
        if self._head_ended:
            self._trailers += 1
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A whole head: the application takes over.

        Nothing is upgraded here, but the parser stops at such a head: what follows would be read as the next request,
        although a proxy in front may take it for this one's body. So there must be no body, and nothing follows.
        """
        self._head_is_here()
        self._head_ended = True
        other_protocol = self.parser.should_upgrade()
        if other_protocol and _announces_body(self.headers):
            self._refuse(400, "a request with a body cannot ask for another protocol (Upgrade)", code="invalid_http")
            raise ValueError("a body behind an upgrade")  # ends the parsing
        if _has_other_coding(self.headers):
            self._refuse(400, "Transfer-Encoding is chunked, once, or not there", code="invalid_http")
            raise ValueError("another coding than chunks")  # ends the parsing
        super().on_headers_complete()
        if other_protocol:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A piece of a body: its own limits hold."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        self._unread = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in the shape of every other error."""
        if not self.transport.is_closing():
            self._refuse(400, "this is not a valid HTTP request", code="invalid_http")

    def _refuse(self, status: int, message: str, *, code: str) -> None:
        """Answer and close, unless the answer to an earlier request is under way: then only close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps(error_body(InvalidRequest(message, code=code), None)).encode()
            self.transport.write(
                STATUS_LINE[status]
                + raw_headers()
                + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                + body
            )
        self.transport.close()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _head_is_here(self) -> None:
        self._unread = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()  # a pipelined head: the answer before it has the right to end
        elif not self.transport.is_closing():
            self._refuse(408, f"the head of a request must arrive within {HEAD_SECONDS:g} s", code="head_too_slow")
