"""The interface of a sampling engine: requests join and leave a running batch at every step.

It has weights of its own (base and saved adapters) and never trains. `step` is short, so that a worker can put training
between steps and a cancelled request stops within one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from schemas.errors import Cancelled, TinsmithError
from schemas.operations import (
    Sample,
    SampleDelta,
    SampleResult,
    SamplerLoad,
    SampleStats,
    SampleTurn,
    SampleTurnResult,
    TopK,
)


@dataclass(slots=True)
class SampleStep:
    """What one step brought: requests that ended, and new tokens of those that asked for `stream`."""

    ended: dict[str, SampleResult | TinsmithError] = field(default_factory=dict)
    deltas: dict[str, list[SampleDelta]] = field(default_factory=dict)


class SamplingEngine(ABC):
    """Draws tokens and scores prompts for any number of requests at once. Used by one thread at a time."""

    @classmethod
    @abstractmethod
    def check(cls) -> None:
        """Raise `Unavailable` naming what is missing and how to install it, before any process starts."""

    @abstractmethod
    def add(self, request_id: str, sample: Sample) -> None:
        """Take a request in; it waits inside until there is room. Raises `InvalidRequest` if it can never run."""

    @abstractmethod
    def cancel(self, request_id: str) -> Cancelled | None:
        """Forget a request and free its rows before the next step.

        Returns what it took until now: all zeros if it had not begun, None if it is unknown or has ended.
        """

    @abstractmethod
    def step(self) -> SampleStep:
        """One pass over the running batch: at most one more token per row, and a piece of waiting prompts.

        A request that fails ends with its own error; the others never notice.
        """

    @property
    @abstractmethod
    def load(self) -> SamplerLoad:
        """How full the engine is."""

    @abstractmethod
    def take_stats(self) -> SampleStats:
        """What was done since the last call."""

    def turn(self, turn: SampleTurn) -> SampleTurnResult:
        """Forget, take in, then step until the turn's tokens or seconds are used up (at least one step).

        What is forgotten ends with `Cancelled`, unless it is taken in again.
        """
        result = SampleStep()
        for request_id in turn.cancelled:
            stopped = self.cancel(request_id)
            if stopped is not None and request_id not in turn.added:
                result.ended[request_id] = stopped
        for request_id, sample in turn.added.items():
            try:
                self.add(request_id, sample)
            except TinsmithError as error:
                result.ended[request_id] = error
        deadline = time.monotonic() + turn.seconds
        steps = 0
        while self.load.active and (steps < turn.steps or self._in_time(deadline)):
            step = self.step()
            steps += 1
            result.ended |= step.ended
            for request_id, new in step.deltas.items():
                result.deltas.setdefault(request_id, []).extend(new)
            if step.ended and self.load.waiting == 0:
                break  # whoever waits outside may use the room
        deltas = {request_id: _joined(found) for request_id, found in result.deltas.items()}
        return SampleTurnResult(result.ended, deltas, self.load, self.take_stats())

    def _in_time(self, deadline: float) -> bool:
        """Whether a turn may go on, by the monotonic clock."""
        return time.monotonic() < deadline


def _joined(deltas: Sequence[SampleDelta]) -> tuple[SampleDelta, ...]:
    """One delta for each sequence: with 64 rows of 8 steps they cross to another process in a ninth of the time."""
    by_index: dict[int, list[SampleDelta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return tuple(_join(index, parts) for index, parts in by_index.items())


def _join(index: int, parts: Sequence[SampleDelta]) -> SampleDelta:
    if len(parts) == 1:
        return parts[0]
    tops = [part.topk for part in parts if part.topk is not None]
    topk = None
    if len(tops) == len(parts):
        topk = TopK(np.concatenate([top.ids for top in tops]), np.concatenate([top.logprobs for top in tops]))
    tokens = np.concatenate([part.tokens for part in parts])
    logprobs = np.concatenate([part.logprobs for part in parts])
    return SampleDelta(index, tokens, logprobs, topk, parts[-1].stop_reason)
