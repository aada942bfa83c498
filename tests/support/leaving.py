"""A client that leaves, or a server that ends its handlers, while the database writes what a request asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.support.api import Api


async def leaves_during_its_write(api: Api, request: Coroutine[Any, Any, Any], patch: pytest.MonkeyPatch) -> None:
    """Cancel a request, its handler with it, when its rows are written and not committed yet; return when they are.

    Nothing else may write meanwhile.
    """
    store = api.edge.app.state.store
    written, go_on = asyncio.Event(), asyncio.Event()
    fill = store._fill

    async def slow(*of: Any) -> None:
        await fill(*of)
        written.set()
        await go_on.wait()

    patch.setattr(store, "_fill", slow)
    task = asyncio.create_task(request)
    await asyncio.wait([task, asyncio.create_task(written.wait())], return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.05)  # whatever the end of the handler brings about
    patch.setattr(store, "_fill", fill)
    go_on.set()

    async def nothing(db: Any) -> None:
        return None

    await store.write(nothing)
