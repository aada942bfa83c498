"""Brings a database to the newest schema, from inside the installed package and without any configuration file.

Blocking: call it in a thread. Not responsible for what the revisions do (`store/migrations/versions`).
"""

from __future__ import annotations

import logging
from importlib.metadata import version

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from schemas.errors import Unavailable


def migrate_to_head(connection: Connection) -> None:
    """Run the missing revisions inside the caller's transaction: all of them, or none.

    Raises:
        Unavailable: the database has a schema that this version does not know, i.e. a newer one.
    """
    config = _config()
    config.attributes["connection"] = connection
    # Alembic tells at INFO what it does; a server's log at INFO is for requests.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in known_schemas():
        raise newer_schema(current)
    command.upgrade(config, "head")


def known_schemas() -> list[str]:
    """The versions of the schema that this version of the server reads, newest first."""
    return [script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()]


def newer_schema(found: str) -> Unavailable:
    """The refusal of a data folder whose schema this version does not know."""
    newest = known_schemas()[0]
    return Unavailable(
        f"the data folder has schema {found}, which this version does not know (tinsmith {version('tinsmith')}, whose "
        f"newest is {newest})",
        hint="It was written by a newer version: update the server, or use another data folder.",
        code="newer_schema",
    )


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "store:migrations")
    config.set_main_option("path_separator", "os")
    return config
