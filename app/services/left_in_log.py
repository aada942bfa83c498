"""What an earlier process accepted, and what no runtime has yet: its base model is not served, or it cannot be read.

Responsible for saying why it waits, and for ending it when nobody wants it any more. Not responsible for trying again
(`recovery.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from schemas.errors import Cancelled, TinsmithError, Unavailable
from workers.tickets import UNREAD
from workers.turn_runner import gone

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Left:
    """Whose an operation is, why it waits, and the base model that it waits for, if that is why."""

    session_id: str
    reason: str
    base_model: str | None = None


class LeftInLog:
    """Accepted operations that no runtime has, by request id. `fail` records that some of them have failed."""

    def __init__(self, fail: Callable[[list[str], TinsmithError], Awaitable[None]]) -> None:
        self._fail = fail
        self._left: dict[str, _Left] = {}
        self._failing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._left)

    def note_unserved(self, request_id: str, base_model: str, session_id: str) -> None:
        """An operation waits until its base model is served."""
        reason = f"waiting for base model {base_model!r}, which is not served now"
        self._left[request_id] = _Left(session_id, reason, base_model)

    def note_unread(self, request_id: str, error: Unavailable, session_id: str) -> None:
        """An operation waits until it can be read."""
        self._left[request_id] = _Left(session_id, f"{UNREAD}: {error.message}")

    def waiting_for(self, base_model: str) -> list[str]:
        """The request ids that wait for a base model."""
        return [request_id for request_id, left in self._left.items() if left.base_model == base_model]

    def reason(self, request_id: str) -> str | None:
        """Why an operation waits, for people; None if it is not here."""
        left = self._left.get(request_id)
        return None if left is None else left.reason

    def taken(self, request_id: str) -> None:
        """A runtime has the operation now."""
        self._left.pop(request_id, None)

    def cancel(self, request_id: str) -> bool:
        """End an operation that nobody wants any more; False if it is not here."""
        if request_id not in self._left:
            return False
        self._end([request_id], Cancelled())
        return True

    def end_session(self, session_id: str) -> None:
        """A session is over: so is what of it waits."""
        self._end([request_id for request_id, left in self._left.items() if left.session_id == session_id], gone())

    def _end(self, request_ids: list[str], error: TinsmithError) -> None:
        for request_id in request_ids:
            del self._left[request_id]
        if request_ids:
            task = asyncio.ensure_future(self._record(request_ids, error))
            self._failing.add(task)
            task.add_done_callback(self._failing.discard)

    async def _record(self, request_ids: list[str], error: TinsmithError) -> None:
        try:
            await self._fail(request_ids, error)
        except Unavailable as away:
            logger.warning("%d operations are failed at the next start: %s", len(request_ids), away.message)
