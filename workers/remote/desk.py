"""What an edge has submitted: tickets until they are answered, training runs until they are closed.

Responsible for answering each ticket once, and for saying what a new server has to be told. Not responsible for the
connection (`workers/remote/edge.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import Cancelled, TinsmithError
from schemas.operations import OperationResult, SampleDelta
from workers.recovery import CREATION
from workers.remote.messages import Header, NoteRefused, OpenModel, ReopenModel, Submit
from workers.remote.places import Place
from workers.reruns import unheard, unheeded
from workers.tickets import QueueState, Ticket
from workers.turn_runner import gone

_log = logging.getLogger("tinsmith.remote")


@dataclass(eq=False, slots=True)
class Open:
    """A ticket that is not answered. `started`: it has begun to run, or may have, on some server."""

    ticket: Ticket
    started: bool = False
    begun: bool = False
    """It may have begun on a server that is gone, or for an edge that is."""
    cancelled: bool = False
    reason: QueueState | None = None
    told: dict[int, int] = field(default_factory=dict)
    """Of a sample that streams: sequence -> tokens that `progress` has had."""
    drawn: dict[int, int] = field(default_factory=dict)
    """Of a sample that streams: sequence -> tokens that the present server has told."""

    @property
    def header(self) -> Header:
        """What travels of the ticket."""
        ticket = self.ticket
        return Header(
            ticket.request_id,
            ticket.project_id,
            ticket.model_id,
            ticket.seq_id,
            ticket.is_step,
            ticket.changes,
            ticket.size,
            undo=ticket.undo is not None,
            stream=ticket.progress is not None,
            begun=self.begun,
        )


class EdgeDesk:
    """All tickets and training runs of an edge on one runtime."""

    def __init__(self) -> None:
        self._open: dict[str, Open] = {}
        self._places: dict[str, Place] = {}
        self._waiting: Counter[str] = Counter()
        """Samples that have not begun, by project."""
        self._answering: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    # -- training runs -----------------------------------------------------------------------------------------------
    def open_model(self, model_id: str, next_seq: int = 0) -> None:
        """A training run begins, or is brought back."""
        self._places[model_id] = Place(next_seq)

    def close_model(self, model_id: str) -> None:
        """A training run is over."""
        self._places.pop(model_id, None)

    def is_open(self, model_id: str) -> bool:
        """Whether a training run is known."""
        return model_id in self._places

    def note_refused(self, model_id: str, seq_id: int) -> None:
        """A refused request consumed this seq_id."""
        place = self._places.get(model_id)
        if place is not None:
            place.note(seq_id, refused=True)

    def lose(self, model_id: str, error: TinsmithError) -> None:
        """Nothing of a training run can run any more."""
        place = self._places.get(model_id)
        if place is not None:
            place.error = error

    # -- tickets -----------------------------------------------------------------------------------------------------
    def add(self, ticket: Ticket) -> Open | None:
        """Take a ticket in; None if the same request is here already, for then that one answers."""
        if ticket.request_id in self._open:
            _log.warning("request %s was submitted twice", ticket.request_id)
            return None
        entry = self._open[ticket.request_id] = Open(ticket)
        if ticket.model_id is None:
            self._waiting[ticket.project_id] += 1
        elif ticket.seq_id is not None and ticket.model_id in self._places:
            self._places[ticket.model_id].note(ticket.seq_id)
        return entry

    def find(self, request_id: str) -> Open | None:
        """The ticket of a request that is not answered."""
        return self._open.get(request_id)

    def samples_waiting(self, project_id: str) -> int:
        """Samples of a project that have not begun."""
        return self._waiting[project_id]

    def start(self, request_id: str) -> None:
        """A request begins to run, or to run again."""
        entry = self._open.get(request_id)
        if entry is None:
            return
        self._no_longer_waiting(entry)
        entry.started = True
        entry.drawn.clear()
        entry.ticket.started()

    def tell(self, request_id: str, delta: SampleDelta) -> None:
        """Pass new tokens on, without those that an earlier server had told: the seed is the same, and so are they."""
        entry = self._open.get(request_id)
        if entry is None or entry.ticket.progress is None:
            return
        new = unheard(entry.told, entry.drawn, delta)
        if new is None:
            return
        try:
            entry.ticket.progress(new)
        except Exception:
            _log.exception("the progress of request %s cannot be told", request_id)

    def finish(self, request_id: str, outcome: OperationResult | TinsmithError) -> asyncio.Task[None] | None:
        """Answer a ticket; returns the task that records the answer, or None if there is no such ticket."""
        entry = self._open.pop(request_id, None)
        if entry is None:
            return None
        self._no_longer_waiting(entry)
        if entry.cancelled and isinstance(outcome, TinsmithError):
            outcome = unheeded(outcome, entry.told)
        ticket = entry.ticket
        place = self._places.get(ticket.model_id or "")
        if place is not None and ticket.seq_id is not None:
            place.passed(ticket.seq_id)
            if ticket.seq_id == CREATION and isinstance(outcome, TinsmithError):
                place.error = outcome
        task = asyncio.get_running_loop().create_task(_answer(ticket, outcome))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        return task

    def finish_all(self, error: TinsmithError) -> None:
        """Answer everything with an error."""
        for request_id in list(self._open):
            self.finish(request_id, error)

    async def recorded(self) -> None:
        """Wait until every answer that was begun is recorded."""
        while self._answering:
            await asyncio.wait(self._answering)

    # -- a new server ------------------------------------------------------------------------------------------------
    def begin_anew(self, *, fresh: bool) -> Iterator[Any]:
        """The messages that bring everything to a server that knows nothing. Tickets of runs that are over, or that
        cannot run any more, are answered here instead. `fresh`: nobody has used that server before."""
        for request_id, entry in list(self._open.items()):
            error = self._over(entry)
            if error is not None:
                self.finish(request_id, error)
        for model_id, place in self._places.items():
            yield from self._reopened(model_id, place)
        for entry in self._open.values():
            entry.begun = entry.begun or entry.started or not fresh
            entry.reason = None
            entry.drawn.clear()
            yield Submit(entry.header)

    def _over(self, entry: Open) -> TinsmithError | None:
        """Why a ticket does not go to another server."""
        model_id = entry.ticket.model_id
        if model_id is None:
            return Cancelled() if entry.cancelled else None
        place = self._places.get(model_id)
        return gone() if place is None else place.error

    def _reopened(self, model_id: str, place: Place) -> Iterator[Any]:
        if place.error is not None:
            return
        if place.next_seq == 0:
            yield OpenModel(model_id)
        else:
            seq_ids = (entry.ticket.seq_id for entry in self._open.values() if entry.ticket.model_id == model_id)
            cut_off = frozenset(seq_id for seq_id in seq_ids if seq_id is not None and seq_id < place.next_seq)
            yield ReopenModel(model_id, place.next_seq, cut_off)
        for seq_id in sorted(place.refused):
            yield NoteRefused(model_id, seq_id)

    def _no_longer_waiting(self, entry: Open) -> None:
        if entry.started or entry.ticket.model_id is not None:
            return
        entry.started = True
        project_id = entry.ticket.project_id
        self._waiting[project_id] -= 1
        if not self._waiting[project_id]:
            del self._waiting[project_id]


async def _answer(ticket: Ticket, outcome: OperationResult | TinsmithError) -> None:
    try:
        await ticket.done(outcome)
    except Exception:
        _log.exception("the outcome of request %s cannot be recorded", ticket.request_id)
