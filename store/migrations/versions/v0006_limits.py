"""Limits of projects and keys, what is counted against them, and which key made a training run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision: str | None = "0005"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None

_LEVELS = ("requests", "training", "sampling")
_COUNTS = ("operations", "held", "training_used", "training_reserved", "sampling_used", "sampling_reserved")


def upgrade() -> None:
    text = sa.String(collation="C") if op.get_bind().dialect.name == "postgresql" else sa.String()
    op.create_table(
        "limits",
        sa.Column("subject", text, nullable=False),
        sa.Column("name", text, nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("set_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("subject", "name", name="pk_limits"),
    )
    op.create_table(
        "limit_counters",
        sa.Column("subject", text, nullable=False),
        *(sa.Column(f"{name}_{what}", sa.Double(), nullable=True) for name in _LEVELS for what in ("level", "at")),
        sa.Column("sequence_tokens", sa.Double(), nullable=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0") for name in _COUNTS),
        sa.PrimaryKeyConstraint("subject", name="pk_limit_counters"),
    )
    op.add_column("operations", sa.Column("limited", sa.JSON(), nullable=True))
    op.add_column("runs", sa.Column("key_id", text, nullable=True))
