"""What each uploaded loss counts for, so that a sum over a project's need not read the graphs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision: str | None = "0007"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None

_ROW_BYTES = 512


def upgrade() -> None:
    op.add_column("custom_losses", sa.Column("size_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    postgres = op.get_bind().dialect.name == "postgresql"
    size = "octet_length(graph)" if postgres else "length(CAST(graph AS BLOB))"
    op.execute(f"UPDATE custom_losses SET size_bytes = {size} + {_ROW_BYTES}")
    op.create_index("ix_custom_losses_project_id_size_bytes", "custom_losses", ["project_id", "size_bytes"])
