"""What is submitted to the log: one request, how its result is encoded, and the rows that become true with it.

Not responsible for accepting (`operations.py`) or for recording outcomes (`settling.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.limit_charges import MOST_HELD_SECONDS
from app.services.tenant_limits import Cost
from schemas.operations import Operation, OperationResult, SampleDelta
from store.records import OperationRecord
from store.usage import TokenKind
from workers.runtime_protocol import Runtime

Rows = Callable[[AsyncSession], Awaitable[None]]
"""Row changes that belong into the same transaction as the operation's own."""


@dataclass(frozen=True, slots=True)
class Timing:
    """When an operation was accepted, began to run (None: not known) and had its result."""

    accepted: datetime
    started: datetime | None
    finished: datetime


class Measure(Protocol):
    """What is kept of an operation beside its result."""

    def weigh(self, operation: Operation) -> float:
        """What the sums of its result are to be divided by; called in a thread, when it is read back to run."""
        ...

    def rows(self, record: OperationRecord, outcome: OperationResult, weight: float | None, timing: Timing) -> Rows:
        """The rows that become true with the result. `weight` None: it was not weighed."""
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """The encoded result of an operation and the rows that become true with it."""

    data: bytes
    content_type: str
    rows: Rows | None = None
    tokens: Mapping[TokenKind, int] = field(default_factory=dict)
    """What the operation used, counted with its result."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One request on its way into the log.

    `digest` is of what the client sent, not of what the server drew (seeds, folders), so that a retry matches it.
    `body` is its canonical stored form. `model_id` is None for samples. `guard` runs in the transaction, only if the
    operation is new: what it raises refuses the request and leaves nothing behind.
    """

    project_id: str
    kind: str
    scope: str
    seq_id: int | None
    digest: str
    body: bytes
    runtime: Runtime
    model_id: str | None
    guard: Rows
    finish: Callable[[OperationResult], Finished]
    """Encodes the result; runs in a thread."""
    creates: bool = False
    """Whether this is request 0 of its model (`seq_id` then numbers the models of a session, not its requests)."""
    failed: Rows | None = None
    """Row changes that become true with a failure."""
    cleanup: Callable[[], Awaitable[None]] | None = None
    """Removes what a failed operation may have left on disk."""
    last: bool = False
    """Whether it runs after everything that the model has by now, whatever its own `seq_id`."""
    settled: Callable[[], None] | None = None
    """Called once a success is durable."""
    checkpoint_id: str | None = None
    """The checkpoint that it reads: it does not expire before this is settled."""
    left_over: bool = False
    """Whether an earlier process accepted it."""
    progress: Callable[[SampleDelta], None] | None = None
    """Told what a sample draws while it runs, each token once; called in the event loop, and must return at once."""
    also: Callable[[OperationRecord, OperationResult], Rows] | None = None
    """Further rows that become true with the result and depend on the operation's place in the log; made in a
    thread."""
    reads: str | None = None
    """The checkpoint folder that it reads: it is on this machine before the operation is accepted, and stays."""
    writes: str | None = None
    """The checkpoint folder that it writes: it is kept before the result is recorded."""
    measure: Measure | None = None
    """What is kept of it for plots."""
    cost: Cost = field(default_factory=Cost)
    """What limits are charged for it when it is accepted; a sample that is cancelled is counted with its `prompt`."""
    patience: float = MOST_HELD_SECONDS
    """Seconds for which a limit may hold it back."""


def resumed(
    record: OperationRecord,
    runtime: Runtime,
    model_id: str | None,
    finish: Callable[[OperationResult], Finished],
    **more: Any,
) -> Submission:
    """An accepted operation of an earlier process, as it was submitted there; `more` are further fields."""

    async def guard(db: AsyncSession) -> None:
        """Nothing to check: the operation is in the log already."""

    return Submission(
        project_id=record.project_id,
        kind=record.kind,
        scope=record.scope,
        seq_id=record.seq_id,
        digest=record.digest,
        body=b"",
        runtime=runtime,
        model_id=model_id,
        guard=guard,
        finish=finish,
        left_over=True,
        **more,
    )
