"""One edge as the server of a runtime sees it: what it sent, what it is to be told, and what it was asked.

Not responsible for what the messages mean (`workers/remote/server.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from typing import Any

from schemas.errors import TinsmithError, Unavailable
from workers.remote.messages import Ask, Header, Reply
from workers.remote.stream import Outbox
from workers.tickets import QueueState


class EdgeGone(Unavailable):
    """The edge that a question was for is gone. Whoever has its log asks for everything again."""


class Attachment:
    """An edge from its first `Hello` until it leaves, is replaced or is silent for too long.

    Args:
        number: a number that no other attachment of this server has.
    """

    def __init__(self, edge_id: str, number: int, now: float) -> None:
        self.edge_id = edge_id
        self.number = number
        self.attachment_id = secrets.token_hex(16)
        self.events = Outbox()
        self.received = 0
        self.heard = now
        self.gone = False
        self.stream = 0
        """The newest stream of events; an older one ends."""
        self.requests: dict[str, Header] = {}
        """Submitted and not answered."""
        self.models: set[str] = set()
        self.told: dict[str, QueueState] = {}
        """Reasons as the edge knows them."""
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    def ticket_id(self, header: Header) -> str:
        """The request's id inside the runtime. A training operation that an edge sends again may still be at its end
        there for another one, so each attachment has its own; samples draw from a seed made of theirs."""
        return header.request_id if header.model_id is None else f"{header.request_id}.{self.number}"

    async def ask(self, question: Any) -> Any:
        """The edge's answer, whenever it comes. Raises `EdgeGone`, or the error that the edge answers with."""
        if self.gone:
            raise _gone()
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        self.events.put(Ask(number, question))
        try:
            return await answer
        finally:
            self._questions.pop(number, None)

    def take_reply(self, reply: Reply) -> None:
        """An answer has come."""
        answer = self._questions.get(reply.number)
        if answer is None or answer.done():
            return
        if reply.error is not None:
            answer.set_exception(reply.error)
        else:
            answer.set_result(reply.value)

    def end(self) -> None:
        """The edge is gone: nothing more is sent, and what it was asked fails."""
        self.gone = True
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(_gone())
        self.events.wake()


def _gone() -> TinsmithError:
    return EdgeGone("the server that had asked for this is gone")
