"""One direction of a connection: numbered messages that are kept until the other side has confirmed them."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import Any


class Outbox:
    """Messages on their way. They are numbered from 0; `first` is the number of the oldest that is not confirmed."""

    def __init__(self) -> None:
        self._kept: deque[Any] = deque()
        self.first = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def end(self) -> int:
        """The number that the next message gets."""
        return self.first + len(self._kept)

    def put(self, message: Any) -> None:
        """Take a message in."""
        self._kept.append(message)
        self._changed.set()

    def confirm(self, count: int) -> None:
        """The other side has had `count` messages in all."""
        while self.first < count and self._kept:
            self._kept.popleft()
            self.first += 1

    def since(self, number: int, most: int) -> tuple[Any, ...]:
        """Up to `most` messages from `number` on."""
        start = number - self.first
        return tuple(itertools.islice(self._kept, start, start + most))

    async def wait(self, number: int, seconds: float) -> None:
        """Wait until there is a message with this number, for `seconds` at most."""
        if self.end > number:
            return
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def wake(self) -> None:
        """Let whoever waits look again."""
        self._changed.set()
