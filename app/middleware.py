"""What surrounds every request: its id, its line in the log, the safety net, the Host check, the drain gate, the limit.

Pure ASGI, so that bodies stream through and nothing is buffered. Outermost first: `SecurityHeaders`
(`app/security_headers.py`), `RequestContext`, `HostCheck`, `DrainGate`, `app.auth.AuthMiddleware`,
`app.fair_requests.FairRequests`, `BodyLimit`. Not responsible for identity (`app/auth.py`).
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import render, render_unexpected
from schemas.errors import InvalidRequest, TinsmithError, Unavailable

logger = logging.getLogger(__name__)
access = logging.getLogger("app.access")

_HOST = re.compile(r"((?P<name>[a-z0-9._-]+)|\[(?P<bracketed>[0-9a-f:.]+)\])(:\d{0,5})?|(?P<bare>[0-9a-f:.]+)")
"""The value of a Host header: a name or an IPv4 address, or an IPv6 address, in brackets if a port follows."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
QUIET_PATHS = frozenset(
    {
        "/healthz",
        "/readyz",
        "/api/v1/healthz",
        "/api/v1/readyz",
        "/api/v1/retrieve_future",
        "/api/v1/retrieve_futures",
        "/api/v1/session_heartbeat",
        "/api/v1/telemetry",
    }
)
"""Called all the time by design: logged at debug level unless they fail."""

ALLOWED_WHILE_DRAINING = frozenset(
    {
        "/api/v1/retrieve_future",
        "/api/v1/retrieve_futures",
        "/api/v1/cancel_future",
        "/api/v1/session_heartbeat",
        "/api/v1/telemetry",
        "/api/v1/client/config",
        "/api/v1/client/dynamic_config",
        "/api/v1/get_info",
        "/api/v1/auth/token",
    }
)
LARGE_PATHS = frozenset(
    f"/api/v1/{name}"
    for name in (
        "forward_backward",
        "forward",
        "optim_step",
        "zero_grad",
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "load_weights",
        "asample",
    )
)
"""Routes that measure their body themselves: they look into one that is too large, to find out whose request it was."""
LARGE_SLACK = 1024 * 1024
CONTROL_LIMIT = 4 * 1024 * 1024
"""Bytes of a body of every other route: what is parsed in the event loop must be small."""

IMPORT_PATH = "/api/v1/checkpoints/import"
"""Streams its body to the disk under a limit of its own, of which `LARGE_SLACK` is for the fields beside the file."""


class RequestContext:
    """Gives the request its id, logs it when it is answered, and turns what nobody caught into an answer.

    Args:
        new_id: makes the id of a request that brings none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._new_id = new_id
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        request_id = state["request_id"] = _incoming_id(scope) or self._new_id()
        began = self._clock()
        status: int | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except TinsmithError as error:
            await render(error, request_id, scope["path"])(scope, receive, send_with_headers)
        except ClientDisconnect:
            logger.debug("the client went away", extra={"request_id": request_id})
        except Exception:
            logger.exception("unexpected failure", extra={"request_id": request_id})
            if status is not None:
                raise  # the answer has begun: only cutting the connection tells the client
            await render_unexpected(request_id, scope["path"])(scope, receive, send_with_headers)
        finally:
            self._log(scope, request_id, status, began)

    def _log(self, scope: Scope, request_id: str, status: int | None, began: float) -> None:
        quiet = scope["path"] in QUIET_PATHS and (status is None or status < 500)
        principal = scope["state"].get("principal")
        access.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s %s %s",
            scope["method"],
            scope.get("raw_path", scope["path"].encode())[:300].decode("latin-1"),
            status if status is not None else "-",
            extra={
                "request_id": request_id,
                "ms": round((self._clock() - began) * 1000, 1),
                "key_id": principal.key_id if principal is not None else None,
            },
        )


class HostCheck:
    """Refuses requests addressed to a name that is not ours (DNS rebinding: a web page that points its own name here).

    Names of this machine's loopback, plain IP addresses, the configured `host` and `allowed` pass; `*` lets all pass.
    """

    def __init__(self, app: ASGIApp, *, host: str, allowed: Collection[str]) -> None:
        self._app = app
        self._names = {"localhost", host.lower(), *(name.lower() for name in allowed)}
        self._all = "*" in allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._all:
            values = [value for name, value in scope["headers"] if name == b"host"]
            host = _host_name(values[0].decode("latin-1")) if len(values) == 1 else ""
            if host not in self._names and not host.endswith(".localhost") and not _is_address(host):
                raise InvalidRequest(
                    f"Host {host[:100]!r} is not a name of this server",
                    field="Host",
                    hint="start the server with --allowed-hosts to add a name",
                    code="unknown_host",
                )
        await self._app(scope, receive, send)


class DrainGate:
    """While the server is stopping: results can still be fetched, new work is sent away with 503 and Retry-After.

    Args:
        draining: whether the server is stopping.
    """

    def __init__(self, app: ASGIApp, *, draining: Callable[[], bool]) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["method"] not in ("GET", "HEAD")
            and self._draining()
            and scope["path"] not in ALLOWED_WHILE_DRAINING
            and not scope["path"].endswith("/finish")
        ):
            raise Unavailable("the server is shutting down and takes no new work", hint="try again in a moment")
        await self._app(scope, receive, send)


class BodyLimit:
    """Stops bodies that are too large (413), by their declared length or while they stream in.

    The routes of `LARGE_PATHS` enforce `limit` (bytes) themselves; for them this is a backstop, a little later. All
    others get at most `CONTROL_LIMIT`, but for `IMPORT_PATH`, which gets `import_limit`.
    """

    def __init__(self, app: ASGIApp, *, limit: int, import_limit: int) -> None:
        self._app = app
        self._limit = limit
        self._import_limit = import_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        large = scope["path"] in LARGE_PATHS
        limit = self._limit + LARGE_SLACK if large else min(self._limit, CONTROL_LIMIT)
        if scope["path"] == IMPORT_PATH:
            limit = self._import_limit + LARGE_SLACK
        declared = 0 if large else _declared_length(scope)
        received = 0

        async def limited() -> Message:
            nonlocal received
            if declared > limit:
                raise _too_large(limit)
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > limit:
                    raise _too_large(limit)
            return message

        await self._app(scope, limited, send)


def _too_large(limit: int) -> HTTPException:
    # An HTTPException, because FastAPI turns anything else that reading a body raises into a plain 400.
    return HTTPException(413, f"the body is over the limit of {limit} bytes")


def _incoming_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode("ascii"))
    return None


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value[:20])
    return 0


def _host_name(value: str) -> str:
    """`example.org:80` -> `example.org`, `[::1]:80` -> `::1`; empty for anything else.

    Strict, because addresses that the server hands out begin with this text: `name:80@elsewhere` is another host.
    """
    match = _HOST.fullmatch(value.strip().lower())
    return "" if match is None else match["name"] or match["bare"] or match["bracketed"]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
