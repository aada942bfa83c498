"""What the store hands out: frozen records, never ORM objects, so that nothing is loaded lazily outside a transaction.

Times are aware UTC datetimes, sizes are bytes. Not responsible for reading or writing them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from schemas.errors import TinsmithError
from schemas.operations import LoraSpec

SessionState = Literal["active", "finished", "expired"]
RunState = Literal["creating", "ready", "failed", "lost", "closed"]
CheckpointKind = Literal["training", "sampler", "external"]
OperationState = Literal["pending", "done", "failed", "refused", "expired"]


@dataclass(frozen=True, slots=True)
class ProjectRecord:
    """A tenant: every other object belongs to exactly one."""

    project_id: str
    name: str
    created_at: datetime
    archived_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class UserRecord:
    """A person who holds keys."""

    user_id: str
    name: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """What a user is in a project."""

    user: UserRecord
    project_id: str
    role: str
    since: datetime


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key without anything that would let its holder in."""

    key_id: str
    project_id: str
    name: str
    prefix: str
    """The first characters of the plaintext, to tell keys apart."""
    created_at: datetime
    last_used_at: datetime | None
    expires_at: datetime | None
    revoked_at: datetime | None
    role: str
    """What it may be used for: its own role, or that of its user in the project if that is less."""
    scopes: tuple[str, ...] | None = None
    """Permissions that it is narrowed to; None = all of its role."""
    user_id: str | None = None
    replaced_by: str | None = None
    """The key (id) that took its place."""
    shut_out: bool = False
    """Whether it lets nobody in for another reason than its own end: its project is archived, or its user does not
    belong to it any more."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One client program's session. `ended_at` is set as soon as the state is not `active`."""

    session_id: str
    project_id: str
    tags: tuple[str, ...]
    user_metadata: Mapping[str, Any]
    sdk_version: str | None
    display_name: str | None
    state: SessionState
    finish_reason: str | None
    finish_detail: str | None
    created_at: datetime
    last_seen_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A training run, the life of one adapter. `lora` is None until it is known (created from a checkpoint)."""

    model_id: str
    project_id: str
    session_id: str
    model_seq_id: int
    base_model: str
    lora: LoraSpec | None
    user_metadata: Mapping[str, Any]
    optimizer_type: str | None
    state: RunState
    created_at: datetime
    last_request_at: datetime


@dataclass(frozen=True, slots=True)
class SamplerRecord:
    """A sampling session: the base model (`checkpoint_id` None) or the weights of one checkpoint."""

    sampler_id: str
    project_id: str
    session_id: str
    seq_id: int
    base_model: str
    model_path: str | None
    checkpoint_id: str | None
    created_at: datetime
    follows_model_id: str | None = None
    """The run whose newest inflight weights it samples; `checkpoint_id` is None then."""


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """A sampled sequence of n tokens with what is known of how likely they were.

    `tokens` int32 [n], `logprobs` (as the client got them) and `plain_logprobs` (at temperature 1) float32 [n], each
    packed little-endian. `checkpoint_id` None: the base model.
    """

    sequence_id: str
    project_id: str
    base_model: str
    checkpoint_id: str | None
    temperature: float
    tokens: bytes
    logprobs: bytes
    plain_logprobs: bytes
    created_at: datetime


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A complete checkpoint. `name` None: ephemeral, reachable by id only. `folder`: for `ArtifactStore.path`."""

    checkpoint_id: str
    project_id: str
    model_id: str
    kind: CheckpointKind
    name: str | None
    folder: str
    size_bytes: int
    base_model: str
    lora: LoraSpec
    has_optimizer: bool
    encrypted: bool
    """Whether each file is kept only as `{name}.age`."""
    public: bool
    """Whether other projects may read it by its path."""
    optimizer_type: str
    """Of the run that wrote it, whether or not its state was kept."""
    user_metadata: Mapping[str, Any]
    created_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, slots=True)
class BodyRef:
    """A large body that lives in a file: its generated name, its size in bytes and its SHA-256 (hex)."""

    name: str
    size: int
    sha256: str


Body = bytes | BodyRef


@dataclass(frozen=True, slots=True)
class NewOperation:
    """A validated request, about to be written to the operation log.

    `scope` orders `seq_id`s and makes them unique, e.g. `model:{model_id}`; `digest` is taken over the canonical body.
    """

    request_id: str
    project_id: str
    kind: str
    scope: str
    seq_id: int | None
    digest: str
    body: Body
    created_at: datetime
    checkpoint_id: str | None = None
    """The checkpoint that a sample reads; it is kept until the sample is settled."""


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """One line of the operation log.

    `result` and `content_type` are set if `done`, `error` if `failed`; once `expired` bodies and outcome are gone
    (`body` is then empty bytes) and only the identity of the request is kept.
    """

    request_id: str
    project_id: str
    kind: str
    scope: str
    seq_id: int | None
    digest: str
    body: Body
    state: OperationState
    result: Body | None
    content_type: str | None
    error: TinsmithError | None
    created_at: datetime
    finished_at: datetime | None
    delivered_at: datetime | None
    """When the outcome was handed out for the first time."""
    checkpoint_id: str | None = None
    deaths: int = 0
    """How often a server was killed while it executed this."""
    limited: Mapping[str, Any] | None = None
    """What was counted for it against limits, and until when it is held back; None: there are no limits."""


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """A line of a model's log without its bodies. `size`: bytes of the request's body; None once it is gone. `deaths`:
    how often a server was killed while it executed this again."""

    request_id: str
    kind: str
    seq_id: int
    state: OperationState
    error_code: str | None
    size: int | None
    deaths: int


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A recorded snapshot of a run: the name of its file, and its SHA-256 (hex)."""

    file: str
    model_id: str
    applied_seq: int
    size_bytes: int
    sha256: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Completion:
    """An outcome as a line of its scope's list: `place` is its cursor, `size` the bytes of a result."""

    request_id: str
    place: int
    finished: bool
    size: int | None


@dataclass(frozen=True, slots=True)
class EventRecord:
    """A line of the audit log. `event` is `{resource}_{action}`."""

    event: str
    at: datetime
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenUsageRecord:
    """Tokens of one kind in the hour that begins at `bucket_start`."""

    bucket_start: datetime
    kind: str
    base_model: str
    session_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """How long a checkpoint of `size_bytes` was stored; `deleted_at` None = it still is."""

    base_model: str
    session_id: str
    size_bytes: int
    created_at: datetime
    deleted_at: datetime | None


@dataclass(frozen=True, slots=True)
class TimelineRecord:
    """When an operation was accepted, began to run, had an outcome, and was delivered for the first time."""

    request_id: str
    kind: str
    scope: str
    seq_id: int | None
    state: OperationState
    error_code: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    delivered_at: datetime | None


MetricKind = Literal["forward_backward", "optim_step"]


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """What one settled operation of a run measured.

    `loss` is a sum; `weight` is what to divide it by for a mean per token that counts. `gap` (mean distance of the
    trainer's logprob from the sampler's) and `kl` are over the same positions. `waited` is seconds from acceptance to
    start, `seconds` from there to the result. `steps`: optimizer steps that the row stands for (0 for a batch).
    """

    seq_id: int
    kind: MetricKind
    at: datetime
    waited: float
    seconds: float
    tokens: int = 0
    steps: int = 0
    loss: float | None = None
    weight: float = 0.0
    gap: float | None = None
    kl: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True)
class WaitingRecord:
    """An operation without an outcome, without its body."""

    request_id: str
    kind: str
    scope: str
    seq_id: int | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """An operation that failed, and what its client was told."""

    request_id: str
    kind: str
    scope: str
    seq_id: int | None
    error: TinsmithError
    finished_at: datetime


@dataclass(frozen=True, slots=True)
class SessionSummaryRecord:
    """A session, and the named checkpoints of its runs: how many, and their size in bytes."""

    session: SessionRecord
    checkpoints_count: int
    checkpoint_storage_bytes: int
