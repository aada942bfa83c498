"""Coming down in order: no new work, accepted work within the grace, then the workers end.

Responsible for doing this once, whoever asks (a signal, or the application's own shutdown). Not responsible for signals
(`app/serve.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Lifecycle:
    """Whether the server is stopping, and the one task that stops it.

    Args:
        grace: seconds that accepted work may still take.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._stop: Callable[[float], Awaitable[None]] | None = None
        self._task: asyncio.Task[None] | None = None
        self.draining = False

    def on_drain(self, stop: Callable[[float], Awaitable[None]]) -> None:
        """Register what drains: called once, with the grace in seconds."""
        self._stop = stop

    async def drain(self) -> None:
        """Refuse new work, finish what was accepted, end the workers. Callers after the first wait for the same."""
        self.draining = True
        if self._stop is None:
            return
        if self._task is None:
            self._task = asyncio.ensure_future(self._stop(self._grace))
        await asyncio.shield(self._task)
