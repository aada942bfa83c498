"""The tables, as SQLAlchemy sees them. Changing one needs a migration; a test compares the two.

Rows never leave `store`: each module turns its own into records. Not responsible for any rule but the constraints.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import ForeignKey, Index, Integer, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from store.table_base import Base

metadata = Base.metadata
"""Of all tables."""


class Project(Base):
    __tablename__ = "projects"

    project_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]
    archived_at: Mapped[datetime | None]
    """Since when none of its keys lets anybody in."""


class User(Base):
    """A person who holds keys."""

    __tablename__ = "users"

    user_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]
    """The row stays: keys and audit lines name it."""


class Membership(Base):
    """What a user is in a project: the most that the user's keys there may do."""

    __tablename__ = "memberships"

    user_id: Mapped[str] = mapped_column(ForeignKey("users.user_id"), primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"), primary_key=True, index=True)
    role: Mapped[str]
    created_at: Mapped[datetime]


class ApiKey(Base):
    """What lets in. Without `user_id` it is a program's; with `replaced_by` another one has taken its place."""

    __tablename__ = "api_keys"

    key_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"), index=True)
    user_id: Mapped[str | None] = mapped_column(ForeignKey("users.user_id"), index=True)
    role: Mapped[str]
    scopes: Mapped[list[str] | None]
    replaced_by: Mapped[str | None]
    name: Mapped[str]
    prefix: Mapped[str] = mapped_column(index=True)
    digest: Mapped[bytes]
    created_at: Mapped[datetime]
    last_used_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class Session(Base):
    __tablename__ = "sessions"
    __table_args__ = (
        UniqueConstraint("project_id", "idempotency_key"),
        Index(None, "state", "last_seen_at"),
    )

    session_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"))
    idempotency_key: Mapped[str | None]
    tags: Mapped[list[str]]
    user_metadata: Mapped[dict[str, Any]]
    sdk_version: Mapped[str | None]
    display_name: Mapped[str | None]
    state: Mapped[str]
    finish_reason: Mapped[str | None]
    finish_detail: Mapped[str | None]
    created_at: Mapped[datetime]
    last_seen_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class Run(Base):
    __tablename__ = "runs"
    __table_args__ = (
        UniqueConstraint("session_id", "model_seq_id"),
        Index(None, "project_id", "created_at"),
        Index(None, "state"),
    )

    model_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"))
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"))
    model_seq_id: Mapped[int]
    base_model: Mapped[str]
    lora: Mapped[dict[str, Any] | None]
    user_metadata: Mapped[dict[str, Any]]
    optimizer_type: Mapped[str | None]
    state: Mapped[str]
    created_at: Mapped[datetime]
    last_request_at: Mapped[datetime]
    key_id: Mapped[str | None]


class Sampler(Base):
    """`checkpoint_id` is no foreign key: the sampler's identity outlives a deleted checkpoint."""

    __tablename__ = "samplers"
    __table_args__ = (UniqueConstraint("session_id", "seq_id"),)

    sampler_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"))
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"))
    seq_id: Mapped[int]
    base_model: Mapped[str]
    model_path: Mapped[str | None]
    checkpoint_id: Mapped[str | None]
    follows_model_id: Mapped[str | None]
    clones: Mapped[int]
    created_at: Mapped[datetime]


class InflightSlot(Base):
    """The mutable weights of a run's inflight samplers: the checkpoint of the newest such save."""

    __tablename__ = "inflight_slots"

    model_id: Mapped[str] = mapped_column(ForeignKey("runs.model_id"), primary_key=True)
    seq_id: Mapped[int]
    checkpoint_id: Mapped[str]


class SampledSequence(Base):
    """What was drawn, and how likely it was: float32 and int32 values, little-endian. No foreign key to a checkpoint,
    which may go first."""

    __tablename__ = "sampled_sequences"

    sequence_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"))
    base_model: Mapped[str]
    checkpoint_id: Mapped[str | None]
    temperature: Mapped[float]
    tokens: Mapped[bytes]
    logprobs: Mapped[bytes]
    plain_logprobs: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(index=True)


class Checkpoint(Base):
    """Names are unique per run and kind; ephemeral ones have none (NULLs never clash)."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        UniqueConstraint("model_id", "kind", "name"),
        Index(None, "project_id", "created_at"),
        Index(None, "expires_at"),
    )

    checkpoint_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"))
    model_id: Mapped[str] = mapped_column(ForeignKey("runs.model_id"))
    kind: Mapped[str]
    name: Mapped[str | None]
    folder: Mapped[str] = mapped_column(unique=True)
    size_bytes: Mapped[int]
    base_model: Mapped[str]
    lora: Mapped[dict[str, Any]]
    has_optimizer: Mapped[bool]
    encrypted: Mapped[bool]
    public: Mapped[bool]
    optimizer_type: Mapped[str]
    user_metadata: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]


class CustomLoss(Base):
    """The graph of an uploaded loss; `loss_id` names session and number. `size_bytes` is what it counts for."""

    __tablename__ = "custom_losses"
    __table_args__ = (Index(None, "session_id"), Index(None, "project_id", "size_bytes"))

    loss_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"))
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id"))
    name: Mapped[str]
    graph: Mapped[str]
    created_at: Mapped[datetime]
    size_bytes: Mapped[int] = mapped_column(default=0, server_default="0")


class Operation(Base):
    """A body is either inline (`*_inline`) or a reference to a file (`*_ref`); both NULL once expired. `settled_seq`
    numbers the outcomes of a scope in the order in which they became durable. `checkpoint_id` is what a sample reads:
    it stays as long as such a sample is pending. `deaths` is how often a server was killed while it executed the
    operation, in a row as long as that is pending. `edge_id`: of several servers, the one that runs a sample.
    `limited`: what was counted for it against limits (`store/limit_counters.py`); NULL where there are none."""

    __tablename__ = "operations"
    __table_args__ = (
        UniqueConstraint("scope", "seq_id"),
        Index(None, "state"),
        Index(None, "scope", "settled_seq"),
    )

    request_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"))
    kind: Mapped[str]
    scope: Mapped[str]
    seq_id: Mapped[int | None]
    digest: Mapped[str]
    state: Mapped[str]
    content_type: Mapped[str | None]
    error: Mapped[dict[str, Any] | None]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    delivered_at: Mapped[datetime | None]
    settled_seq: Mapped[int | None]
    checkpoint_id: Mapped[str | None]
    edge_id: Mapped[str | None]
    body_ref: Mapped[dict[str, Any] | None]
    result_ref: Mapped[dict[str, Any] | None]
    body_inline: Mapped[bytes | None]
    result_inline: Mapped[bytes | None]
    deaths: Mapped[int] = mapped_column(default=0, server_default="0")
    limited: Mapped[dict[str, Any] | None]


class Snapshot(Base):
    """A file with the whole state of a run after all its operations up to `applied_seq`, from which it goes on when the
    process that holds it has died."""

    __tablename__ = "snapshots"
    __table_args__ = (Index(None, "model_id", "applied_seq"),)

    file: Mapped[str] = mapped_column(primary_key=True)
    model_id: Mapped[str] = mapped_column(ForeignKey("runs.model_id"))
    applied_seq: Mapped[int]
    size_bytes: Mapped[int]
    sha256: Mapped[str]
    created_at: Mapped[datetime]


class RunMetric(Base):
    """What one settled operation of a run measured. Sums add up over rows (`loss` over `weight` is a mean); `steps` is
    how many optimizer steps the row of a step stands for, once rows of a long run were merged. `gap` and `kl` are means
    over `weight`. A number that is not finite, or was not measured, is NULL."""

    __tablename__ = "run_metrics"

    model_id: Mapped[str] = mapped_column(ForeignKey("runs.model_id"), primary_key=True)
    seq_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kind: Mapped[str]
    at: Mapped[datetime]
    waited: Mapped[float]
    seconds: Mapped[float]
    tokens: Mapped[int]
    steps: Mapped[int]
    loss: Mapped[float | None]
    weight: Mapped[float]
    gap: Mapped[float | None]
    kl: Mapped[float | None]
    grad_norm: Mapped[float | None]
    learning_rate: Mapped[float | None]


class Edge(Base):
    """A server of several on one database. It is alive `until` a time of the database's clock."""

    __tablename__ = "edges"

    edge_id: Mapped[str] = mapped_column(primary_key=True)
    started_at: Mapped[datetime]
    until: Mapped[datetime]


class RunLease(Base):
    """Which server executes the operations of a run. `fence` grows whenever another one takes the run over."""

    __tablename__ = "run_leases"

    model_id: Mapped[str] = mapped_column(ForeignKey("runs.model_id"), primary_key=True)
    edge_id: Mapped[str] = mapped_column(index=True)
    fence: Mapped[int]


class Event(Base):
    """A line of the audit log. `resource` is the first word of `event`, for filtering."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "project_id", "at"),)

    event_id: Mapped[int] = mapped_column(Integer, primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"))
    at: Mapped[datetime]
    resource: Mapped[str]
    event: Mapped[str]
    details: Mapped[dict[str, Any]]


class TokenUsage(Base):
    """Tokens of one kind in one hour, added up by what they are attributed to."""

    __tablename__ = "token_usage"

    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"), primary_key=True)
    bucket_start: Mapped[datetime] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    base_model: Mapped[str] = mapped_column(primary_key=True)
    session_id: Mapped[str] = mapped_column(primary_key=True)
    tokens: Mapped[int]


class StoredCheckpoint(Base):
    """How long a checkpoint took how much storage: outlives the checkpoint itself."""

    __tablename__ = "stored_checkpoints"
    __table_args__ = (Index(None, "project_id", "deleted_at"),)

    checkpoint_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"))
    session_id: Mapped[str]
    base_model: Mapped[str]
    size_bytes: Mapped[int]
    created_at: Mapped[datetime]
    deleted_at: Mapped[datetime | None]


class Limit(Base):
    """A limit of a subject (`project:ID` or `key:ID`). `value` NULL: expressly none."""

    __tablename__ = "limits"

    subject: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    set_at: Mapped[datetime]


class LimitCounter(Base):
    """What a subject has used of its limits. `*_level` is what was in a token bucket at the time `*_at` (seconds of the
    epoch), negative if more was promised than was there; NULL is a full one. `operations` are those that may run and
    are not finished, `held` those that wait for one of them to end. `*_reserved` is what unfinished operations may take
    from a budget, `*_used` what finished ones took. `sequence_tokens`: what a sampled sequence drew lately, on
    average."""

    __tablename__ = "limit_counters"

    subject: Mapped[str] = mapped_column(primary_key=True)
    requests_level: Mapped[float | None]
    requests_at: Mapped[float | None]
    training_level: Mapped[float | None]
    training_at: Mapped[float | None]
    sampling_level: Mapped[float | None]
    sampling_at: Mapped[float | None]
    sequence_tokens: Mapped[float | None]
    operations: Mapped[int] = mapped_column(default=0, server_default="0")
    held: Mapped[int] = mapped_column(default=0, server_default="0")
    training_used: Mapped[int] = mapped_column(default=0, server_default="0")
    training_reserved: Mapped[int] = mapped_column(default=0, server_default="0")
    sampling_used: Mapped[int] = mapped_column(default=0, server_default="0")
    sampling_reserved: Mapped[int] = mapped_column(default=0, server_default="0")
