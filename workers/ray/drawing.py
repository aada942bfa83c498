"""One sample on its way through sampling replicas: how often it was sent, what runs, how long it has waited.

Pure but for the task that it names. Not responsible for sending it (`workers/ray/sampler_client.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import TinsmithError
from schemas.operations import SampleResult


@dataclass(slots=True)
class Drawing:
    """A sample that was handed to Serve."""

    task: asyncio.Task[SampleResult | TinsmithError]
    sequences: int
    prompt: int
    """Tokens."""
    runs: int
    """How often it was sent to a replica, so that each request has an id of its own."""
    response: Any = None
    """Serve's stream of the run that is under way."""
    limit: asyncio.Timeout | None = None
    """Of that run, until it has begun."""
    given_back: float | None = None
    """When a replica gave it back; None when it has begun on another one, or was never given back."""
    waited: float = 0.0
    """Seconds from being given back to beginning anew, of earlier times."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """It need not pause any longer: nobody wants it."""

    def give_back(self, now: float) -> None:
        """A replica gave it back: it waits for another one from now on, if it did not already."""
        if self.given_back is None:
            self.given_back = now

    def begin(self, now: float) -> None:
        """It runs: it waits for no other replica, and may take as long as it likes."""
        self.waited, self.given_back = self.waited_until(now), None
        if self.limit is not None:
            self.limit.reschedule(None)

    def waited_until(self, now: float) -> float:
        """Seconds for which it has waited for replicas to be replaced, all times together: were each time counted
        alone, a sample that ends every worker could run for ever."""
        return self.waited + (0.0 if self.given_back is None else now - self.given_back)
