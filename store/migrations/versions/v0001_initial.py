"""The first schema: projects, keys, sessions, runs, samplers, checkpoints, operation log, audit log, usage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    _tenants()
    _sessions()
    _checkpoints()
    _custom_losses()
    _operations()
    _sampling()
    _records()


def _tenants() -> None:
    op.create_table(
        "projects",
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("project_id", name="pk_projects"),
        sa.UniqueConstraint("name", name="uq_projects_name"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("last_used_at", sa.DateTime(), nullable=True),
        sa.Column("expires_at", sa.DateTime(), nullable=True),
        sa.Column("revoked_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.project_id"], name="fk_api_keys_project_id_projects"),
    )
    op.create_index("ix_api_keys_prefix", "api_keys", ["prefix"])


def _sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("idempotency_key", sa.String(), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("sdk_version", sa.String(), nullable=True),
        sa.Column("display_name", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("finish_reason", sa.String(), nullable=True),
        sa.Column("finish_detail", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(), nullable=False),
        sa.Column("ended_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("session_id", name="pk_sessions"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.project_id"], name="fk_sessions_project_id_projects"),
        sa.UniqueConstraint("project_id", "idempotency_key", name="uq_sessions_project_id_idempotency_key"),
    )
    op.create_index("ix_sessions_state_last_seen_at", "sessions", ["state", "last_seen_at"])
    op.create_table(
        "runs",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("model_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=True),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("optimizer_type", sa.String(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("last_request_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", name="pk_runs"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.project_id"], name="fk_runs_project_id_projects"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_runs_session_id_sessions"),
        sa.UniqueConstraint("session_id", "model_seq_id", name="uq_runs_session_id_model_seq_id"),
    )
    op.create_index("ix_runs_project_id_created_at", "runs", ["project_id", "created_at"])
    op.create_index("ix_runs_state", "runs", ["state"])
    op.create_table(
        "samplers",
        sa.Column("sampler_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("model_path", sa.String(), nullable=True),
        sa.Column("checkpoint_id", sa.String(), nullable=True),
        sa.Column("follows_model_id", sa.String(), nullable=True),
        sa.Column("clones", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("sampler_id", name="pk_samplers"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.project_id"], name="fk_samplers_project_id_projects"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_samplers_session_id_sessions"),
        sa.UniqueConstraint("session_id", "seq_id", name="uq_samplers_session_id_seq_id"),
    )


def _checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("checkpoint_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=True),
        sa.Column("folder", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("has_optimizer", sa.Boolean(), nullable=False),
        sa.Column("encrypted", sa.Boolean(), nullable=False),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("optimizer_type", sa.String(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("checkpoint_id", name="pk_checkpoints"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.project_id"], name="fk_checkpoints_project_id_projects"),
        sa.ForeignKeyConstraint(["model_id"], ["runs.model_id"], name="fk_checkpoints_model_id_runs"),
        sa.UniqueConstraint("folder", name="uq_checkpoints_folder"),
        sa.UniqueConstraint("model_id", "kind", "name", name="uq_checkpoints_model_id_kind_name"),
    )
    op.create_index("ix_checkpoints_project_id_created_at", "checkpoints", ["project_id", "created_at"])
    op.create_index("ix_checkpoints_expires_at", "checkpoints", ["expires_at"])


def _custom_losses() -> None:
    op.create_table(
        "custom_losses",
        sa.Column("loss_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("graph", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("loss_id", name="pk_custom_losses"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.project_id"], name="fk_custom_losses_project_id_projects"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_custom_losses_session_id_sessions"),
    )
    op.create_index("ix_custom_losses_session_id", "custom_losses", ["session_id"])


def _operations() -> None:
    op.create_table(
        "operations",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=True),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("content_type", sa.String(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=True),
        sa.Column("finished_at", sa.DateTime(), nullable=True),
        sa.Column("delivered_at", sa.DateTime(), nullable=True),
        sa.Column("settled_seq", sa.BigInteger(), nullable=True),
        sa.Column("checkpoint_id", sa.String(), nullable=True),
        sa.Column("body_ref", sa.JSON(), nullable=True),
        sa.Column("result_ref", sa.JSON(), nullable=True),
        sa.Column("body_inline", sa.LargeBinary(), nullable=True),
        sa.Column("result_inline", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("request_id", name="pk_operations"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.project_id"], name="fk_operations_project_id_projects"),
        sa.UniqueConstraint("scope", "seq_id", name="uq_operations_scope_seq_id"),
    )
    op.create_index("ix_operations_state", "operations", ["state"])
    op.create_index("ix_operations_scope_settled_seq", "operations", ["scope", "settled_seq"])


def _sampling() -> None:
    op.create_table(
        "inflight_slots",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint_id", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", name="pk_inflight_slots"),
        sa.ForeignKeyConstraint(["model_id"], ["runs.model_id"], name="fk_inflight_slots_model_id_runs"),
    )
    op.create_table(
        "sampled_sequences",
        sa.Column("sequence_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("checkpoint_id", sa.String(), nullable=True),
        sa.Column("temperature", sa.Double(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("plain_logprobs", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("sequence_id", name="pk_sampled_sequences"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_sampled_sequences_project_id_projects"
        ),
    )
    op.create_index("ix_sampled_sequences_created_at", "sampled_sequences", ["created_at"])


def _records() -> None:
    op.create_table(
        "events",
        sa.Column("event_id", sa.Integer(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("resource", sa.String(), nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name="pk_events"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.project_id"], name="fk_events_project_id_projects"),
    )
    op.create_index("ix_events_project_id_at", "events", ["project_id", "at"])
    op.create_table(
        "token_usage",
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("bucket_start", sa.DateTime(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "project_id", "bucket_start", "kind", "base_model", "session_id", name="pk_token_usage"
        ),
        sa.ForeignKeyConstraint(["project_id"], ["projects.project_id"], name="fk_token_usage_project_id_projects"),
    )
    op.create_table(
        "stored_checkpoints",
        sa.Column("checkpoint_id", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("deleted_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("checkpoint_id", name="pk_stored_checkpoints"),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.project_id"], name="fk_stored_checkpoints_project_id_projects"
        ),
    )
    op.create_index("ix_stored_checkpoints_project_id_deleted_at", "stored_checkpoints", ["project_id", "deleted_at"])
