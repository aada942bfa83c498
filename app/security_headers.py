"""The headers that tell a browser what it must not do, on every answer, and what our own pages may load.

This is the one place where a page gets a right: `PAGES` says which paths are pages, everything else is data and may
load nothing. Not responsible for who may ask from another origin (`--allowed-origins`, starlette's CORSMiddleware).
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

DATA = "default-src 'none'; frame-ancestors 'none'"
"""The policy of answers that are no page."""
PAGE = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""The policy of our pages: files of this server only, nothing inline."""
PAGES = ("/docs", "/console")
"""Paths, and all below them, that are pages."""
STRICT_TRANSPORT = "max-age=31536000"
"""A year of HTTPS only, for this name and none below it."""

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""A route may set its own instead."""


def policy(path: str) -> str:
    """The Content-Security-Policy of a path."""
    return PAGE if any(path == page or path.startswith(f"{page}/") for page in PAGES) else DATA


def raw_headers() -> bytes:
    """The headers as they are sent before there is an application: for what is refused while it is read."""
    fixed = {**HEADERS, "Content-Security-Policy": DATA}
    return "".join(f"{name.lower()}: {value}\r\n" for name, value in fixed.items()).encode("ascii")


class SecurityHeaders:
    """Adds the headers to every answer. Stands outside of whatever else may answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Content-Security-Policy", policy(scope["path"]))
                if scope.get("scheme") == "https" and not _is_local(scope):
                    headers.setdefault("Strict-Transport-Security", STRICT_TRANSPORT)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _is_local(scope: Scope) -> bool:
    """Whether the request was sent to `localhost`: a browser would then demand HTTPS of every other server there."""
    host = next((value for name, value in scope["headers"] if name == b"host"), b"").partition(b":")[0].lower()
    return bool(host == b"localhost" or host.endswith(b".localhost"))
