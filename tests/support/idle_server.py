"""The real application behind a real socket, in a thread of this process, with a worker that only loads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from app.main import create_app
from app.settings import Settings
from tests.app.conftest import idle_group


@dataclass(frozen=True)
class IdleServer:
    """Where it is, and its development key."""

    url: str
    key: str


@contextmanager
def listening(settings: Settings) -> Iterator[IdleServer]:
    """Serve on a free port of the loopback address until the end of the block."""
    app = create_app(settings, group_factory=idle_group)
    server = uvicorn.Server(uvicorn.Config(app, port=0, ws="none", log_config=None, access_log=False))
    thread = threading.Thread(target=lambda: asyncio.run(server._serve(None)))
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield IdleServer(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app.state.dev_key)
    finally:
        server.should_exit = True
        thread.join(30)
