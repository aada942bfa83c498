"""Where work runs when several servers share a database: what a transaction has to say and to show for it.

Responsible for the part of ownership that belongs into the transactions of operations. Not responsible for signs of
life, takeovers or listening (`ownership.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import Unavailable
from store import edges
from store.database import Store
from store.records import OperationRecord

logger = logging.getLogger(__name__)


class LeaseLost(Exception):
    """Another server executes this run now: what this one has computed for it is not to be written."""


class Leases:
    """What this server (`edge_id`) holds. `held`: model id -> fence, as far as this server knows."""

    def __init__(self, store: Store, edge_id: str) -> None:
        self._store = store
        self.edge_id = edge_id
        self.held: dict[str, int] = {}
        self._telling: set[asyncio.Task[None]] = set()

    async def place(self, db: AsyncSession, record: OperationRecord, model_id: str | None, creates: bool) -> bool:
        """Decide, with the acceptance of an operation, where it runs; False: elsewhere, and that server is told."""
        if model_id is None:
            await edges.set_sample_edge(db, record.request_id, self.edge_id)
            return True
        if creates:
            await edges.hold_run(db, model_id, self.edge_id)
            return True
        if await self.holds(db, model_id):
            return True
        await self.tell(db, "operation", model=model_id, request=record.request_id)
        return False

    async def holds(self, db: AsyncSession, model_id: str) -> bool:
        """Whether this server holds a run; if so, until the commit."""
        fence = self.held.get(model_id)
        return fence is not None and await edges.holder(db, model_id) == (self.edge_id, fence)

    async def require(self, db: AsyncSession, model_id: str, fence: int | None = None) -> None:
        """Raise `LeaseLost` unless this server holds the run until the commit, without a break since it had `fence`."""
        if fence is not None and fence != self.held.get(model_id):
            raise LeaseLost(model_id)
        if not await self.holds(db, model_id):
            raise LeaseLost(model_id)

    async def tell(self, db: AsyncSession, what: str, **about: Any) -> None:
        """Tell every server, this one included, once the transaction is committed."""
        await edges.notify(db, json.dumps({"what": what, **about}))

    def tell_soon(self, what: str, **about: Any) -> None:
        """Tell every server; a notice that cannot be sent is dropped."""
        task = asyncio.ensure_future(self._tell(what, about))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, what: str, about: dict[str, Any]) -> None:
        try:
            await self._store.write(lambda db: self.tell(db, what, **about))
        except Unavailable as error:
            logger.warning("other servers are not told of a %s: %s", what, error.message)
