"""Servers that share a database: who is alive, who holds which run, who accepted which sample.

On PostgreSQL texts compare by their bytes from here on, as they do in SQLite: ids are looked up by ranges. A later
revision that adds a text column there gives it `sa.String(collation="C")`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision: str | None = "0003"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    op.create_table(
        "edges",
        sa.Column("edge_id", sa.String(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=False),
        sa.Column("until", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("edge_id", name="pk_edges"),
    )
    op.create_table(
        "run_leases",
        sa.Column("model_id", sa.String(), nullable=False),
        sa.Column("edge_id", sa.String(), nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", name="pk_run_leases"),
        sa.ForeignKeyConstraint(["model_id"], ["runs.model_id"], name="fk_run_leases_model_id_runs"),
    )
    op.create_index("ix_run_leases_edge_id", "run_leases", ["edge_id"])
    op.add_column("operations", sa.Column("edge_id", sa.String(), nullable=True))
    if op.get_bind().dialect.name == "postgresql":
        _compare_bytes()


def _compare_bytes() -> None:
    inspector = sa.inspect(op.get_bind())
    for table in inspector.get_table_names():
        names = [column["name"] for column in inspector.get_columns(table) if isinstance(column["type"], sa.String)]
        changes = ", ".join(f'ALTER COLUMN "{name}" TYPE varchar COLLATE "C"' for name in names)
        if changes and table != "alembic_version":
            op.execute(f'ALTER TABLE "{table}" {changes}')
