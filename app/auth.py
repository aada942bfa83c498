"""Who is asking: an API key, or a token made from one, becomes a `Principal`, or the request ends with 401 before its
body is read.

Deny by default: the middleware stands in front of the whole application, unknown paths included; only `PUBLIC_PATHS`
and `PUBLIC_PREFIX` pass without a key. Not responsible for storing keys (`store/keys.py`) or for who owns which object
(the services look everything up by project).
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from starlette.types import ASGIApp, Receive, Scope, Send

from app.services.tokens import Tokens
from schemas.errors import InvalidToken, Unauthenticated, Unavailable
from store.database import Store
from store.keys import authenticate, valid_key
from store.records import KeyRecord

PUBLIC_PATHS = frozenset({"/healthz", "/readyz", "/api/v1/healthz", "/api/v1/readyz", "/docs", "/openapi.json"})
"""What needs no key. Everything else does, whether a route exists there or not."""

PUBLIC_PREFIX = "/api/v1/files/"
"""Exported files: their addresses carry a signature that expires instead of a key."""

MAX_KEY_LENGTH = 2048
TOKEN_PREFIX = "eyJ"
"""How every JWT begins, and no key."""
CACHE_SECONDS = 2.0
CACHE_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Principal:
    """The tenant of a request, and the key that it used (an id, never the key).

    `until` is when the token ends that stood for the key; None if the key itself was sent.
    """

    project_id: str
    key_id: str
    until: datetime | None = None


class Authenticator:
    """Looks keys up, and remembers good ones for a moment.

    A revoked key works for at most `ttl` seconds more. Bad keys are not remembered, so guessing costs the guesser a
    look-up each time and fills nothing here.

    Args:
        tokens: reads tokens; None = they are not accepted.
        ttl: seconds that a good look-up is trusted.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        *,
        tokens: Tokens | None = None,
        ttl: float = CACHE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._ttl = ttl
        self._clock = clock
        self._cache: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    async def principal(self, key: str) -> Principal | None:
        """The tenant of `key`, or None if it is not valid (any more).

        Raises:
            InvalidToken: it is a token that is not valid (any more): the client makes a new one from its key.
        """
        if self._tokens is not None and key.startswith(TOKEN_PREFIX):
            return await self._of_token(self._tokens, key)
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        return await self._known(digest, lambda: self._store.read(lambda db: authenticate(db, key)))

    def forget(self, key_id: str) -> None:
        """A key was revoked: what is remembered of it, and of tokens made from it, is trusted no longer."""
        for known in [digest for digest, (_, principal) in self._cache.items() if principal.key_id == key_id]:
            del self._cache[known]

    async def _of_token(self, tokens: Tokens, token: str) -> Principal:
        identity = tokens.read(token)
        if identity is not None:
            key_id = identity.key_id
            principal = await self._known(key_id.encode(), lambda: self._store.read(lambda db: valid_key(db, key_id)))
            if principal is not None and principal.project_id == identity.project_id:
                return replace(principal, until=identity.until)
        raise InvalidToken("the token is not valid any more", hint="exchange the API key for a new one")

    async def _known(self, name: bytes, look_up: Callable[[], Awaitable[KeyRecord | None]]) -> Principal | None:
        now = self._clock()
        cached = self._cache.get(name)
        if cached is not None and cached[0] > now:
            return cached[1]
        self._cache.pop(name, None)
        record = await look_up()
        if record is None:
            return None
        principal = Principal(project_id=record.project_id, key_id=record.key_id)
        self._cache[name] = (now + self._ttl, principal)
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return principal


class AuthMiddleware:
    """Puts `scope["state"]["principal"]`, or raises `Unauthenticated` without touching the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_public(scope["path"]):
            authenticator: Authenticator | None = getattr(scope["app"].state, "authenticator", None)
            if authenticator is None:
                raise Unavailable("the server is starting", hint="try again in a moment")
            # A missing key costs the same look-up as a wrong one, so the two cannot be told apart by time.
            principal = await authenticator.principal(presented_key(scope["headers"]) or "")
            if principal is None:
                raise unauthenticated()
            scope["state"]["principal"] = principal
        await self._app(scope, receive, send)


def is_public(path: str) -> bool:
    """Whether `path` needs no key."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX)


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The one key in `X-API-Key` or `Authorization: Bearer`; None if there is none, or more than one."""
    keys: set[bytes] = set()
    for name, value in headers:
        if name == b"x-api-key":
            keys.add(value.strip())
        elif name == b"authorization":
            scheme, _, credential = value.partition(b" ")
            keys.add(credential.strip() if scheme == b"Bearer" else b"")
    if len(keys) != 1:
        return None
    [key] = keys
    return key.decode("latin-1") if 0 < len(key) <= MAX_KEY_LENGTH else None


def unauthenticated() -> Unauthenticated:
    """One answer for a key that is missing, wrong, expired or doubled: it tells a guesser nothing."""
    return Unauthenticated(
        "a valid API key is required",
        hint="send it as the header X-API-Key, or as Authorization: Bearer; the development key is in the file dev_key "
        "of the data folder",
    )
