"""What servers on one PostgreSQL database tell each other: LISTEN and NOTIFY on a connection of its own.

A notice is sent with the commit that makes it true and reaches every server that listens; one that is sent while this
server has no connection is lost, so its reader also looks for itself now and then. The connection also holds the lock
of who sweeps. Not responsible for what a notice means.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import URL

from store.edges import CHANNEL
from store.postgres import CONNECT_SECONDS

_log = logging.getLogger(__name__)
_SWEEPING = 0x7469_6E74
"""Key of the advisory lock of the server that does what one server at a time does."""
_PING_SECONDS = 5.0
_AGAIN_SECONDS = 0.5


class Notices:
    """One listening connection, made again whenever it is lost.

    Args:
        heard: called with each notice, in the order of the commits.
        connected: called whenever the connection was made anew: notices may have been missed.
    """

    def __init__(self, url: URL, heard: Callable[[str], None], connected: Callable[[], None]) -> None:
        self._url = url
        self._heard = heard
        self._connected = connected
        self._connection: Any = None
        self._busy = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to listen; returns at once."""
        self._task = asyncio.create_task(self._run(), name="notices")

    async def stop(self) -> None:
        """Hang up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def sweeps(self) -> bool:
        """Whether this server is the one that sweeps; it stays so until its connection ends."""
        async with self._busy:
            if self._connection is None or self._connection.is_closed():
                return False
            held = await self._connection.fetchval(
                "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = $1 AND objsubid = 1 "
                "AND pid = pg_backend_pid())",
                _SWEEPING,
            )
            return bool(held or await self._connection.fetchval("SELECT pg_try_advisory_lock($1)", _SWEEPING))

    async def _run(self) -> None:
        while True:
            try:
                await self._listen()
            except Exception as error:
                _log.warning("the connection for notices is lost: %s", type(error).__name__)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _listen(self) -> None:
        import asyncpg

        plain = self._url.set(drivername="postgresql").render_as_string(hide_password=False)
        connection = await asyncpg.connect(plain, timeout=CONNECT_SECONDS, command_timeout=CONNECT_SECONDS)
        try:
            await connection.add_listener(CHANNEL, self._note)
            self._connection = connection
            self._connected()
            while True:
                await asyncio.sleep(_PING_SECONDS)
                async with self._busy:
                    await connection.execute("SELECT 1")
        finally:
            self._connection = None
            with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await connection.close(timeout=1)

    def _note(self, connection: object, process: int, channel: str, payload: object) -> None:
        self._heard(str(payload))
