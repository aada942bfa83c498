"""Requests that are held until something happens. Not responsible for what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from app.services.turnstile import aside

Disconnected = Callable[[], Awaitable[None]]
"""Returns when the client has gone away."""

Waiter = asyncio.Future[None]


class Waiters:
    """Who waits for what, by key.

    A waiter is opened before its owner looks whether there is still something to wait for, so that nothing which
    happens in between is missed.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, set[Waiter]] = {}
        self._closing = False

    @property
    def closing(self) -> bool:
        """Whether nobody is to wait any more."""
        return self._closing

    @property
    def empty(self) -> bool:
        """Whether nobody waits."""
        return not self._waiting

    @contextmanager
    def waiter(self, key: str) -> Iterator[Waiter]:
        """A waiter that is woken from now on."""
        own: Waiter = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(key, set())
        waiting.add(own)
        try:
            yield own
        finally:
            waiting.discard(own)
            if not waiting and self._waiting.get(key) is waiting:
                del self._waiting[key]

    def wake(self, key: str) -> None:
        """Wake everyone who waits for `key`."""
        for waiter in self._waiting.pop(key, set()):
            if not waiter.done():
                waiter.set_result(None)

    def wake_all(self) -> None:
        """Wake everyone."""
        for key in list(self._waiting):
            self.wake(key)

    def close(self) -> None:
        """Wake everyone; later waits end at once."""
        self._closing = True
        self.wake_all()

    async def wait(self, waiter: Waiter, hold: float, disconnected: Disconnected) -> bool:
        """Until `waiter` is woken, the client is gone or `hold` seconds are over; returns whether it makes sense to
        wait again."""
        if self._closing or hold <= 0:
            return False
        gone = asyncio.ensure_future(disconnected())
        try:
            await aside(asyncio.wait({waiter, gone}, timeout=hold, return_when=asyncio.FIRST_COMPLETED))
        finally:
            gone.cancel()
        return waiter.done() and not self._closing
