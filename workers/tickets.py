"""Tickets: accepted operations on their way through the runtime, and the desk that answers each one exactly once.

Not responsible for order (`workers/queues.py`) or execution (the lanes).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from schemas.errors import NotNow, TinsmithError
from schemas.operations import Operation, OperationResult, SampleDelta
from workers.faults import to_tinsmith_error
from workers.reruns import unheeded

_log = logging.getLogger("tinsmith.runtime")


@dataclass(frozen=True, slots=True)
class TurnNote:
    """A turn of the worker that has just ended: `seconds` with the way there and back, `parts` of it inside of the
    worker (as in `PassStats`), `tokens` of all operations in it, and how many operations that were."""

    seconds: float
    parts: Mapping[str, float]
    tokens: int
    operations: int


@dataclass(frozen=True)
class Ticket:
    """One accepted operation.

    Args:
        model_id: the training run; None for samples.
        seq_id: the place in the model's order; None for samples, or to run after everything queued for the model.
        load: reads the operation back; called shortly before it runs, so that waiting work costs no memory.
        done: takes the result or the error; called exactly once.
        started: told when it begins to run, and again when it has to begin again.
        is_step: whether it is an optimizer step, so that this is known before it is loaded.
        changes: whether its success changes the model.
        size: bytes of its stored form.
        undo: removes what a run that was cut off may have left on disk; awaited before it runs again.
        deaths: how often a server was killed while it executed this, in a row.
        left_over: whether an earlier server accepted it.
        begun: whether it may have begun before, in another process, so that `undo` is awaited at its first run too.
        turn: told of each turn that computed a part of it, as it ends; before `done`. Must not block. None = nobody is.
        progress: takes new tokens of a sample as they are drawn: each token once, also when the sample has to begin
            again, and all of them before `done`. Must not block. None = nobody listens.
    """

    request_id: str
    project_id: str
    model_id: str | None
    seq_id: int | None
    load: Callable[[], Awaitable[Operation]]
    done: Callable[[OperationResult | TinsmithError], Awaitable[None]]
    started: Callable[[], None] = lambda: None
    is_step: bool = False
    changes: bool = True
    size: int = 0
    undo: Callable[[], Awaitable[None]] | None = None
    begun: bool = False
    progress: Callable[[SampleDelta], None] | None = None
    turn: Callable[[TurnNote], None] | None = None
    deaths: int = 0
    left_over: bool = False


@dataclass(frozen=True)
class QueueState:
    """Why an operation has no result yet: the state as the wire knows it, and one phrase for people."""

    state: Literal["active", "paused_capacity", "paused_rate_limit"]
    reason: str | None = None


UNREAD = "this request cannot be read back now and is tried again"
"""How the reason begins of an operation that waits for the disk or the database."""
_FIRST_PAUSE = 0.25
"""Seconds before a request is read again that could not be; it doubles with each try, up to `_LONGEST_PAUSE`."""
_LONGEST_PAUSE = 10.0


@dataclass(eq=False, slots=True)
class Entry:
    """A ticket inside the runtime."""

    ticket: Ticket
    seq_id: int = -1
    """The place in the model's order, once it is queued."""
    running: bool = False
    attempts: int = 0
    """How often it was lost with a worker or a server, or failed together with others, and has to run again."""
    over: bool = False
    again: Callable[[OperationResult | TinsmithError], None] | None = None
    """Told the outcome of an operation that was settled before and is only executed again: nobody is answered."""
    unwanted: bool = False
    """It was cancelled, and ends as soon as what it took is known."""
    told: dict[int, int] = field(default_factory=dict)
    """Of a sample that streams: sequence -> how many of its tokens `progress` has had."""
    unread: str | None = None
    """Why it cannot be read back now, for people: that is tried beside other work until it can."""
    _trying: asyncio.Task[None] | None = None
    _loading: asyncio.Future[Operation] | None = None

    def __post_init__(self) -> None:
        self.attempts = self.ticket.deaths

    def start(self) -> None:
        """It begins to run."""
        self.running = True
        self.ticket.started()

    @property
    def loading(self) -> bool:
        """Whether the operation is in memory, or on its way."""
        return self._loading is not None

    def prefetch(self) -> None:
        """Begin to load the operation beside other work."""
        if self._loading is None:
            self._loading = asyncio.ensure_future(self.ticket.load())

    async def load(self) -> Operation:
        """The operation; raises a `TinsmithError` if it cannot be read back: `NotNow` if that may pass."""
        self.prefetch()
        assert self._loading is not None
        try:
            return await self._loading
        except Exception as error:
            raise to_tinsmith_error(error, "reading the request back") from None

    def put_off(self, error: NotNow, ready: Callable[[], None]) -> None:
        """It cannot be read back now, and nothing accepted fails over that: it is tried beside other work, for a try
        may take long to fail, until it can be read. Then `ready` is told, and it is loaded in its turn like all."""
        self.unload()
        self.running = False
        self.unread = f"{UNREAD}: {error.message}"
        self._trying = asyncio.ensure_future(self._try(ready))

    async def _try(self, ready: Callable[[], None]) -> None:
        mine, pause = asyncio.current_task(), _FIRST_PAUSE
        while self._trying is mine:
            await asyncio.sleep(pause)
            if self._trying is not mine:
                return
            try:
                await self.ticket.load()
            except NotNow as error:
                if self._trying is mine:
                    self.unread = f"{UNREAD}: {error.message}"
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            except Exception as error:
                _log.debug("request %s can be read now, with an error: %s", self.ticket.request_id, error)
            if self._trying is mine:
                self._trying = self.unread = None
                ready()

    def unload(self) -> None:
        """Give the memory of the loaded operation back. A load that is under way is not cancelled but forgotten, for
        the runtime's loop may be waiting for it."""
        self._trying = self.unread = None
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.add_done_callback(_observe)


def _observe(loading: asyncio.Future[Operation]) -> None:
    """Look at the error of a load that nobody waits for, so that asyncio does not report it as forgotten."""
    if not loading.cancelled():
        loading.exception()


class Desk:
    """All entries that are not answered yet, by request id. Answers run beside the work, a bounded number at a time.

    `answering` is told when the writing of an answer begins (True) and when it has ended.
    """

    def __init__(self, answering: Callable[[Entry, bool], None], max_answering: int = 32) -> None:
        self._tell = answering
        self._entries: dict[str, Entry] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._max_answering = max_answering

    def open(self, ticket: Ticket) -> Entry | None:
        """Take a ticket in; None if the same request is here already, for then that one answers."""
        if ticket.request_id in self._entries:
            _log.warning("request %s was submitted twice", ticket.request_id)
            return None
        entry = Entry(ticket)
        self._entries[ticket.request_id] = entry
        return entry

    def find(self, request_id: str) -> Entry | None:
        """The entry of a request that is not answered yet."""
        return self._entries.get(request_id)

    def waiting(self, *, training: bool) -> int:
        """How many operations, or how many samples, have neither begun nor been answered."""
        entries = self._entries.values()
        return sum((entry.ticket.model_id is not None) is training and not entry.running for entry in entries)

    def finish(self, entry: Entry, outcome: OperationResult | TinsmithError) -> None:
        """Answer an entry; the second answer to the same one is dropped. One that nobody wants has no other errors than
        `Cancelled`."""
        if entry.over:
            return
        if entry.unwanted and isinstance(outcome, TinsmithError):
            outcome = unheeded(outcome, entry.told)
        entry.over = True
        entry.unload()
        if entry.again is not None:
            entry.again(outcome)
            return
        del self._entries[entry.ticket.request_id]
        if isinstance(outcome, TinsmithError) and outcome.category == "server":
            _log.warning("request %s failed: %s: %s", entry.ticket.request_id, outcome.code, outcome.message)
        self._tell(entry, True)
        task = asyncio.ensure_future(self._answer(entry, outcome))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def finish_all(self, error: TinsmithError) -> None:
        """Answer everything that is still here with an error."""
        for entry in list(self._entries.values()):
            self.finish(entry, error)

    async def settle(self) -> None:
        """Wait while too many answers are being written, so that results do not pile up in memory."""
        while len(self._answering) > self._max_answering:
            await asyncio.wait(self._answering, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Wait until every answer is written."""
        while self._answering:
            await asyncio.wait(self._answering)

    async def _answer(self, entry: Entry, outcome: OperationResult | TinsmithError) -> None:
        try:
            await entry.ticket.done(outcome)
        except Exception:
            _log.exception("the outcome of request %s cannot be recorded", entry.ticket.request_id)
        finally:
            self._tell(entry, False)
