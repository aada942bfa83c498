"""What Alembic runs for every command. It gets an open connection in `config.attributes`; there is no alembic.ini.

Not responsible for connecting, nor for logging.
"""

from __future__ import annotations

from alembic import context

from store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
