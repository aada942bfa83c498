"""Who is handled next of those that have arrived: a few at once; of several projects, the one with the fewest inside.

One process handles all requests, so a request that joins a queue of everybody's waits for as many others as the others
please to send. Here it waits for its own project's, and for a turn of each other one. Not responsible for what the
turns are about (`app/fair_requests.py`: handling of requests; `training.py`: decoding of batches).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


class Turnstile:
    """Lets so many in at once. Within a project first come first served; of several that wait the one is next that has
    fewest inside, and of equals the one whose last turn is longest ago.

    Args:
        abreast: how many may be inside at once.
        patience: seconds after which one that is still inside does not count any more, so that nothing that waits for
            something else keeps the others out; None = it counts until it leaves.
    """

    def __init__(self, abreast: int, patience: float | None = None) -> None:
        self._abreast = abreast
        self._patience = patience
        self._inside: Counter[str] = Counter()
        self._total = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By project; never empty."""
        self._turns = 0
        self._last: dict[str, int] = {}
        """The number of the last turn of each project that waits or is inside. One that has just come counts as if its
        turn had been the last but one: if all who come went first, those that stay would never be next."""

    def place(self, project_id: str) -> Place:
        """A place of this project, outside for now."""
        return Place(self, project_id, self._patience)

    @asynccontextmanager
    async def turn(self, project_id: str) -> AsyncIterator[None]:
        """One whole turn of a project."""
        place = self.place(project_id)
        await place.enter()
        try:
            yield
        finally:
            place.leave()

    async def admit(self, project_id: str) -> None:
        """Wait for a turn of this project; it ends with `dismiss`."""
        if self._total < self._abreast and not self._waiting:
            self._let_in(project_id)
            return
        own: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(project_id, deque()).append(own)
        self._last.setdefault(project_id, self._turns - 1)
        try:
            await own
        except asyncio.CancelledError:
            if own.done() and not own.cancelled():  # it was let in just then
                self.dismiss(project_id)
            else:
                self._give_up(project_id, own)
            raise

    def dismiss(self, project_id: str) -> None:
        """A turn of this project has ended."""
        self._total -= 1
        self._inside[project_id] -= 1
        if not self._inside[project_id]:
            del self._inside[project_id]
        self._next()
        self._forget(project_id)

    def _next(self) -> None:
        while self._waiting and self._total < self._abreast:
            project_id = min(self._waiting, key=lambda one: (self._inside[one], self._last[one]))
            queue = self._waiting[project_id]
            own = queue.popleft()
            if not queue:
                del self._waiting[project_id]
            if not own.done():
                self._let_in(project_id)
                own.set_result(None)

    def _let_in(self, project_id: str) -> None:
        self._turns += 1
        self._last[project_id] = self._turns
        self._inside[project_id] += 1
        self._total += 1

    def _give_up(self, project_id: str, own: asyncio.Future[None]) -> None:
        queue = self._waiting.get(project_id, deque())
        if own in queue:
            queue.remove(own)
            if not queue:
                del self._waiting[project_id]
        self._forget(project_id)

    def _forget(self, project_id: str) -> None:
        if project_id not in self._waiting and project_id not in self._inside:
            self._last.pop(project_id, None)


class Place:
    """Of one who comes and goes: inside or outside of a turnstile. Made by `Turnstile.place`."""

    __slots__ = ("_inside", "_patience", "_project_id", "_resting", "_timer", "_turnstile")

    def __init__(self, turnstile: Turnstile, project_id: str, patience: float | None) -> None:
        self._turnstile = turnstile
        self._project_id = project_id
        self._patience = patience
        self._inside = False
        self._resting = False
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self) -> None:
        """Wait for a turn."""
        await self._turnstile.admit(self._project_id)
        self._inside = True
        if self._patience is not None:
            self._timer = asyncio.get_running_loop().call_later(self._patience, self.leave)

    def leave(self) -> bool:
        """Let the next one in; returns whether this one was inside."""
        was, self._inside = self._inside, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if was:
            self._turnstile.dismiss(self._project_id)
        return was

    def rest(self, seconds: float) -> None:
        """Let the next one in after so many seconds; this one has done what it came for."""
        if self._inside and not self._resting:
            self._resting = True
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(seconds, self.leave)

    async def aside(self, happens: Awaitable[T]) -> T:
        """Wait for something that needs nobody's turn: outside, and afterwards for another turn if it was inside."""
        was = not self._resting and self.leave()
        value = await happens
        if was:
            await self.enter()
        return value


_place: ContextVar[Place | None] = ContextVar("place", default=None)


def note_place(place: Place) -> None:
    """The request that is handled in this context has this place; tasks that it starts share it."""
    _place.set(place)


def leave_turn() -> None:
    """What is left of this request takes nobody's time."""
    if (place := _place.get()) is not None:
        place.leave()


def current_place() -> Place | None:
    """The place of the request that is handled in this context; None outside requests, and where none is counted."""
    return _place.get()


async def aside(happens: Awaitable[T]) -> T:
    """As `Place.aside`, for the request that is handled in this context."""
    place = _place.get()
    return await happens if place is None else await place.aside(happens)
