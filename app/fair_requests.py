"""Projects take turns in having their requests handled. Not responsible for identity (`app/auth.py`), which is known
here, nor for how turns are given (`app/services/turnstile.py`)."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.services.turnstile import Place, Turnstile, note_place

ABREAST = 16
"""Requests that are handled at once: enough to share the commits of the database, few enough that each is soon done."""
LONGEST_TURN = 0.25
"""Seconds after which a request that is still being handled lets others by: it waits for something."""
LONGEST_REST = 0.05
"""Seconds for which a place stays empty after a turn at most."""
APART = frozenset({"/api/v1/session_heartbeat"})
"""Answered soon, whatever else its project has asked for: without them a client takes the server for dead."""
ABREAST_APART = 4
"""Of those, at once. Without turns of their own, a flood of them would leave no time for anybody's other requests."""


class FairRequests:
    """Pure ASGI, behind `AuthMiddleware`. A request is in its turn until its answer begins, but not while it waits for
    a part of its body, for an outcome (a held poll) or for a disk: others have their turns then. What is in `APART`
    takes turns with its like only.

    Args:
        abreast: requests that are in their turns at once.
    """

    def __init__(self, app: ASGIApp, *, abreast: int = ABREAST) -> None:
        self._app = app
        self._turns = Turnstile(abreast, LONGEST_TURN)
        self._apart = Turnstile(ABREAST_APART, LONGEST_TURN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal = scope.get("state", {}).get("principal")
        if scope["type"] != "http" or principal is None:
            await self._app(scope, receive, send)
            return
        turns = self._apart if scope["path"] in APART else self._turns
        await handle_in_turn(turns.place(principal.project_id), self._app, scope, receive, send)


async def handle_in_turn(
    place: Place, app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, rest: float = 0.0
) -> None:
    """Handle a request in a turn of its place, until its answer begins; outside while it waits for its body.

    Args:
        rest: the next one is let in after so many times the time that this one took, at most `LONGEST_REST` seconds.
    """

    def over() -> None:
        if rest:
            place.rest(min(rest * (time.monotonic() - began), LONGEST_REST))
        else:
            place.leave()

    async def received() -> Message:
        return await place.aside(receive())

    async def answer(message: Message) -> None:
        over()
        await send(message)

    note_place(place)
    await place.enter()
    began = time.monotonic()
    try:
        await asyncio.sleep(0)  # whoever has arrived by now stands in line before this one is handled
        await app(scope, received, answer)
    finally:
        over()
