"""Requests of nobody known take turns by the address that they come from: whoever floods the server without a key, or
with a wrong one, takes a part of its time only. Not responsible for identity (`app/auth.py`), nor for the turns of
projects (`app/fair_requests.py`)."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from app.auth import Authenticator, presented_key
from app.fair_requests import LONGEST_TURN, handle_in_turn
from app.public import is_public
from app.services.turnstile import Turnstile

ABREAST = 2
"""Requests of strangers that are handled at once, beside those of projects."""
REST = 3.0
"""Their places stay empty for so many times the time that each took: at most between a quarter and a half of the
server's time is theirs. Were it all, threads (the database's) would wait for the interpreter after each of their steps.
"""


class Strangers:
    """Pure ASGI, outside of `AuthMiddleware`, which ends the turn of a request whose key turns out to be good. A
    request with a key that was good lately takes no turn here; one to a path that needs none always does.

    Args:
        also_public: paths that need no key because the settings say so.
        abreast: requests that are in their turns at once.
    """

    def __init__(self, app: ASGIApp, *, also_public: Collection[str] = (), abreast: int = ABREAST) -> None:
        self._app = app
        self._also_public = frozenset(also_public)
        self._turns = Turnstile(abreast, LONGEST_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._knows(scope):
            await self._app(scope, receive, send)
            return
        address = scope["client"][0] if scope["client"] else ""
        await handle_in_turn(self._turns.place(address), self._app, scope, receive, send, rest=REST)

    def _knows(self, scope: Scope) -> bool:
        if is_public(scope["path"], self._also_public):
            return False
        authenticator: Authenticator | None = getattr(scope["app"].state, "authenticator", None)
        return authenticator is not None and authenticator.knows(presented_key(scope["headers"]) or "")
