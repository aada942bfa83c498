"""Who is asking: an API key, or a token made from one, becomes a `Principal`, or the request ends with 401 before its
body is read.

Deny by default: the middleware stands in front of the whole application, unknown paths included; only what
`app/public.py` lists passes without a key. Not responsible for storing keys (`store/keys.py`) or for
who owns which object (the services look everything up by project).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.permissions import NOT_BY_TOKEN, held
from app.principal import Principal
from app.public import is_public
from app.services.caller import note_caller
from app.services.tokens import Tokens
from app.services.turnstile import leave_turn
from schemas.errors import Forbidden, InvalidToken, Unauthenticated, Unavailable
from store.database import Store
from store.keys import authenticate, valid_key
from store.records import KeyRecord

MAX_KEY_LENGTH = 2048
TOKEN_PREFIX = "eyJ"
"""How every JWT begins, and no key."""
CACHE_SECONDS = 2.0
CACHE_SIZE = 4096


class Authenticator:
    """Looks keys up, and remembers good ones for a moment.

    A key that was revoked, or may do less, at another server works as before for at most `ttl` seconds more. Bad keys
    are not remembered, so guessing costs the guesser a look-up each time and fills nothing here.

    Args:
        tokens: reads tokens; None = they are not accepted.
        used: told the id of a key each time that it let somebody in.
        ttl: seconds that a good look-up is trusted.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        *,
        tokens: Tokens | None = None,
        used: Callable[[str], None] = lambda key_id: None,
        ttl: float = CACHE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._tokens = tokens
        self._used = used
        self._ttl = ttl
        self._clock = clock
        self._cache: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    async def principal(self, key: str) -> Principal | None:
        """The tenant of `key`, or None if it is not valid (any more).

        Raises:
            InvalidToken: it is a token that is not valid (any more): the client makes a new one from its key.
        """
        if self._tokens is not None and key.startswith(TOKEN_PREFIX):
            found: Principal | None = await self._of_token(self._tokens, key)
        else:
            found = await self._known(_digest(key), lambda: self._store.look_up(lambda db: authenticate(db, key)))
        if found is not None:
            self._used(found.key_id)
        return found

    def knows(self, key: str) -> bool:
        """Whether this key let somebody in lately; it need not do so again."""
        if self._tokens is not None and key.startswith(TOKEN_PREFIX):
            identity = self._tokens.read(key)
            return identity is not None and identity.key_id.encode() in self._cache
        return _digest(key) in self._cache

    def forget(self) -> None:
        """Keys were revoked or may do less: nothing that is remembered is trusted any longer. Who was known stays
        known, and is looked up again with the next request."""
        self._cache = OrderedDict((name, (-math.inf, principal)) for name, (_, principal) in self._cache.items())

    async def _of_token(self, tokens: Tokens, token: str) -> Principal:
        identity = tokens.read(token)
        if identity is not None:
            key_id = identity.key_id
            principal = await self._known(
                key_id.encode(), lambda: self._store.look_up(lambda db: valid_key(db, key_id))
            )
            if principal is not None and principal.project_id == identity.project_id:
                return replace(principal, until=identity.until, permissions=principal.permissions - NOT_BY_TOKEN)
        raise InvalidToken("the token is not valid any more", hint="exchange the API key for a new one")

    async def _known(self, name: bytes, look_up: Callable[[], Awaitable[KeyRecord | None]]) -> Principal | None:
        now = self._clock()
        cached = self._cache.get(name)
        if cached is not None and cached[0] > now:
            return cached[1]
        record = await look_up()
        if record is None:
            self._cache.pop(name, None)
            return None
        principal = principal_of(record)
        left = self._ttl
        if record.expires_at is not None:
            left = min(left, (record.expires_at - datetime.now(UTC)).total_seconds())
        self._cache[name] = (now + left, principal)
        self._cache.move_to_end(name)
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)
        return principal


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def principal_of(key: KeyRecord) -> Principal:
    """Whom a valid key stands for."""
    return Principal(
        project_id=key.project_id,
        key_id=key.key_id,
        role=key.role,
        permissions=held(key.role, key.scopes),
        scopes=key.scopes,
        ends=key.expires_at,
    )


class AuthMiddleware:
    """Puts `scope["state"]["principal"]`, or raises `Unauthenticated` without touching the body.

    A body may take minutes to arrive. If it did take long, its key is looked up once more when it is whole: else a
    request that was begun before its key was revoked would do its work (make another key, say) long afterwards.

    Args:
        also_public: paths that need no key because the settings say so.
    """

    def __init__(self, app: ASGIApp, *, also_public: Collection[str] = ()) -> None:
        self._app = app
        self._also_public = frozenset(also_public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_public(scope["path"], self._also_public):
            authenticator: Authenticator | None = getattr(scope["app"].state, "authenticator", None)
            if authenticator is None:
                raise Unavailable("the server is starting", hint="try again in a moment")
            # A missing key costs the same look-up as a wrong one, so the two cannot be told apart by time.
            key = presented_key(scope["headers"]) or ""
            principal = await authenticator.principal(key)
            if principal is None:
                raise unauthenticated()
            scope["state"]["principal"] = principal
            leave_turn()  # the one of somebody unknown
            note_caller(principal.key_id)
            receive = _still_valid(receive, authenticator, key, principal)
        await self._app(scope, receive, send)


def _still_valid(receive: Receive, authenticator: Authenticator, key: str, admitted: Principal) -> Receive:
    """The same messages, but for the last one of a body an error if the key may do less by then, or nothing.

    Raises: `Unauthenticated`, `Forbidden`.
    """
    began = time.monotonic()

    async def received() -> Message:
        message = await receive()
        whole = message["type"] == "http.request" and not message.get("more_body", False)
        if whole and time.monotonic() - began >= CACHE_SECONDS:
            now = await authenticator.principal(key)
            if now is None:
                raise unauthenticated()
            if not admitted.permissions <= now.permissions:
                raise Forbidden("the key may do less than when this request was begun", hint="send the request again")
        return message

    return received


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
