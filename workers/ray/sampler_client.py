"""Sends samples to a deployment of sampling replicas, and holds those that wait for one.

It has the part of the runtime's surface that sampling uses, so that whoever holds tickets cannot tell the two apart.
Samples wait here, without their prompts, in fair shares between projects; only as many are handed to Serve as may begin
soon. A sample whose replica dies runs again on another one, with the same seed, and its stream goes on where it was. So
does one that a replica gives back, which waits for that replica to be replaced.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RpcError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

from schemas.errors import Cancelled, EngineFailure, NotNow, TinsmithError, Unavailable, WorkerDied
from schemas.operations import Sample, SampleDelta, SampleResult, SampleStats
from workers.ray.drawing import Drawing
from workers.ray.sampler_replica import Begun, GivenBack, LastWords, SampleRequest
from workers.reruns import MAX_RERUNS, seeded, unheard
from workers.runtime import Load
from workers.sample_line import SampleLine
from workers.throughput import Throughput, ThroughputMeter
from workers.tickets import Desk, Entry, QueueState, Ticket
from workers.under_way import UnderWay

_log = logging.getLogger("tinsmith.runtime")

_LOST = (RayActorError, ReplicaUnavailableError, NodeDiedError, ObjectLostError, WorkerCrashedError, RpcError)
"""How the end of a replica looks from here."""
_UNLIMITED = 1 << 31
"""Tokens that a sample without a limit may draw: the context length is known to the replicas only."""
_LAST_WORDS_SECONDS = 10.0
"""For which a cancelled sample waits for its replica to say what it took."""
_UNBEGUN_SECONDS = 1.0
"""The same, of one that is not known to have begun."""
_TELLING_SECONDS = 60.0
"""For the way there; the process through which replicas tell it may just be starting."""
_PAUSE_SECONDS = 5.0
"""Before a sample is sent again that a replica gave back. Serve goes on sending to that replica until it has looked at
it three times, so the next attempts may be given back as well; they cost next to nothing."""


class SamplerClient:
    """The samples of one base model. All methods are called from one event loop.

    Args:
        name: of the base model.
        ahead: samples that are handed to Serve and have not begun, at most: enough that replicas have their next ones,
            and that Serve sees when more replicas are needed; few enough that the order is decided here. Take
            `most_ongoing`.
        patience: seconds for which a sample waits for the replica to be replaced that gave it back. Take
            `replaced_within`.
        pause: seconds before such a sample is sent again.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        ahead: int,
        patience: float,
        pause: float = _PAUSE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._patience = patience
        self._pause = pause
        self._clock = clock
        self._handle: Any = None
        self._last_words: Any = None
        self._failure: TinsmithError | None = None
        self._ahead = ahead
        self._desk = Desk(UnderWay().answering)
        self._line = SampleLine()
        self._drawing: dict[Entry, Drawing] = {}
        self._wake = asyncio.Event()
        """There may be something to hand over."""
        self._ended = asyncio.Event()
        self._handing: asyncio.Task[None] | None = None
        self._stopping = False
        self._meter = ThroughputMeter()

    # -- where the replicas are ------------------------------------------------------------------------------------
    def connect(self, handle: Any) -> None:
        """Send samples to the application of this handle of Serve's from now on; those that run elsewhere stay there.
        Until the first call they wait here."""
        self._handle = handle.options(stream=True, method_name="sample")
        if self._last_words is None:
            self._last_words = ray.remote(LastWords).options(num_cpus=0, max_restarts=-1).remote()
        self._meter.begin(self._clock())
        self._wake.set()

    def fail(self, error: TinsmithError) -> None:
        """There will be no replicas: everything here fails, and so does what comes."""
        self._failure = error
        self._desk.finish_all(error)
        if self._handing is not None:
            self._handing.cancel()
        for drawing in self._drawing.values():
            drawing.task.cancel()
        self._ended.set()

    # -- what the edge does ----------------------------------------------------------------------------------------
    def submit(self, ticket: Ticket) -> None:
        """Take a sample in. Never blocks and never raises: what cannot run is told through `ticket.done`."""
        entry = self._desk.open(ticket)
        if entry is None:
            return
        if ticket.model_id is not None:
            self._desk.finish(entry, EngineFailure("a sampler runs no operations of training"))
        elif self._stopping or self._failure is not None:
            self._desk.finish(entry, self._failure or _shutting_down())
        else:
            self._line.add(entry)
            self._wake.set()
            if self._handing is None:
                self._handing = asyncio.create_task(self._hand_over(), name=f"samples of {self.name}")

    def cancel(self, request_id: str) -> None:
        """Nobody wants this sample any more: decoding stops before the replica's next turn. It ends when its replica
        has said what it took."""
        entry = self._desk.find(request_id)
        if entry is None or entry.unwanted:
            return
        entry.unwanted = True
        drawing = self._drawing.get(entry)
        if drawing is not None:
            drawing.cancelled.set()
            if drawing.response is not None:
                drawing.response.cancel()
            return
        self._line.discard(entry)
        self._desk.finish(entry, Cancelled())
        self._ended.set()

    def waiting(self, request_id: str) -> QueueState:
        """Why a sample has no result yet."""
        entry = self._desk.find(request_id)
        if entry is None:
            return QueueState("active")
        if entry.running:
            return QueueState("active", "running")
        if entry.unread is not None:
            return QueueState("paused_capacity", entry.unread)
        drawing = self._drawing.get(entry)
        if drawing is not None and drawing.given_back is not None:
            seconds = self._clock() - drawing.given_back
            return QueueState(
                "paused_capacity", f"its sampling replica has failed and is being replaced ({seconds:.0f} s)"
            )
        if drawing is not None:
            return QueueState("active", "waiting for a sampling replica that has room")
        return QueueState("active", self._line.reason(entry))

    def samples_waiting(self, project_id: str) -> int:
        """How many samples of a project wait here to be handed to a replica."""
        return self._line.waiting(project_id)

    def throughput(self) -> Throughput:
        """Tokens that were read and drawn for this client, as samples ended. What prompts found in caches and what the
        replicas' time went into only they know."""
        return self._meter.read(self._clock(), 0.0)

    def load(self) -> Load:
        """What there is to do now."""
        return Load(training=0, samples=self._desk.waiting(training=False), adapters=0)

    async def stop(self, grace: float) -> None:
        """Refuse new samples, finish those that were taken within `grace` seconds, fail the rest with `Unavailable`.

        What a replica gives back is among the rest at once: a new replica takes longer to come than a stop should, and
        what was not answered is in the log.
        """
        self._stopping = True
        for entry in self._line.take_put_off():
            self._desk.finish(entry, _shutting_down())
        for entry, drawing in self._drawing.items():
            if drawing.given_back is not None:
                self._desk.finish(entry, _shutting_down())
                drawing.task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while self._drawing or self._desk.waiting(training=False):
                    self._ended.clear()
                    await self._ended.wait()
        self._desk.finish_all(_shutting_down())
        tasks: list[asyncio.Task[Any]] = [drawing.task for drawing in self._drawing.values()]
        if self._handing is not None:
            tasks.append(self._handing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._desk.close()

    # -- handing over ----------------------------------------------------------------------------------------------
    async def _hand_over(self) -> None:
        while True:
            self._wake.clear()
            while self._may_take() and (entry := self._line.peek()) is not None:
                await self._take(entry)
            await self._wake.wait()

    def _may_take(self) -> bool:
        not_begun = sum(not entry.running for entry in self._drawing)
        return self._handle is not None and not_begun < self._ahead

    async def _take(self, entry: Entry) -> None:
        """Read a sample and hand it to Serve; one that cannot be read is answered, or put off if that may pass."""
        try:
            sample = await entry.load()
            if not isinstance(sample, Sample):
                raise EngineFailure(f"a sampler has no operation {type(sample).__name__}")
        except NotNow as error:
            if not entry.over:
                self._line.put_off(entry, error, self._wake.set)
            return
        except TinsmithError as error:
            self._line.discard(entry)
            self._desk.finish(entry, error)
            self._ended.set()
            return
        if entry.over:
            return  # cancelled while it was read
        most = _UNLIMITED if sample.params.max_tokens is None else sample.params.max_tokens
        self._line.take(entry, prompt=len(sample.prompt), sequences=sample.num_samples, most=most)
        entry.unload()
        task = asyncio.create_task(self._draw(entry, seeded(sample, entry.ticket.request_id)))
        self._drawing[entry] = Drawing(task, sample.num_samples, len(sample.prompt), runs=entry.attempts)
        task.add_done_callback(partial(self._end, entry))

    # -- one sample ------------------------------------------------------------------------------------------------
    async def _draw(self, entry: Entry, sample: Sample) -> SampleResult | TinsmithError:
        """Run a sample on one replica after the other until it has an outcome."""
        try:
            while not entry.unwanted:
                outcome = await self._attempt(entry, sample)
                if outcome is not None:
                    return outcome
            return Cancelled()
        except Exception:
            _log.exception("sample %s failed on its way to a replica", entry.ticket.request_id)
            return EngineFailure("the sample failed on its way to a replica")

    def _end(self, entry: Entry, task: asyncio.Task[SampleResult | TinsmithError]) -> None:
        """A sample is not drawn any more: answer it, unless everything ends, which answers it."""
        drawing = self._drawing.pop(entry)
        outcome = None if task.cancelled() else task.result()
        prompt, drawn = drawing.prompt, None
        if isinstance(outcome, SampleResult):
            drawn = sum(len(sequence.tokens) for sequence in outcome.sequences)
        elif isinstance(outcome, Cancelled):
            prompt, drawn = outcome.prompt_tokens, outcome.drawn_tokens
        whole = isinstance(outcome, SampleResult)
        self._line.end(entry, sequences=drawing.sequences, drawn=drawn, whole=whole)
        if drawn is not None:
            stats = SampleStats(prompt_tokens=prompt, drawn_tokens=drawn)
            self._meter.add_sampling(stats, busy=0.0, now=self._clock())
        if outcome is not None:
            self._desk.finish(entry, outcome)
        self._wake.set()
        self._ended.set()

    async def _attempt(self, entry: Entry, sample: Sample) -> SampleResult | TinsmithError | None:
        """The outcome of a run; None if the replica was lost, or gave the sample back, and it is to run again."""
        drawing = self._drawing[entry]
        request = SampleRequest(
            f"{entry.ticket.request_id}.{drawing.runs}",
            entry.ticket.project_id,
            sample,
            stream=entry.ticket.progress is not None,
            last_words=self._last_words,
        )
        response = self._handle.options(multiplexed_model_id=_adapter_key(sample)).remote(request)
        drawing.response = response
        drawing.runs += 1
        last: SampleResult | TinsmithError | GivenBack | None = None
        try:
            async with asyncio.timeout(self._time_left(drawing)) as drawing.limit:
                last = await self._follow(entry, response)
        except TimeoutError:
            if drawing.limit is None or not drawing.limit.expired():
                raise  # Ray's own
            return self._no_replica(drawing)
        except _LOST as error:
            _log.warning("the replica of sample %s is lost: %s", entry.ticket.request_id, type(error).__name__)
            return self._run_again(entry)
        except DeploymentUnavailableError:
            return Unavailable(f"the samplers of base model {self.name!r} cannot start")
        except (asyncio.CancelledError, TaskCancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            if entry.unwanted:
                return await self._cut_off(entry, request.request_id)
            return self._run_again(entry)  # the replica cancelled it: it is going away
        finally:
            if last is None:
                response.cancel()
        if isinstance(last, GivenBack):
            return await self._wait_for_another(entry, drawing)
        return last or EngineFailure("the replica gave no result for this sample")

    async def _cut_off(self, entry: Entry, request_id: str) -> SampleResult | TinsmithError:
        """How a sample ended that was cancelled on its replica; one that is lost with it has told nothing."""
        seconds = _LAST_WORDS_SECONDS if entry.running else _UNBEGUN_SECONDS
        try:
            async with asyncio.timeout(_TELLING_SECONDS + seconds):
                told: SampleResult | TinsmithError | None = await self._last_words.take.remote(request_id, seconds)
        except (RayError, TimeoutError) as error:
            _log.warning("what sample %s took is not known: %s", entry.ticket.request_id, type(error).__name__)
            told = None
        return told or Cancelled()

    async def _follow(self, entry: Entry, response: Any) -> SampleResult | TinsmithError | GivenBack | None:
        """Pass on what a replica tells; how it ends."""
        drawn: dict[int, int] = {}
        async for item in response:
            if isinstance(item, Begun):
                self._begin(entry)
            elif isinstance(item, SampleDelta):
                self._tell(entry, drawn, item)
            else:
                last: SampleResult | TinsmithError | GivenBack = item
                return last
        return None

    def _begin(self, entry: Entry) -> None:
        if not entry.running:
            self._wake.set()
        self._drawing[entry].begin(self._clock())
        entry.start()

    def _run_again(self, entry: Entry) -> WorkerDied | None:
        """None if it may; else why not."""
        entry.running = False
        entry.attempts += 1
        if entry.attempts <= MAX_RERUNS:
            return None
        return WorkerDied("the replica died each time that it ran this sample")

    def _tell(self, entry: Entry, drawn: dict[int, int], delta: SampleDelta) -> None:
        """Pass new tokens on, without those that an earlier attempt had told."""
        progress, new = entry.ticket.progress, unheard(entry.told, drawn, delta)
        if progress is None or new is None or entry.over:
            return
        try:
            progress(new)
        except Exception:
            _log.exception("the progress of request %s cannot be told", entry.ticket.request_id)

    # -- a replica that gave a sample back -------------------------------------------------------------------------
    def _time_left(self, drawing: Drawing) -> float | None:
        """Seconds in which a run must begin; None if it may wait for as long as others have the room."""
        if drawing.given_back is None:
            return None
        return max(0.0, self._patience - drawing.waited_until(self._clock()))

    async def _wait_for_another(self, entry: Entry, drawing: Drawing) -> TinsmithError | None:
        """Pause before a sample that was given back is sent again; an error if that is of no use any more.

        That a replica cannot bring its worker back says nothing of the samples which it had or was sent, so it does not
        count among the deaths of a sample: while Serve has not noticed, each attempt would count.
        """
        if drawing.given_back is None:
            _log.warning("sample %s is given back by its replica, which has failed", entry.ticket.request_id)
        entry.running = False
        drawing.give_back(self._clock())
        if self._stopping:
            return _shutting_down()
        with suppress(TimeoutError):
            async with asyncio.timeout(min(self._pause, self._time_left(drawing) or 0.0)):
                await drawing.cancelled.wait()
        return self._overdue() if self._time_left(drawing) == 0.0 else None

    def _no_replica(self, drawing: Drawing) -> Unavailable | None:
        """The outcome of a sample that was given back and that no replica has begun in time; None if it waits anew, for
        replicas that draw other samples are there, and only full."""
        if not any(other.running for other in self._drawing):
            return self._overdue()
        drawing.given_back, drawing.waited = self._clock(), 0.0
        return None

    def _overdue(self) -> Unavailable:
        return Unavailable(
            f"the sampling replica that had this sample has failed, and base model {self.name!r} has had no other one "
            f"for it in {self._patience:.0f} s",
            hint="ask for it again later; on the cluster, `serve status` and the replica's log say why none starts",
            code="base_model_unavailable",
        )


def _adapter_key(sample: Sample) -> str:
    """What Serve knows the sample's adapter by; empty for the base model, which every replica has."""
    if sample.adapter_folder is None:
        return ""
    return hashlib.sha256(sample.adapter_folder.encode()).hexdigest()[:16]


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down")
