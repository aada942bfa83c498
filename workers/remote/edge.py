"""The runtime of one base model whose real self is in another process.

Responsible for the connection: sending in order, listening, beginning anew with a server that knows nothing. What was
submitted and not answered is submitted again then, and training runs come back as they do after a restart: nothing is
lost or done twice. Not responsible for the way there (`Link`) or for what is remembered of tickets (`EdgeDesk`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from schemas.base_model_info import BaseModelInfo
from schemas.errors import EngineFailure, TinsmithError, Unavailable
from workers.recovery import History
from workers.remote.desk import EdgeDesk
from workers.remote.link import Link, LinkBroken
from workers.remote.messages import (
    Ask,
    Cancel,
    CloseModel,
    Drawn,
    Events,
    Frame,
    Hello,
    Leave,
    NoteRefused,
    Numbers,
    OpenModel,
    Probe,
    Probed,
    Reasons,
    ReopenModel,
    Reply,
    Started,
    Status,
    Submit,
    Welcome,
    pack,
    unpack,
)
from workers.remote.questions import Questions
from workers.remote.stream import Outbox
from workers.runtime import Load, State
from workers.throughput import Throughput, ThroughputMeter
from workers.tickets import QueueState, Ticket

_log = logging.getLogger("tinsmith.remote")

MESSAGES_AT_ONCE = 256
HEARTBEAT_SECONDS = 5.0
PAUSES = (0.05, 0.2, 0.5, 1.0)
"""Seconds before the next try to reach the server; the last one again and again."""
_LEAVE_SECONDS = 3.0


class RemoteRuntime:
    """Implements `workers.runtime_protocol.Runtime` over a link. All methods are called from one event loop.

    Args:
        history: the log and the snapshots, from which a new server brings models back.
        on_models_lost: told which models cannot be brought back, before their operations fail.
        alone: no other edge may use the store beside this one, so whichever the server still knows are gone.
        heartbeat: seconds between two signs of life while there is nothing to say.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        link: Link,
        *,
        history: History | None,
        on_models_lost: Callable[[Sequence[str]], Awaitable[None]],
        alone: bool = True,
        heartbeat: float = HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.state: State = "starting"
        self.info: BaseModelInfo | None = None
        self.failure: TinsmithError | None = None
        self.progress: str | None = "waiting for its place in the cluster"
        self._link = link
        self._alone = alone
        self._heartbeat = heartbeat
        self._clock = clock
        self._desk = EdgeDesk()
        self._questions = Questions(self._desk, history, on_models_lost)
        self._edge_id = secrets.token_hex(16)
        self._attachment: str | None = None
        self._attached = asyncio.Event()
        """The server knows this edge, and what is in the outbox may be sent."""
        self._outbox = Outbox()
        self._seen = 0
        self._status: Status | None = None
        """What the server said last."""
        self._since = clock()
        self._numbers = Numbers(Load(0, 0, 0), ThroughputMeter().read(0.0, 0.0))
        self._probes: dict[int, asyncio.Future[bool]] = {}
        self._probe_numbers = itertools.count()
        self._stopping = False
        self._idle = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    # -- life ------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Begin to reach the server in the background; returns at once."""
        self._since = self._clock()
        self._spawn(self._run())
        self._spawn(self._send_all())

    async def stop(self, grace: float) -> None:
        """Refuse new work, wait `grace` seconds for what is queued, fail the rest with `Unavailable`, and leave."""
        self._stopping = True
        if self.state == "ready" and len(self._desk):
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._idle.wait()
        self._desk.finish_all(self._unavailable())
        await self._desk.recorded()
        if self._attached.is_set():
            self._outbox.put(Leave())
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    while self._attached.is_set() and len(self._outbox):  # noqa: ASYNC110 (rarely more than once)
                        await asyncio.sleep(0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.close()

    async def probe(self, timeout: float) -> bool:  # noqa: ASYNC109 (a plain number crosses to any transport)
        """Whether the server answers, and its worker."""
        if self.state != "ready" or not self._attached.is_set():
            return False
        number = next(self._probe_numbers)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._probes[number] = answer
        self._outbox.put(Probe(number, timeout))
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            return False
        finally:
            self._probes.pop(number, None)

    # -- work ------------------------------------------------------------------------------------------------------
    def open_model(self, model_id: str) -> None:
        """See `Runtime.open_model`."""
        if not self._desk.is_open(model_id):
            self._desk.open_model(model_id)
            self._say(OpenModel(model_id))

    def reopen_model(self, model_id: str, next_seq: int, cut_off: frozenset[int]) -> None:
        """See `Runtime.reopen_model`."""
        self._desk.open_model(model_id, next_seq)
        self._say(ReopenModel(model_id, next_seq, cut_off))

    def submit(self, ticket: Ticket) -> None:
        """See `Runtime.submit`."""
        entry = self._desk.add(ticket)
        if entry is None:
            return
        if self._stopping or self.state == "failed":
            self._desk.finish(ticket.request_id, self._unavailable())
        else:
            self._say(Submit(entry.header))

    def note_refused(self, model_id: str, seq_id: int) -> None:
        """See `Runtime.note_refused`."""
        self._desk.note_refused(model_id, seq_id)
        self._say(NoteRefused(model_id, seq_id))

    def close_model(self, model_id: str) -> None:
        """See `Runtime.close_model`."""
        self._desk.close_model(model_id)
        self._questions.forget(model_id)
        self._say(CloseModel(model_id))

    def cancel(self, request_id: str) -> None:
        """See `Runtime.cancel`."""
        entry = self._desk.find(request_id)
        if entry is not None and entry.ticket.model_id is None:
            entry.cancelled = True
            self._say(Cancel(request_id))

    def waiting(self, request_id: str) -> QueueState:
        """See `Runtime.waiting`. Reasons are as the server told them last."""
        entry = self._desk.find(request_id)
        if entry is None:
            return QueueState("active")
        if self.state in ("starting", "restarting"):
            doing = "loading" if self.state == "starting" else "restarting"
            detail = f": {self.progress}" if self.progress else ""
            return QueueState("paused_capacity", f"base model is {doing} ({self._clock() - self._since:.0f} s){detail}")
        if entry.reason is not None:
            return entry.reason
        return QueueState("active", "running" if entry.started else "on its way to the worker")

    def samples_waiting(self, project_id: str) -> int:
        """See `Runtime.samples_waiting`; those of this edge."""
        return self._desk.samples_waiting(project_id)

    def throughput(self) -> Throughput:
        """See `Runtime.throughput`; as the server told last."""
        return self._numbers.throughput

    def load(self) -> Load:
        """See `Runtime.load`; as the server told last."""
        return self._numbers.load

    # -- the connection ----------------------------------------------------------------------------------------------
    def _say(self, message: Any) -> None:
        """To the server, if it knows this edge; a new one is told everything anew."""
        if self._attachment is not None:
            self._outbox.put(message)

    async def _run(self) -> None:
        try:
            await self._link.open()
            failures = 0
            while True:
                failures = 0 if await self._listen() else failures + 1
                self._detach()
                error = await self._link.lost()
                if error is not None:
                    raise error
                await asyncio.sleep(PAUSES[min(failures, len(PAUSES) - 1)])
        except TinsmithError as error:
            self._fail(error)
        except Exception as error:
            _log.exception("the connection to %s failed", self.name)
            self._fail(EngineFailure(f"the connection failed ({type(error).__name__})"))

    async def _listen(self) -> bool:
        """Follow one stream of events to its end; whether it had begun."""
        welcomed = False
        try:
            hello = pack(Hello(self._edge_id, self._attachment, self._seen, self._alone))
            async with aclosing(self._link.events(hello)) as stream:  # type: ignore[type-var]
                async for data in stream:
                    message = unpack(data)
                    if isinstance(message, Welcome):
                        welcomed = True
                        self._welcome(message)
                    else:
                        self._take_events(message)
        except LinkBroken as error:
            if not self._stopping:
                _log.warning("the connection to %s broke: %s", self.name, error)
        return welcomed

    def _welcome(self, welcome: Welcome) -> None:
        if welcome.attachment == self._attachment:
            self._outbox.confirm(welcome.received)
            if self._status is not None:
                self._take_status(self._status)
        else:
            if self._attachment is not None:
                _log.warning("%s has a new server: %d operations go there again", self.name, len(self._desk))
            self._attachment, self._seen, self._outbox = welcome.attachment, 0, Outbox()
            self._give_up_probes()
            for message in self._desk.begin_anew(fresh=welcome.fresh):
                self._outbox.put(message)
        self._attached.set()

    def _detach(self) -> None:
        """The server cannot be reached now."""
        self._attached.clear()
        self._outbox.wake()
        self._give_up_probes()
        if self.state == "ready":
            self.state, self._since = "restarting", self._clock()
            self.progress = "its server does not answer; it is being replaced"

    def _give_up_probes(self) -> None:
        for probe in self._probes.values():
            if not probe.done():
                probe.set_result(False)

    async def _send_all(self) -> None:
        """Send what is in the outbox, one transfer at a time; the transfer that failed is repeated."""
        while True:
            await self._attached.wait()
            outbox, attachment = self._outbox, self._attachment
            if attachment is None:
                continue
            await outbox.wait(outbox.first, self._heartbeat)
            if outbox is not self._outbox or not self._attached.is_set():
                continue
            messages = outbox.since(outbox.first, MESSAGES_AT_ONCE)
            frame = Frame(self._edge_id, attachment, outbox.first, self._seen, messages)
            try:
                known = await self._link.send(pack(frame))
            except LinkBroken as error:
                _log.warning("nothing can be sent to %s: %s", self.name, error)
                await asyncio.sleep(PAUSES[1])
                continue
            if known:
                outbox.confirm(frame.first + len(messages))
            else:
                await asyncio.sleep(PAUSES[1])  # the stream of events ends too, or a new one has begun

    # -- events --------------------------------------------------------------------------------------------------------
    def _take_events(self, events: Events) -> None:
        for event in events.events[max(0, self._seen - events.first) :]:
            self._seen += 1
            self._take(event)

    def _take(self, event: Any) -> None:
        match event:
            case Ask(number, question):
                self._spawn(self._answer(self._outbox, number, question))
            case Started(request_id):
                self._desk.start(request_id)
            case Drawn(request_id, delta):
                self._desk.tell(request_id, delta)
            case Status():
                self._take_status(event)
            case Numbers():
                self._numbers = event
            case Reasons(states):
                for request_id, state in states.items():
                    entry = self._desk.find(request_id)
                    if entry is not None:
                        entry.reason = state
            case Probed(number, answers):
                probe = self._probes.get(number)
                if probe is not None and not probe.done():
                    probe.set_result(answers)
            case _:
                _log.error("the server of %s sent a %s", self.name, type(event).__name__)

    def _take_status(self, status: Status) -> None:
        self._status = status
        self.info = status.info or self.info
        self.progress = status.progress
        self._since = self._clock() - status.seconds
        self.failure = status.failure
        self.state = status.state

    async def _answer(self, outbox: Outbox, number: int, question: Any) -> None:
        """Answer a question of the server; an answer to one that is gone stays in its outbox."""
        try:
            reply = Reply(number, await self._questions.answer(question))
        except TinsmithError as error:
            reply = Reply(number, error=error)
        outbox.put(reply)
        if not len(self._desk):
            self._idle.set()

    # -- failure -------------------------------------------------------------------------------------------------------
    def _fail(self, error: TinsmithError) -> None:
        self.state, self.failure = "failed", error
        self._attached.clear()
        _log.error("base model %s is not available: %s", self.name, error.message)
        self._desk.finish_all(self._unavailable())

    def _unavailable(self) -> Unavailable:
        if self.failure is None:
            return Unavailable("the server is shutting down")
        return Unavailable(f"base model {self.name!r} is not available: {self.failure.message}", hint=self.failure.hint)

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
