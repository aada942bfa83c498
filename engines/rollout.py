"""The interface of a rollout engine: it draws tokens and scores prompts. Weights of its own: it never trains.

Generation is a resumable object, so that a worker can put training steps between the tokens of a long sample and
can stop a cancelled one within a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from schemas.errors import TinsmithError
from schemas.operations import Sample, SampleResult


class Generation(ABC):
    """A running batch of samples, keyed by request id."""

    @abstractmethod
    def step(self, tokens: int) -> Mapping[str, SampleResult | TinsmithError]:
        """Decode up to `tokens` more tokens per row; returns the requests that ended in this call."""

    @abstractmethod
    def cancel(self, request_id: str) -> None:
        """Drop a request; unknown or finished ids are ignored."""

    @property
    @abstractmethod
    def active(self) -> Sequence[str]:
        """Requests not yet returned by `step`. Empty means that the batch is done."""


class RolloutEngine(ABC):
    """Starts generations over one base model and any number of saved adapters."""

    @abstractmethod
    def start(self, requests: Mapping[str, Sample]) -> Generation:
        """Begin a batch. A request that is broken by itself (adapter unreadable) fails alone, at its first `step`."""
