"""What travels between an edge and the server of a runtime, pickled, as on the pipes of the workers.

Both ends are the same program of the same version. Each direction is one ordered sequence of numbered messages: what
was not confirmed is sent again after a connection broke, and a number that was seen before is dropped.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.base_model_info import BaseModelInfo
from schemas.errors import TinsmithError
from schemas.operations import OperationResult, SampleDelta, SavedSnapshot
from workers.messages import PICKLE_PROTOCOL
from workers.recovery import Snapshot
from workers.runtime import Load, State
from workers.throughput import Throughput
from workers.tickets import QueueState


# -- frames: what one transfer carries ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Hello:
    """An edge begins to listen. `attachment` is the one that it knows and wants to go on with; `seen` is the number of
    events that it has had of it. `alone`: other edges are gone, for only one may have the store."""

    edge_id: str
    attachment: str | None
    seen: int
    alone: bool


@dataclass(frozen=True, slots=True)
class Welcome:
    """First on every stream of events. Another `attachment` than the edge knew: the server knows nothing of it (any
    more), and both directions begin anew. `received`: the number of messages that it has had. `fresh`: no other edge
    has used this server, so nothing of an earlier one can still be running."""

    attachment: str
    received: int
    fresh: bool


@dataclass(frozen=True, slots=True)
class Frame:
    """Messages of an edge, the first with number `first`; none = a sign of life. `seen`: events that it has had."""

    edge_id: str
    attachment: str
    first: int
    seen: int
    messages: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Events:
    """Events for an edge, the first with number `first`."""

    first: int
    events: tuple[Any, ...]


# -- edge -> server ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class OpenModel:
    """See `Runtime.open_model`."""

    model_id: str


@dataclass(frozen=True, slots=True)
class ReopenModel:
    """See `Runtime.reopen_model`. If the model is open, it is closed first: the log is the truth."""

    model_id: str
    next_seq: int
    cut_off: frozenset[int]


@dataclass(frozen=True, slots=True)
class Header:
    """A ticket without what cannot travel. `stream`: somebody listens to its tokens."""

    request_id: str
    project_id: str
    model_id: str | None
    seq_id: int | None
    is_step: bool
    changes: bool
    size: int
    undo: bool
    stream: bool
    begun: bool


@dataclass(frozen=True, slots=True)
class Submit:
    """See `Runtime.submit`."""

    header: Header


@dataclass(frozen=True, slots=True)
class NoteRefused:
    """See `Runtime.note_refused`."""

    model_id: str
    seq_id: int


@dataclass(frozen=True, slots=True)
class CloseModel:
    """See `Runtime.close_model`."""

    model_id: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """See `Runtime.cancel`."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Probe:
    """See `Runtime.probe`; answered by one `Probed`."""

    number: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a question of the server."""

    number: int
    value: Any = None
    error: TinsmithError | None = None


@dataclass(frozen=True, slots=True)
class Leave:
    """The edge goes: its models are closed, its samples dropped."""


# -- server -> edge ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Status:
    """How the runtime is. `seconds`: how long it has been in this state."""

    state: State
    seconds: float
    info: BaseModelInfo | None
    failure: TinsmithError | None
    progress: str | None


@dataclass(frozen=True, slots=True)
class Numbers:
    """What there is to do, and what was done."""

    load: Load
    throughput: Throughput


@dataclass(frozen=True, slots=True)
class Reasons:
    """Why requests have no result yet, of those for which that has changed."""

    states: Mapping[str, QueueState]


@dataclass(frozen=True, slots=True)
class Started:
    """A request begins to run, or to run again."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """New tokens of a sample."""

    request_id: str
    delta: SampleDelta


@dataclass(frozen=True, slots=True)
class Probed:
    """Whether the worker answers."""

    number: int
    answers: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """A question to the edge, answered by one `Reply` with its number."""

    number: int
    question: Any


# -- questions ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class OperationOf:
    """The operation of a submitted request, read back."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Undo:
    """Remove what a run of it that was cut off may have left on disk."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Settle:
    """Record an outcome; answered when that is done."""

    request_id: str
    outcome: OperationResult | TinsmithError


@dataclass(frozen=True, slots=True)
class Recall:
    """`History.recall`; answered with a `Remembered`."""

    model_id: str


@dataclass(frozen=True, slots=True)
class PastOperationOf:
    """One of the operations that `Recall` told of; `request_id` None = the creation of the model."""

    model_id: str
    request_id: str | None


@dataclass(frozen=True, slots=True)
class SnapshotPath:
    """`History.new_snapshot_path`."""


@dataclass(frozen=True, slots=True)
class KeepSnapshot:
    """`History.keep_snapshot`."""

    model_id: str
    applied_seq: int
    path: str
    saved: SavedSnapshot


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """`History.drop_snapshot`."""

    path: str


@dataclass(frozen=True, slots=True)
class RecordLost:
    """Models that cannot be brought back, to be recorded before their operations fail."""

    model_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RememberedOperation:
    """A `PastOperation` without the way to read it."""

    seq_id: int
    request_id: str
    is_step: bool
    size: int
    failed: bool


@dataclass(frozen=True, slots=True)
class Remembered:
    """A `Past` without the ways to read its operations."""

    project_id: str
    snapshots: tuple[Snapshot, ...]
    operations: tuple[RememberedOperation, ...]
    collected_seq: int


def pack(message: object) -> bytes:
    """Bytes for the way."""
    return pickle.dumps(message, protocol=PICKLE_PROTOCOL)


def unpack(data: bytes) -> Any:
    """What `pack` was given. Only for bytes that came over a link between our own processes."""
    return pickle.loads(data)
