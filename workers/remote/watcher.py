"""Tells edges how a runtime is, when that has changed: its state, its numbers, and why requests wait.

The edge answers its clients' polls from what it was told, so nothing is asked for while a client waits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection
from dataclasses import replace

from workers.remote.attachment import Attachment
from workers.remote.messages import Numbers, Reasons, Status
from workers.runtime import ModelRuntime
from workers.tickets import QueueState

STATE_SECONDS = 0.05
"""Time between two looks at the state."""
REASON_LOOKS = 10
"""Reasons are looked at every so many looks; numbers too."""
MOST_REASONS = 256
"""Requests of an edge, the oldest, whose reasons it is told."""


class Watcher:
    """Looks at a runtime. `clock` is monotonic seconds."""

    def __init__(self, runtime: ModelRuntime, clock: Callable[[], float]) -> None:
        self._runtime = runtime
        self._clock = clock
        self._since = clock()
        self._status = self._read_status()
        self._numbers = self._read_numbers()
        self._looks = 0

    def tell_all(self, edge: Attachment) -> None:
        """Everything, for an edge that knows nothing yet."""
        edge.events.put(self._read_status())
        edge.events.put(self._read_numbers())

    async def look(self, edges: Collection[Attachment]) -> None:
        """Wait a moment, then tell what is new."""
        await asyncio.sleep(STATE_SECONDS)
        self._looks += 1
        self.tell_status(edges)
        if self._looks % REASON_LOOKS:
            return
        numbers = self._read_numbers()
        if _timeless(numbers) != _timeless(self._numbers):
            self._numbers = numbers
            for edge in edges:
                edge.events.put(numbers)
        if self._runtime.state == "ready":  # otherwise the state is the reason, and the edge knows it
            for edge in edges:
                self._tell_reasons(edge)

    def tell_status(self, edges: Collection[Attachment]) -> None:
        """The state, if it has changed."""
        if self._runtime.state != self._status.state:
            self._since = self._clock()
        status = self._read_status()
        if replace(status, seconds=0.0) == replace(self._status, seconds=0.0):
            return
        self._status = status
        for edge in edges:
            edge.events.put(status)

    def _tell_reasons(self, edge: Attachment) -> None:
        changed: dict[str, QueueState] = {}
        for request_id, header in itertools.islice(edge.requests.items(), MOST_REASONS):
            reason = self._runtime.waiting(edge.ticket_id(header))
            if edge.told.get(request_id) != reason:
                changed[request_id] = edge.told[request_id] = reason
        if changed:
            edge.events.put(Reasons(changed))

    def _read_status(self) -> Status:
        runtime = self._runtime
        seconds = self._clock() - self._since
        return Status(runtime.state, seconds, runtime.info, runtime.failure, runtime.progress)

    def _read_numbers(self) -> Numbers:
        return Numbers(self._runtime.load(), self._runtime.throughput())


def _timeless(numbers: Numbers) -> Numbers:
    return replace(numbers, throughput=replace(numbers.throughput, wall_seconds=0.0))
