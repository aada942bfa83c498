"""The writer's connection: aiosqlite without a change of threads for statements that cannot wait.

aiosqlite sends every call to a thread and back, a dozen times for one row; on a busy machine that is milliseconds for
each accepted request, and heartbeats stand in the same queue. Inside a write transaction in WAL mode a statement waits
for nothing: no lock and no fsync, only pages in memory. So those run where they are, and what may wait (taking the
write lock, commit, rollback, close) stays in the thread. Not responsible for which statements are run.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite

_MAY_WAIT = frozenset({"commit", "rollback", "close"})


class WriterConnection(aiosqlite.Connection):
    """One connection that is used by one task; see the module for what differs from its parent."""

    def __init__(self, path: Path) -> None:
        super().__init__(lambda: sqlite3.connect(path, check_same_thread=False), iter_chunk_size=64)
        self._thread.daemon = True  # as SQLAlchemy does with the connections that it makes itself

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        of_connection = getattr(fn, "__self__", None) is self._connection
        waits = of_connection and fn.__name__ in _MAY_WAIT
        if self._connection is not None and self._connection.in_transaction and not waits:
            return fn(*args, **kwargs)
        return await super()._execute(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
