"""Sends samples to a deployment of sampling replicas, and holds those that wait for one.

It has the part of the runtime's surface that sampling uses, so that whoever holds tickets cannot tell the two apart.
Samples wait here, without their prompts, in fair shares between projects; only as many are handed to Serve as may begin
soon. A sample whose replica dies runs again on another one, with the same seed, and its stream goes on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
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

from schemas.errors import Cancelled, EngineFailure, TinsmithError, Unavailable, WorkerDied
from schemas.operations import Sample, SampleDelta, SampleResult, SampleStats
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
"""Before a sample is sent again that a replica gave back; Serve replaces it meanwhile."""


@dataclass(slots=True)
class _Drawing:
    """A sample that was handed to Serve."""

    task: asyncio.Task[SampleResult | TinsmithError]
    sequences: int
    prompt: int
    """Tokens."""
    response: Any = None
    """Serve's stream of the run that is under way."""


class SamplerClient:
    """The samples of one base model. All methods are called from one event loop.

    Args:
        name: of the base model.
        ahead: samples that are handed to Serve and have not begun, at most: enough that replicas have their next ones,
            and that Serve sees when more replicas are needed; few enough that the order is decided here. Take
            `most_ongoing`.
    """

    def __init__(self, name: str, *, ahead: int) -> None:
        self.name = name
        self._handle: Any = None
        self._last_words: Any = None
        self._failure: TinsmithError | None = None
        self._ahead = ahead
        self._desk = Desk(UnderWay().answering)
        self._line = SampleLine()
        self._drawing: dict[Entry, _Drawing] = {}
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
        self._meter.begin(time.monotonic())
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
        if entry in self._drawing:
            response = self._drawing[entry].response
            if response is not None:
                response.cancel()
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
        if entry in self._drawing:
            return QueueState("active", "waiting for a sampling replica that has room")
        return QueueState("active", self._line.reason(entry))

    def samples_waiting(self, project_id: str) -> int:
        """How many samples of a project wait here to be handed to a replica."""
        return self._line.waiting(project_id)

    def throughput(self) -> Throughput:
        """Tokens that were read and drawn for this client, as samples ended. What prompts found in caches and what the
        replicas' time went into only they know."""
        return self._meter.read(time.monotonic(), 0.0)

    def load(self) -> Load:
        """What there is to do now."""
        return Load(training=0, samples=self._desk.waiting(training=False), adapters=0)

    async def stop(self, grace: float) -> None:
        """Refuse new samples, finish those that were taken within `grace` seconds, fail the rest with `Unavailable`."""
        self._stopping = True
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
        """Read a sample and hand it to Serve; one that cannot be read is answered."""
        try:
            sample = await entry.load()
            if not isinstance(sample, Sample):
                raise EngineFailure(f"a sampler has no operation {type(sample).__name__}")
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
        self._drawing[entry] = _Drawing(task, sample.num_samples, len(sample.prompt))
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
            self._meter.add_sampling(stats, busy=0.0, now=time.monotonic())
        if outcome is not None:
            self._desk.finish(entry, outcome)
        self._wake.set()
        self._ended.set()

    async def _attempt(self, entry: Entry, sample: Sample) -> SampleResult | TinsmithError | None:
        """The outcome of a run; None if the replica was lost and the sample is to run again."""
        request = SampleRequest(
            f"{entry.ticket.request_id}.{entry.attempts}",
            entry.ticket.project_id,
            sample,
            stream=entry.ticket.progress is not None,
            last_words=self._last_words,
        )
        response = self._handle.options(multiplexed_model_id=_adapter_key(sample)).remote(request)
        self._drawing[entry].response = response
        last: SampleResult | TinsmithError | GivenBack | None = None
        try:
            last = await self._follow(entry, response)
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
            await asyncio.sleep(_PAUSE_SECONDS)
            return self._run_again(entry)
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


def _adapter_key(sample: Sample) -> str:
    """What Serve knows the sample's adapter by; empty for the base model, which every replica has."""
    if sample.adapter_folder is None:
        return ""
    return hashlib.sha256(sample.adapter_folder.encode()).hexdigest()[:16]


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down")
