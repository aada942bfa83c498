"""PostgreSQL seen from outside, as `store/read_only.py` sees SQLite: for `tinsmith doctor`. Blocking.

Not responsible for what is concluded, nor for copying a database: `pg_dump` does that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL

from schemas.errors import Unavailable
from store.edges import ALIVE_QUERY
from store.postgres import CONNECT_SECONDS, STATEMENT_SECONDS, parse_postgres


class NoSuchTable(Exception):
    """The database has no such table."""


class PostgresReader:
    """One connection in one read-only transaction: everything that is read belongs to one moment."""

    def __init__(self, url: URL) -> None:
        self._loop = asyncio.new_event_loop()
        try:
            self._connection: Any = self._run(_connect(url))
        except BaseException:
            self._loop.close()
            raise

    def execute(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query. Raises `NoSuchTable`."""
        import asyncpg

        try:
            return [tuple(row) for row in self._run(self._connection.fetch(query))]
        except asyncpg.UndefinedTableError as error:
            raise NoSuchTable(query) from error

    def servers(self) -> int:
        """How many servers have given a sign of life lately."""
        return len(self.execute(ALIVE_QUERY))

    def size(self) -> int:
        """Of the database, in bytes."""
        return int(self.execute("SELECT pg_database_size(current_database())")[0][0])

    def close(self) -> None:
        """Hang up."""
        self._run(self._connection.close(timeout=1))
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)


async def _connect(url: URL) -> Any:
    import asyncpg

    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    connection = await asyncpg.connect(plain, timeout=CONNECT_SECONDS, command_timeout=STATEMENT_SECONDS)
    await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    return connection


@contextmanager
def open_postgres(url: str) -> Iterator[PostgresReader]:
    """A reader of the database at a `database_url`.

    Raises:
        InvalidRequest: the URL is of another kind.
        Unavailable: the database cannot be reached or read.
    """
    parsed = parse_postgres(url)
    import asyncpg

    try:
        reader = PostgresReader(parsed)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        reason = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
        raise Unavailable(f"the database cannot be reached ({reason})", code="database_unavailable") from error
    try:
        yield reader
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise Unavailable(f"the database cannot be read ({error})", code="database_unavailable") from error
    finally:
        reader.close()
