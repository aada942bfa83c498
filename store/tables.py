"""The tables, as SQLAlchemy sees them. Changing one needs a migration; a test compares the two.

Rows never leave `store`: each module turns its own into records. Not responsible for any rule but the constraints.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, kept as UTC. A naive one is refused: it would silently mean the server's own zone."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a zone cannot be stored")
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


class Base(DeclarativeBase):
    """Declares how Python types are kept; constraints have names, so that migrations can speak of them."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        datetime: UtcDateTime,
        dict[str, Any]: JSON(none_as_null=True),
        list[str]: JSON(none_as_null=True),
        str: String,
        bytes: LargeBinary,
        int: BigInteger,
    }


class Project(Base):
    __tablename__ = "projects"

    project_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_at: Mapped[datetime]


class ApiKey(Base):
    __tablename__ = "api_keys"

    key_id: Mapped[str] = mapped_column(primary_key=True)
    project_id: Mapped[str] = mapped_column(ForeignKey("projects.project_id"))
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
    created_at: Mapped[datetime]


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
    user_metadata: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]


class Operation(Base):
    """A body is either inline (`*_inline`) or a reference to a file (`*_ref`); both NULL once expired."""

    __tablename__ = "operations"
    __table_args__ = (UniqueConstraint("scope", "seq_id"), Index(None, "state"))

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
    finished_at: Mapped[datetime | None]
    delivered_at: Mapped[datetime | None]
    body_ref: Mapped[dict[str, Any] | None]
    result_ref: Mapped[dict[str, Any] | None]
    body_inline: Mapped[bytes | None]
    result_inline: Mapped[bytes | None]
