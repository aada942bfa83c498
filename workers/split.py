"""One base model in two places: a runtime that trains, and samplers with copies of the weights of their own.

Responsible for sending each operation where it belongs, and for speaking of both as of one. Not responsible for either.
Saved adapters are what goes from one to the other: samples name the folder of one, never a live training run.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Protocol

from schemas.base_model_info import BaseModelInfo
from schemas.errors import TinsmithError
from workers.runtime import Load, State
from workers.runtime_protocol import Runtime
from workers.throughput import Throughput
from workers.tickets import QueueState, Ticket


class Samplers(Protocol):
    """The part of `Runtime` that sampling needs; each method as there."""

    @property
    def state(self) -> State: ...
    @property
    def failure(self) -> TinsmithError | None: ...
    @property
    def progress(self) -> str | None: ...
    async def start(self) -> None: ...
    async def stop(self, grace: float) -> None: ...
    async def probe(self, timeout: float) -> bool: ...  # noqa: ASYNC109 (a plain number crosses to any transport)
    def submit(self, ticket: Ticket) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def waiting(self, request_id: str) -> QueueState:
        """As in `Runtime`; without a reason for a request that is not here."""
        ...

    def samples_waiting(self, project_id: str) -> int: ...
    def throughput(self) -> Throughput: ...
    def load(self) -> Load: ...


_WORST_FIRST: tuple[State, ...] = ("failed", "starting", "restarting", "ready")


class SplitRuntime:
    """Implements `workers.runtime_protocol.Runtime`. All methods are called from one event loop.

    Args:
        training: runs everything but samples.
        samplers: run the samples.
    """

    def __init__(self, training: Runtime, samplers: Samplers) -> None:
        self._training = training
        self._samplers = samplers

    @property
    def name(self) -> str:
        """See `Runtime.name`."""
        return self._training.name

    @property
    def state(self) -> State:
        """That of the half that is worse off: both are needed."""
        return min(self._training.state, self._samplers.state, key=_WORST_FIRST.index)

    @property
    def info(self) -> BaseModelInfo | None:
        """See `Runtime.info`."""
        return self._training.info

    @property
    def failure(self) -> TinsmithError | None:
        """See `Runtime.failure`."""
        return self._training.failure or self._samplers.failure

    @property
    def progress(self) -> str | None:
        """See `Runtime.progress`: of training, until that has loaded."""
        training_waits = self._training.state in ("starting", "restarting")
        return self._training.progress if training_waits else self._samplers.progress

    async def start(self) -> None:
        """See `Runtime.start`."""
        await self._training.start()
        await self._samplers.start()

    async def stop(self, grace: float) -> None:
        """See `Runtime.stop`. Training first: samplers that others share go with the last who trains beside them."""
        began = time.monotonic()
        await self._training.stop(grace)
        await self._samplers.stop(max(0.0, grace - (time.monotonic() - began)))

    async def probe(self, timeout: float) -> bool:  # noqa: ASYNC109 (a plain number crosses to any transport)
        """Whether both halves answer."""
        return all(await asyncio.gather(self._training.probe(timeout), self._samplers.probe(timeout)))

    def open_model(self, model_id: str) -> None:
        """See `Runtime.open_model`."""
        self._training.open_model(model_id)

    def reopen_model(self, model_id: str, next_seq: int, cut_off: frozenset[int]) -> None:
        """See `Runtime.reopen_model`."""
        self._training.reopen_model(model_id, next_seq, cut_off)

    def submit(self, ticket: Ticket) -> None:
        """See `Runtime.submit`."""
        (self._samplers if ticket.model_id is None else self._training).submit(ticket)

    def note_refused(self, model_id: str, seq_id: int) -> None:
        """See `Runtime.note_refused`."""
        self._training.note_refused(model_id, seq_id)

    def close_model(self, model_id: str) -> None:
        """See `Runtime.close_model`."""
        self._training.close_model(model_id)

    def cancel(self, request_id: str) -> None:
        """See `Runtime.cancel`: only samples can be."""
        self._samplers.cancel(request_id)

    def waiting(self, request_id: str) -> QueueState:
        """See `Runtime.waiting`."""
        found = self._samplers.waiting(request_id)
        return found if found.reason is not None else self._training.waiting(request_id)

    def samples_waiting(self, project_id: str) -> int:
        """See `Runtime.samples_waiting`."""
        return self._samplers.samples_waiting(project_id)

    def throughput(self) -> Throughput:
        """See `Runtime.throughput`."""
        return replace(self._training.throughput(), sampling=self._samplers.throughput().sampling)

    def load(self) -> Load:
        """See `Runtime.load`."""
        return replace(self._training.load(), samples=self._samplers.load().samples)
