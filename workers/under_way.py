"""What the runtimes of a server execute at this moment, told in front of every call of a worker.

A server that is killed leaves behind over what it died, and the next one counts it (`Ticket.deaths`). An operation that
was under way at such a death runs with nothing beside it in any runtime, so that the next death blames nobody else.
Not responsible for where it is written (`store/under_way.py`), nor for what follows from a count (the lanes).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from workers.tickets import Entry


@dataclass(frozen=True, slots=True)
class Mark:
    """Request ids. `again`: of settled operations that are executed once more to bring their model back."""

    running: tuple[str, ...] = ()
    again: tuple[str, ...] = ()


WriteMark = Callable[[Mark, bool], None]
"""Keeps a mark in place of the last one, or says in the log why not; True = durably, which takes a while."""


class UnderWay:
    """One for all runtimes of a server. `write` None = nobody wants to know.

    An operation is under way while a call of a worker executes it and until its outcome is written.
    """

    def __init__(self, write: WriteMark | None = None) -> None:
        self._write = write
        self._written = Mark()
        self._durable = False
        """Whether what is written is on disk."""
        self._writing = asyncio.Lock()
        self._calls: dict[object, Sequence[Entry]] = {}
        self._answering: set[Entry] = set()
        self._alone = False
        """Whether the one call is not to have another beside it."""
        self._waiting_alone = 0
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def call(self, entries: Sequence[Entry]) -> AsyncIterator[None]:
        """Around a call of a worker that executes these entries; waits until it may begin."""
        alone = any(entry.ticket.deaths for entry in entries)
        await self._wait(alone)
        key = object()
        self._calls[key], self._alone = entries, alone
        try:
            await self.mark()
            yield
        finally:
            del self._calls[key]
            self._alone = False
            self._changed.set()

    def answering(self, entry: Entry, begins: bool) -> None:
        """The outcome of an entry is about to be written, or is written by now (or kept, to be written later)."""
        if begins:
            self._answering.add(entry)
        else:
            self._answering.discard(entry)
            self._changed.set()
            if self._write is not None and not self._calls and not self._answering:
                self._write(Mark(), False)
                self._written, self._durable = Mark(), False

    async def mark(self) -> None:
        """Write what is under way now, if that has changed. What an earlier server left is worth a sync."""
        if self._write is None:
            return
        async with self._writing:
            called = [entry for entries in self._calls.values() for entry in entries]
            durable = any(entry.ticket.left_over or entry.again is not None for entry in called)
            entries = [*called, *self._answering]
            mark = Mark(_ids(e for e in entries if e.again is None), _ids(e for e in entries if e.again is not None))
            if mark == self._written and (self._durable or not durable):
                return
            if durable:
                await asyncio.to_thread(self._write, mark, True)
            else:
                self._write(mark, False)
            self._written, self._durable = mark, durable

    async def end(self) -> None:
        """The server stops in order: however that ends, it was not killed by what is under way."""
        async with self._writing:
            if self._write is not None:
                self._write(Mark(), False)
            self._write = None

    async def _wait(self, alone: bool) -> None:
        self._waiting_alone += alone
        try:
            while not self._may_begin(alone):
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._waiting_alone -= alone
            self._changed.set()

    def _may_begin(self, alone: bool) -> bool:
        if alone:
            return not self._calls and not self._answering
        return not self._alone and not self._waiting_alone


def _ids(entries: Iterable[Entry]) -> tuple[str, ...]:
    return tuple(sorted({entry.ticket.request_id for entry in entries}))
