"""How often a server died while it executed an operation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision: str | None = "0002"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    op.add_column("operations", sa.Column("deaths", sa.BigInteger(), nullable=False, server_default="0"))
