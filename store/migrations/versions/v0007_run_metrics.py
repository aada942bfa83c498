"""What each settled operation of a training run measured, for plots."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision: str | None = "0006"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    by_bytes = "C" if op.get_bind().dialect.name == "postgresql" else None
    op.create_table(
        "run_metrics",
        sa.Column("model_id", sa.String(collation=by_bytes), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.String(collation=by_bytes), nullable=False),
        sa.Column("at", sa.DateTime(), nullable=False),
        sa.Column("waited", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("gap", sa.Double(), nullable=True),
        sa.Column("kl", sa.Double(), nullable=True),
        sa.Column("grad_norm", sa.Double(), nullable=True),
        sa.Column("learning_rate", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("model_id", "seq_id", name="pk_run_metrics"),
        sa.ForeignKeyConstraint(["model_id"], ["runs.model_id"], name="fk_run_metrics_model_id_runs"),
    )
