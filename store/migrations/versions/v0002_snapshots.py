"""Snapshots of live runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision: str | None = "0001"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    op.create_table(
        "snapshots",
        sa.Column("file", sa.String(), nullable=False),
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("applied_seq", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("file", name="pk_snapshots"),
        sa.ForeignKeyConstraint(["model_id"], ["runs.model_id"], name="fk_snapshots_model_id_runs"),
    )
    op.create_index("ix_snapshots_model_id_applied_seq", "snapshots", ["model_id", "applied_seq"])
