"""Connections of the event loop: aiosqlite without a change of threads for statements that cannot wait.

aiosqlite sends every call to a thread and back, a dozen times for one row; on a busy machine that is milliseconds for
each accepted request, and heartbeats stand in the same queue. Inside a write transaction in WAL mode a statement waits
for nothing: no lock and no fsync, only pages in memory. So those run where they are, and what may wait (taking the
write lock, commit, rollback, close) stays in the thread. A transaction that only reads waits for nothing at all: what
looks a few rows up by their keys runs where it is from its beginning to its end. Not responsible for which statements
are run, nor for how long they take.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite

_MAY_WAIT = frozenset({"commit", "rollback", "close"})


class _DirectConnection(aiosqlite.Connection):
    """See the module for what differs from its parent."""

    def __init__(self, path: Path) -> None:
        super().__init__(lambda: sqlite3.connect(path, check_same_thread=False), iter_chunk_size=64)
        self._thread.daemon = True  # as SQLAlchemy does with the connections that it makes itself

    def _may_wait(self, connection: sqlite3.Connection, fn: Callable[..., Any]) -> bool:
        """Whether a call stays in the thread."""
        raise NotImplementedError

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._connection is None or self._may_wait(self._connection, fn):
            return await super()._execute(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
        return fn(*args, **kwargs)


class WriterConnection(_DirectConnection):
    """One connection that is used by one task."""

    def _may_wait(self, connection: sqlite3.Connection, fn: Callable[..., Any]) -> bool:
        ends = getattr(fn, "__self__", None) is connection and fn.__name__ in _MAY_WAIT
        return ends or not connection.in_transaction


class LookupConnection(_DirectConnection):
    """One connection for reading a few rows at a time."""

    def _may_wait(self, connection: sqlite3.Connection, fn: Callable[..., Any]) -> bool:
        return False
