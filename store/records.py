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


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A complete checkpoint. `name` None: ephemeral, reachable by id only. `folder` is a name for `Artifacts.path`."""

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
