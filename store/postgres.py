"""PostgreSQL as the store uses it: connections, migrations under a lock, and what its errors mean.

READ COMMITTED with the locks that `store/holding.py` takes, so that what a write has looked at stays true until its
commit; reads see one moment (REPEATABLE READ). `synchronous_commit` is on, whatever the database's default. Passwords
are in no message: only the driver's words about a failure are passed on, and those hold none. Not responsible for when
transactions begin and end (`store/database.py`), nor for notices between servers (`store/notices.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import URL, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.pool import NullPool

from schemas.errors import InvalidRequest, TinsmithError, Unavailable
from store.migrate import migrate_to_head

DRIVER = "postgresql+asyncpg"
CONNECT_SECONDS = 10.0
STATEMENT_SECONDS = 60.0
"""How long a statement may take before the connection counts as lost."""
LOCK_MILLISECONDS = 100
"""How long a write waits for a row that another server has locked. It keeps the writes behind it waiting meanwhile, and
those before it their locks; so it is then run again later."""
ASLEEP_MILLISECONDS = 5_000
"""How long a server may stop within a transaction, with its locks, before the database ends it for the others' sake."""
_STARTING = 0x7469_6E73
"""Key of the advisory lock under which a server sets up a data folder and a schema."""

_MET_ANOTHER = ("23505", "40001", "40P01", "55P03")
"""Unique violation, serialization failure, deadlock, lock not available."""
_UNAVAILABLE = ("08", "25006", "53", "57", "58", "XX")
"""Connection, read-only, resources, operator, system, internal errors: codes, or how they begin."""
_LOGGED = logging.getLogger(__name__)


def is_postgres(url: str | None) -> bool:
    """Whether a database URL is meant for PostgreSQL."""
    return url is not None and url.startswith(("postgresql", "postgres:"))


def parse_postgres(url: str) -> URL:
    """The URL, checked.

    Raises:
        InvalidRequest: it is not `postgresql+asyncpg://...` with the name of a database, or the driver is missing.
    """
    accepted = "accepted is postgresql+asyncpg://USER:PASSWORD@HOST:PORT/DATABASE"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InvalidRequest(f"database_url is not a URL; {accepted}", field="database_url") from None
    if parsed.drivername != DRIVER:
        raise InvalidRequest(f"database_url has scheme {parsed.drivername!r}; {accepted}", field="database_url")
    if not parsed.database:
        raise InvalidRequest(f"database_url names no database; {accepted}", field="database_url")
    try:
        import asyncpg  # noqa: F401 - whether it is there
    except ImportError:
        raise Unavailable(
            "database_url is of PostgreSQL, but its driver is not installed", hint="pip install 'tinsmith[postgres]'"
        ) from None
    return parsed


def _engine(url: URL, connections: int, **options: Any) -> AsyncEngine:
    pool: dict[str, Any] = {"pool_size": connections, "max_overflow": 0, "pool_pre_ping": True}
    settings = {
        "application_name": "tinsmith",
        "synchronous_commit": "on",
        "lock_timeout": str(LOCK_MILLISECONDS),
        "idle_in_transaction_session_timeout": str(ASLEEP_MILLISECONDS),
        "timezone": "UTC",
    }
    arguments = {"timeout": CONNECT_SECONDS, "command_timeout": STATEMENT_SECONDS, "server_settings": settings}
    return create_async_engine(
        url,
        hide_parameters=True,
        connect_args=arguments,
        **({"poolclass": NullPool} if connections == 0 else pool),
        **options,
    )


@asynccontextmanager
async def starting(url: URL, *, migrate: bool) -> AsyncIterator[None]:
    """One server at a time gets in here: it sets up what all servers of the database share.

    `migrate`: brings the schema up to date first.

    Raises:
        Unavailable: the schema is newer than this version.
        OSError, SQLAlchemyError: the database cannot be used.
    """
    engine = _engine(url, 0)
    try:
        async with engine.connect() as connection:
            await connection.execute(text(f"SET lock_timeout = {int(STATEMENT_SECONDS * 1000)}"))
            await connection.execute(text(f"SELECT pg_advisory_lock({_STARTING})"))
            await connection.commit()
            if migrate:
                async with connection.begin():
                    await connection.run_sync(migrate_to_head)
            yield
            await connection.execute(text(f"SELECT pg_advisory_unlock({_STARTING})"))
    finally:
        await engine.dispose()


class PostgresBackend:
    """A database that other servers may write to. `readers`: connections for reading."""

    lookups: AsyncEngine | None = None

    def __init__(self, url: URL, readers: int) -> None:
        self.url = url
        self.writes = _engine(url, 1, isolation_level="READ COMMITTED")
        self.reads = _engine(
            url, readers, isolation_level="REPEATABLE READ", execution_options={"postgresql_readonly": True}
        )

    async def in_transaction(self, connection: AsyncConnection, error: Exception) -> bool:
        """See `Backend.in_transaction`: it is lost with its connection; and on a full disk no use goes on with it."""
        return not (self.unavailable(error) or connection.invalidated or connection.closed)

    async def mark(self, connection: AsyncConnection) -> str | None:
        """The number of the transaction, if it has written anything."""
        number: str | None = await connection.scalar(text("SELECT pg_current_xact_id_if_assigned()::text"))
        return number

    async def committed(self, mark: Any) -> bool | None:
        """See `Backend.committed`: the database remembers what became of a transaction."""
        async with self.writes.connect() as connection:
            ask = text("SELECT pg_xact_status(CAST(CAST(:mark AS text) AS xid8))")
            state = await connection.scalar(ask, {"mark": mark})
        return None if state == "in progress" else state == "committed"

    def met_another(self, error: Exception) -> bool:
        """See `Backend.met_another`."""
        return isinstance(error, StaleDataError) or _code(error).startswith(_MET_ANOTHER)

    def unavailable(self, error: Exception) -> bool:
        """See `Backend.unavailable`."""
        if isinstance(error, OSError) or (isinstance(error, DBAPIError) and error.connection_invalidated):
            return True
        # A connection that cannot be made raises the driver's own errors.
        from asyncpg import InterfaceError

        cause = error.orig.__cause__ if isinstance(error, DBAPIError) and error.orig is not None else error
        return isinstance(cause, InterfaceError) or _code(error).startswith(_UNAVAILABLE)

    def refusal(self, error: Exception) -> TinsmithError | None:
        """PostgreSQL's texts hold every character but one."""
        if _code(error) == "22021":
            return InvalidRequest("a text in this request holds the character U+0000, which cannot be stored")
        return None

    async def close(self) -> None:
        """Close every connection, within seconds also if the database does not answer."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await self.reads.dispose()
                await self.writes.dispose()
        except (OSError, DBAPIError) as error:
            _LOGGED.warning("a connection to the database could not be closed (%s)", type(error).__name__)


def _code(error: Exception) -> str:
    """The SQLSTATE of an error; "" if it has none."""
    original = error.orig if isinstance(error, DBAPIError) else error
    return getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or ""
