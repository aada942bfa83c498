"""What stands before a server that dies and comes back: an address that never refuses a connection.

A connection waits here until the server listens, and is cut when the server dies. So clients lose nothing but time, and
little of that: without it the SDK would wait longer than a start takes, twice as long with every refusal.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

CHUNK = 1 << 16


class Front:
    """Listens on a port of its own, and passes bytes to and from `port` on this machine."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="front", daemon=True)
        self._thread.start()
        listening = asyncio.start_server(self._pass, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Cut everything."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # of `close`; the stream server would report it as a fault
            await self._exchange(reader, writer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await self._connect()
        ways = [
            asyncio.ensure_future(_copy(reader, inner_writer)),
            asyncio.ensure_future(_copy(inner_reader, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (writer, inner_writer):
            end.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", self._target)
            except OSError:
                await asyncio.sleep(0.05)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # one end is gone
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
