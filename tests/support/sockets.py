"""An application of this process behind a real socket, as `tinsmith serve` puts it there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from app.connection import BoundedProtocol


@asynccontextmanager
async def listening(app: ASGIApp, **options: Any) -> AsyncIterator[int]:
    """The port; its lifespan is not run. `options` are uvicorn's."""
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    config = uvicorn.Config(
        app, port=0, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False, **options
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    running = asyncio.create_task(server._serve(None))
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = server.force_exit = True
    await running
