"""What the edge needs of the runtime of one base model, wherever that runtime lives.

`workers.runtime.ModelRuntime` is one in the same process; `workers.remote.RemoteRuntime` speaks to one in another
process. All methods are called from one event loop and those that are not coroutines answer at once.
"""

from __future__ import annotations

from typing import Protocol

from schemas.base_model_info import BaseModelInfo
from schemas.errors import TinsmithError
from workers.runtime import Load, State
from workers.throughput import Throughput
from workers.tickets import QueueState, Ticket


class Runtime(Protocol):
    """One base model: it takes operations in, in any order, and answers each exactly once."""

    @property
    def name(self) -> str:
        """The base model's name as clients say it."""
        ...

    @property
    def state(self) -> State: ...

    @property
    def info(self) -> BaseModelInfo | None:
        """What is known of the base model once it is loaded."""
        ...

    @property
    def failure(self) -> TinsmithError | None:
        """Why the state is "failed"."""
        ...

    @property
    def progress(self) -> str | None:
        """What is being done while it starts, in words; None once it runs."""
        ...

    async def start(self) -> None:
        """Begin to load the base model in the background; returns at once."""
        ...

    async def stop(self, grace: float) -> None:
        """Refuse new work, finish what is queued within `grace` seconds, fail the rest with `Unavailable`."""
        ...

    async def probe(self, timeout: float) -> bool:  # noqa: ASYNC109 (a plain number crosses to any transport)
        """Whether the base model is loaded and its worker really answers."""
        ...

    def open_model(self, model_id: str) -> None:
        """Expect the operations of a training run, from its creation (seq_id 0) on."""
        ...

    def reopen_model(self, model_id: str, next_seq: int, cut_off: frozenset[int]) -> None:
        """Bring back a training run of an earlier process; see `ModelRuntime.reopen_model`."""
        ...

    def submit(self, ticket: Ticket) -> None:
        """Take an operation in. Never blocks and never raises: what cannot run is told through `ticket.done`."""
        ...

    def note_refused(self, model_id: str, seq_id: int) -> None:
        """A refused request consumed this seq_id: nothing waits for it."""
        ...

    def close_model(self, model_id: str) -> None:
        """The training run is over: free its adapter, fail what waits with `Gone`."""
        ...

    def cancel(self, request_id: str) -> None:
        """Nobody wants this sample any more: it stops soon, and ends with `Cancelled`, or with its result if it was
        done by then."""
        ...

    def waiting(self, request_id: str) -> QueueState:
        """Why a request has no result yet."""
        ...

    def samples_waiting(self, project_id: str) -> int:
        """How many samples of a project wait to be handed to the worker."""
        ...

    def throughput(self) -> Throughput:
        """What training and sampling have computed so far, and how fast."""
        ...

    def load(self) -> Load:
        """What there is to do now."""
        ...
