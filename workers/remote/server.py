"""The server of one runtime: it has the real one, and edges in other processes use it.

Responsible for edges that come, break off and go, and for turning their messages into calls. What a runtime tells
becomes events and questions to the edge concerned. Not responsible for the transport: whatever carries bytes in order
calls `events` and `receive`. All methods are called from one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from schemas.errors import TinsmithError
from schemas.operations import Operation, OperationResult, SampleDelta
from workers.recovery import History
from workers.remote.attachment import Attachment, EdgeGone
from workers.remote.far_history import FarHistory
from workers.remote.messages import (
    Cancel,
    CloseModel,
    Drawn,
    Events,
    Frame,
    Header,
    Hello,
    Leave,
    NoteRefused,
    OpenModel,
    OperationOf,
    Probe,
    Probed,
    RecordLost,
    ReopenModel,
    Reply,
    Settle,
    Started,
    Submit,
    Undo,
    Welcome,
    pack,
    unpack,
)
from workers.remote.watcher import Watcher
from workers.runtime import ModelRuntime
from workers.tickets import Ticket

_log = logging.getLogger("tinsmith.remote")

EVENTS_AT_ONCE = 256
SILENCE_SECONDS = 60.0
"""An edge that has not been heard for this long is gone: its adapters are freed."""
_LOOK_SECONDS = 5.0

Lost = Callable[[Sequence[str]], Awaitable[None]]


class RuntimeServer:
    """A runtime with edges.

    Args:
        make_runtime: makes the runtime, from the history and from whom to tell which models are lost.
        silence: seconds after which an edge that says nothing is gone.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        make_runtime: Callable[[History, Lost], ModelRuntime],
        *,
        silence: float = SILENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._edges: dict[str, Attachment] = {}
        self._numbers = itertools.count()
        self._silence = silence
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self.runtime = make_runtime(FarHistory(self._edge_of, self._any_edge), self._record_lost)
        self._watcher = Watcher(self.runtime, clock)

    async def start(self) -> None:
        """Begin to load the base model in the background; returns at once."""
        await self.runtime.start()
        self._spawn(self._watch())

    async def stop(self) -> None:
        """End the runtime. What edges have not been answered they submit to the next server."""
        for edge in list(self._edges.values()):
            self._drop(edge, close_models=False)
        for task in self._tasks:
            task.cancel()
        await self.runtime.stop(0.0)

    @property
    def edges(self) -> int:
        """How many edges there are."""
        return len(self._edges)

    # -- what a transport calls --------------------------------------------------------------------------------------
    async def events(self, hello: bytes) -> AsyncIterator[bytes]:
        """What an edge is told, from its `Hello` on: a `Welcome`, then `Events`. Ends when the edge is gone, or when it
        listens anew."""
        edge = self._attach(unpack(hello))
        edge.stream += 1
        stream, sent = edge.stream, edge.events.first
        edge.events.wake()
        yield pack(Welcome(edge.attachment_id, edge.received, fresh=edge.number == 0))
        while not edge.gone and edge.stream == stream:
            found = edge.events.since(sent, EVENTS_AT_ONCE)
            if found:
                yield pack(Events(sent, found))
                sent += len(found)
            else:
                await edge.events.wait(sent, self._silence)

    def receive(self, data: bytes) -> bool:
        """Take a `Frame`; False if the edge has to begin anew."""
        frame: Frame = unpack(data)
        edge = self._edges.get(frame.edge_id)
        if edge is None or edge.attachment_id != frame.attachment:
            return False
        edge.heard = self._clock()
        edge.events.confirm(frame.seen)
        for message in frame.messages[max(0, edge.received - frame.first) :]:
            edge.received += 1
            self._take(edge, message)
            if edge.gone:
                break
        return True

    # -- edges ---------------------------------------------------------------------------------------------------------
    def _attach(self, hello: Hello) -> Attachment:
        known = self._edges.get(hello.edge_id)
        if known is not None and known.attachment_id == hello.attachment:
            known.events.confirm(hello.seen)
            known.heard = self._clock()
            return known
        for edge in list(self._edges.values()):
            if hello.alone or edge is known:
                self._drop(edge)
        edge = Attachment(hello.edge_id, next(self._numbers), self._clock())
        self._edges[hello.edge_id] = edge
        self._watcher.tell_all(edge)
        _log.info("edge %s attached to %s", hello.edge_id[:8], self.runtime.name)
        return edge

    def _drop(self, edge: Attachment, *, close_models: bool = True) -> None:
        """Forget an edge. Nothing is lost: what it had is in its log, from which it or the next one begins anew."""
        self._edges.pop(edge.edge_id, None)
        edge.end()
        _log.info("edge %s of %s is gone", edge.edge_id[:8], self.runtime.name)
        if not close_models:
            return
        for model_id in edge.models:
            self.runtime.close_model(model_id)
        for header in list(edge.requests.values()):
            self.runtime.cancel(edge.ticket_id(header))

    def _edge_of(self, model_id: str) -> Attachment | None:
        return next((edge for edge in self._edges.values() if model_id in edge.models), None)

    def _any_edge(self) -> Attachment | None:
        return next(iter(self._edges.values()), None)

    async def _record_lost(self, model_ids: Sequence[str]) -> None:
        for edge in list(self._edges.values()):
            concerned = tuple(model_id for model_id in model_ids if model_id in edge.models)
            if concerned:
                with suppress(EdgeGone):
                    await edge.ask(RecordLost(concerned))

    async def _watch(self) -> None:
        looked = self._clock()
        while True:
            await self._watcher.look(self._edges.values())
            now = self._clock()
            if now - looked >= min(_LOOK_SECONDS, self._silence / 4):
                looked = now
                for edge in list(self._edges.values()):
                    if now - edge.heard > self._silence:
                        self._drop(edge)

    # -- messages ------------------------------------------------------------------------------------------------------
    def _take(self, edge: Attachment, message: Any) -> None:
        runtime = self.runtime
        match message:
            case Reply():
                edge.take_reply(message)
            case Submit(header):
                self._submit(edge, header)
            case OpenModel(model_id):
                edge.models.add(model_id)
                runtime.open_model(model_id)
            case ReopenModel(model_id, next_seq, cut_off):
                self._reopen(edge, model_id, next_seq, cut_off)
            case NoteRefused(model_id, seq_id):
                runtime.note_refused(model_id, seq_id)
            case CloseModel(model_id):
                edge.models.discard(model_id)
                runtime.close_model(model_id)
            case Cancel(request_id):
                if (submitted := edge.requests.get(request_id)) is not None:
                    runtime.cancel(edge.ticket_id(submitted))
            case Probe(number, seconds):
                self._spawn(self._probe(edge, number, seconds))
            case Leave():
                self._drop(edge)
            case _:
                _log.error("an edge sent a %s", type(message).__name__)

    def _reopen(self, edge: Attachment, model_id: str, next_seq: int, cut_off: frozenset[int]) -> None:
        before = self._edge_of(model_id)
        if before is not None:
            before.models.discard(model_id)
            self.runtime.close_model(model_id)
        edge.models.add(model_id)
        self.runtime.reopen_model(model_id, next_seq, cut_off)

    async def _probe(self, edge: Attachment, number: int, seconds: float) -> None:
        edge.events.put(Probed(number, await self.runtime.probe(seconds)))

    def _submit(self, edge: Attachment, header: Header) -> None:
        """A ticket of the runtime whose other half is at the edge."""
        request_id = header.request_id
        if request_id in edge.requests:
            _log.warning("request %s was submitted twice", request_id)
            return
        edge.requests[request_id] = header

        async def load() -> Operation:
            operation: Operation = await edge.ask(OperationOf(request_id))
            return operation

        async def done(outcome: OperationResult | TinsmithError) -> None:
            edge.requests.pop(request_id, None)
            edge.told.pop(request_id, None)
            self._watcher.tell_status(self._edges.values())  # what a client sees after a result is no older than it
            with suppress(EdgeGone):
                await edge.ask(Settle(request_id, outcome))

        async def undo() -> None:
            await edge.ask(Undo(request_id))

        def drawn(delta: SampleDelta) -> None:
            edge.events.put(Drawn(request_id, delta))

        self.runtime.submit(
            Ticket(
                request_id=edge.ticket_id(header),
                project_id=header.project_id,
                model_id=header.model_id,
                seq_id=header.seq_id,
                load=load,
                done=done,
                started=lambda: edge.events.put(Started(request_id)),
                is_step=header.is_step,
                changes=header.changes,
                size=header.size,
                undo=undo if header.undo else None,
                begun=header.begun,
                progress=drawn if header.stream else None,
            )
        )

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
