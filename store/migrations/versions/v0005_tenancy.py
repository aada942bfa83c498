"""Users, what they are in projects, and what keys may do.

Keys that were there before could do everything in their project: they become `owner`, which is that. The key in the
server's own file becomes `admin` when a server starts, for only the server knows which it is.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision: str | None = "0004"
branch_labels: tuple[str, ...] | None = None
depends_on: tuple[str, ...] | None = None


def upgrade() -> None:
    text = sa.String(collation="C") if op.get_bind().dialect.name == "postgresql" else sa.String()
    op.create_table(
        "users",
        sa.Column("user_id", text, nullable=False),
        sa.Column("name", text, nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("deleted_at", sa.DateTime(), nullable=True),
        sa.PrimaryKeyConstraint("user_id", name="pk_users"),
        sa.UniqueConstraint("name", name="uq_users_name"),
    )
    op.create_table(
        "memberships",
        sa.Column("user_id", text, nullable=False),
        sa.Column("project_id", text, nullable=False),
        sa.Column("role", text, nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("user_id", "project_id", name="pk_memberships"),
        sa.ForeignKeyConstraint(["user_id"], ["users.user_id"], name="fk_memberships_user_id_users"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.project_id"], name="fk_memberships_project_id_projects"),
    )
    op.create_index("ix_memberships_project_id", "memberships", ["project_id"])
    op.add_column("projects", sa.Column("archived_at", sa.DateTime(), nullable=True))
    with op.batch_alter_table("api_keys") as keys:
        keys.add_column(sa.Column("user_id", text, nullable=True))
        keys.add_column(sa.Column("role", text, nullable=True))
        keys.add_column(sa.Column("scopes", sa.JSON(), nullable=True))
        keys.add_column(sa.Column("replaced_by", text, nullable=True))
        keys.create_foreign_key("fk_api_keys_user_id_users", "users", ["user_id"], ["user_id"])
        keys.create_index("ix_api_keys_project_id", ["project_id"])
        keys.create_index("ix_api_keys_user_id", ["user_id"])
    op.execute("UPDATE api_keys SET role = 'owner'")
    with op.batch_alter_table("api_keys") as keys:
        keys.alter_column("role", existing_type=text, nullable=False)
