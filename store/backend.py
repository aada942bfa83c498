"""What the store needs of a database, and SQLite as the first of the two that it knows.

The store itself (`store/database.py`) has one writer with group commit whatever the database is. On SQLite that writer
is the only one there is; on PostgreSQL (`store/postgres.py`) there may be others, and a write that meets one is run
again. Not responsible for when transactions begin and end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from schemas.errors import TinsmithError
from store.connections import lookup_engine, read_engine, write_engine


class Backend(Protocol):
    """Connections to one database, and what its errors mean.

    `writes` gives the one connection of the writer, `reads` those that cannot write and see one moment, `lookups` such
    a one whose statements never wait.
    """

    writes: AsyncEngine
    reads: AsyncEngine
    lookups: AsyncEngine | None
    """None: there is none, for the database is elsewhere."""

    async def in_transaction(self, connection: AsyncConnection, error: Exception) -> bool:
        """Whether the transaction is still there, and of use, after an error inside a savepoint."""
        ...

    async def mark(self, connection: AsyncConnection) -> Any:
        """What tells later whether this transaction was committed; None: a failed commit has kept nothing."""
        ...

    async def committed(self, mark: Any) -> bool | None:
        """Whether the transaction of a mark was committed; None: not decided yet. Raises if that cannot be asked."""
        ...

    def met_another(self, error: Exception) -> bool:
        """Whether a write failed because another writer was first: it sees what that one wrote if it runs again."""
        ...

    def unavailable(self, error: Exception) -> bool:
        """Whether an error is of the database itself, and not of what it was asked."""
        ...

    def refusal(self, error: Exception) -> TinsmithError | None:
        """The error for who asked, of a value that this database cannot hold."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class SqliteBackend:
    """One file, one writer, which nobody disturbs. `readers`: connections for reading."""

    def __init__(self, path: Path, readers: int) -> None:
        self.writes = write_engine(path)
        self.reads = read_engine(path, readers)
        self.lookups: AsyncEngine | None = lookup_engine(path)

    async def in_transaction(self, connection: AsyncConnection, error: Exception) -> bool:
        """SQLite ends the transaction by itself when the disk is full or fails; no write of it was kept then."""
        raw = (await connection.get_raw_connection()).driver_connection
        return raw is not None and bool(raw.in_transaction)

    async def mark(self, connection: AsyncConnection) -> None:
        """A commit that fails has kept nothing."""

    async def committed(self, mark: Any) -> bool | None:
        """Never in doubt."""
        return False

    def met_another(self, error: Exception) -> bool:
        """There is no other writer."""
        return False

    def unavailable(self, error: Exception) -> bool:
        """Locked for too long, unreadable, or a write by a reader."""
        return isinstance(error, OperationalError)

    def refusal(self, error: Exception) -> TinsmithError | None:
        """SQLite holds every value."""
        return None

    async def close(self) -> None:
        """Close every connection."""
        await self.reads.dispose()
        if self.lookups is not None:
            await self.lookups.dispose()
        await self.writes.dispose()
