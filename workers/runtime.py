"""The runtime of one base model: what the edge talks to.

Responsible for the loop that shares one worker group between training and sampling, turn by turn, and for the group's
life: start, death, restart, stop. Not responsible for order and fairness (`workers/scheduler.py`), for the
operations themselves (the lanes), or for durability (the caller's `load` and `done`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from schemas.base_model_info import BaseModelInfo
from schemas.errors import EngineFailure, TinsmithError, Unavailable, WorkerDied
from workers.group import WorkerGroup
from workers.recovery import MAX_SERVER_DEATHS, RECOVERING, History
from workers.sampling_lane import SamplingLane
from workers.snapshots import SnapshotPolicy
from workers.throughput import Throughput, ThroughputMeter
from workers.tickets import UNREAD, Desk, Entry, QueueState, Ticket
from workers.training_lane import TrainingLane
from workers.under_way import UnderWay

__all__ = ["Load", "ModelRuntime", "QueueState", "Throughput", "Ticket"]

_log = logging.getLogger("tinsmith.runtime")

State = Literal["starting", "ready", "restarting", "failed"]
_LONGEST_PAUSE = 30.0
_TURNS = frozenset({"run_micro_batch", "sample_turn"})
"""Calls whose time is bounded by what they are asked for."""
_LONGEST_SLOT = 2.0
"""Seconds that waiting training, or sampling, owes the other one at most."""
_FREE_TURN = 0.05
"""Seconds of a turn of sampling while training has nothing to do: new training work waits for no longer, or for the few
steps of `decode_slice`."""
_SAMPLE_TURN = 0.1
"""Seconds of a turn of sampling beside training: long enough that the way to the worker costs little, short enough that
new samples join and cancelled ones stop soon."""


@dataclass(frozen=True, slots=True)
class Load:
    """Accepted operations and samples that have not begun, and adapters on the worker."""

    training: int
    samples: int
    adapters: int


class ModelRuntime:
    """One base model on one worker group. All methods are called from one event loop.

    Args:
        gap_timeout: seconds that operations wait behind a seq_id that has not arrived.
        max_adapters: models that may be trained at once.
        max_sample_rows: sequences that decode together, until the worker has said how many it takes.
        decode_slice: tokens per row that a turn of sampling decodes at least.
        micro_batch_tokens: tokens of a training turn; None = what the engine likes.
        turn_timeout: seconds after which a turn counts as hung: the worker is ended and started again, as
            after a death. None = no limit.
        death_limit: how often in a row a server may be killed while it executes an operation, before that fails.
        restart_limit: restarts in a row, without any completed work between them, before the runtime gives up.
        restart_pause: seconds before the first of those restarts; doubles each time.
        on_models_lost: told which models cannot be brought back after a worker died, before their operations fail.
        history: the log and the snapshots from which models are brought back; None = live models die with a worker.
        snapshots: when a snapshot of a model is taken.
        under_way: what all runtimes of this server execute now; None = nothing beside this one counts.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        group: WorkerGroup,
        *,
        gap_timeout: float = 60.0,
        max_adapters: int = 64,
        max_sample_rows: int = 64,
        decode_slice: int = 8,
        micro_batch_tokens: int | None = None,
        turn_timeout: float | None = None,
        restart_limit: int = 3,
        death_limit: int = MAX_SERVER_DEATHS,
        restart_pause: float = 0.5,
        on_models_lost: Callable[[Sequence[str]], Awaitable[None]],
        history: History | None = None,
        snapshots: SnapshotPolicy | None = None,
        under_way: UnderWay | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.state: State = "starting"
        self.info: BaseModelInfo | None = None
        self.failure: TinsmithError | None = None
        self._group = group
        self._restart_limit = restart_limit
        self._restart_pause = restart_pause
        self._on_models_lost = on_models_lost
        self._clock = clock
        self._under_way = under_way or UnderWay()
        self._desk = Desk(self._under_way.answering)
        self._turn_timeout = turn_timeout
        self._meter = ThroughputMeter()
        self._training = TrainingLane(
            self._desk,
            self._call,
            budget=lambda: micro_batch_tokens or (self.info.micro_batch_tokens if self.info is not None else 1),
            meter=self._meter,
            gap_timeout=gap_timeout,
            max_adapters=max_adapters,
            history=history,
            policy=snapshots or SnapshotPolicy(),
            tell_lost=self._tell_lost,
            death_limit=death_limit,
            clock=clock,
            wake=self._wake_up,
        )
        self._sampling = SamplingLane(
            self._desk,
            self._call,
            meter=self._meter,
            max_rows=max_sample_rows,
            steps=decode_slice,
            context_length=lambda: self.info.context_length if self.info is not None else 0,
            clock=clock,
            wake=self._wake_up,
        )
        self._owed = 0.0
        """Seconds of the worker that sampling is behind training; negative if it is ahead."""
        self._wake = asyncio.Event()
        self._death: TinsmithError | None = None
        self._restarts = 0
        self._since = clock()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Begin to load the base model in the background; returns at once."""
        self._since = self._clock()
        self._group.on_death(self._note_death)
        self._task = asyncio.create_task(self._run(), name=f"runtime {self.name}")

    async def stop(self, grace: float) -> None:
        """Refuse new work, finish what is queued within `grace` seconds, fail the rest with `Unavailable`."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            if self.state == "ready":
                await asyncio.wait({self._task}, timeout=grace)
            self._task.cancel()
            await asyncio.wait({self._task})
        self._desk.finish_all(self._unavailable())
        await self._group.stop()
        await self._training.close()
        await self._desk.close()

    @property
    def progress(self) -> str | None:
        """What the worker is doing while it starts, in words; None once it runs."""
        return self._group.progress

    async def probe(self, timeout: float) -> bool:  # noqa: ASYNC109 (a plain number crosses to any transport)
        """Whether the base model is loaded and its worker really answers."""
        return self.state == "ready" and await self._group.ping(timeout)

    # -- work ------------------------------------------------------------------------------------------------------
    def open_model(self, model_id: str) -> None:
        """Expect the operations of a training run, from its creation (seq_id 0) on."""
        self._training.open_model(model_id)

    def reopen_model(self, model_id: str, next_seq: int, cut_off: frozenset[int]) -> None:
        """Bring back a training run of an earlier process; `next_seq` is the first seq_id that was not in line yet, and
        `cut_off` are those before it that are submitted (next) to run again."""
        self._training.reopen_model(model_id, next_seq, cut_off)
        self._wake.set()

    def submit(self, ticket: Ticket) -> None:
        """Take an operation in. Never blocks and never raises: what cannot run is told through `ticket.done`."""
        entry = self._desk.open(ticket)
        if entry is None:
            return
        if self._stopping or self.state == "failed":
            self._desk.finish(entry, self._unavailable())
        elif ticket.model_id is None:
            self._sampling.submit(entry)
        else:
            self._training.submit(entry)
        self._wake.set()

    def note_refused(self, model_id: str, seq_id: int) -> None:
        """A refused request consumed this seq_id: nothing waits for it."""
        self._training.note_refused(model_id, seq_id)
        self._wake.set()

    def close_model(self, model_id: str) -> None:
        """The training run is over: free its adapter, fail what waits with `Gone`."""
        self._training.close_model(model_id)
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Nobody wants this sample any more. Training operations cannot be cancelled: others depend on them."""
        entry = self._desk.find(request_id)
        if entry is not None and entry.ticket.model_id is None:
            self._sampling.cancel(entry)
            self._wake.set()

    def waiting(self, request_id: str) -> QueueState:
        """Why a request has no result yet."""
        entry = self._desk.find(request_id)
        if self.state in ("starting", "restarting") and entry is not None:
            doing = "loading" if self.state == "starting" else "restarting"
            detail = f": {self._group.progress}" if self._group.progress else ""
            return QueueState("paused_capacity", f"base model is {doing} ({self._clock() - self._since:.0f} s){detail}")
        if entry is None:
            return QueueState("active")
        if entry.ticket.model_id is None:
            if entry.unread is not None:
                return QueueState("paused_capacity", entry.unread)
            return QueueState("active", "running" if entry.running else self._sampling.reason(entry))
        reason = self._training.reason(entry)
        return QueueState("paused_capacity" if reason.startswith((RECOVERING, UNREAD)) else "active", reason)

    def samples_waiting(self, project_id: str) -> int:
        """How many samples of a project wait to be handed to the worker."""
        return self._sampling.waiting(project_id)

    def throughput(self) -> Throughput:
        """What training and sampling have computed so far, and how fast."""
        return self._meter.read(self._clock(), self.info.peak_flops if self.info is not None else 0.0)

    def load(self) -> Load:
        """What there is to do now."""
        training, samples = self._desk.waiting(training=True), self._desk.waiting(training=False)
        return Load(training, samples, self._training.adapters)

    # -- the loop --------------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        try:
            self.info = await self._group.start()
            self.state = "ready"
            self._meter.begin(self._clock())
            while await self._cycle():
                pass
        except TinsmithError as error:
            await self._fail(error)
        except Exception as error:
            _log.exception("the runtime of %s failed", self.name)
            await self._fail(EngineFailure(f"the runtime failed ({type(error).__name__})"))

    async def _cycle(self) -> bool:
        """A turn of training and as much time for sampling; False when stopped and nothing is left that can run."""
        self._wake.clear()
        if self._death is not None:
            await self._recover(self._death)
        self._training.expire()
        try:
            began = self._clock()
            trained = await self._training.run_next()
            sampled = await (self._sample(self._clock() - began) if trained else self._sample_freely())
        except WorkerDied as error:
            self._death = self._death or error
            return True
        await self._desk.settle()
        if not trained and not sampled:
            if self._stopping:
                return False
            await self._rest()
        return True

    async def _sample(self, trained: float) -> bool:
        """Sample for as long as training took, over the turns of both; False if there was nothing to do."""
        self._owed = min(self._owed + trained, _LONGEST_SLOT)
        while self._owed > 0 and self._death is None:
            began = self._clock()
            if not await self._sampling.advance(min(self._owed, _SAMPLE_TURN)):
                self._owed = 0.0
                return False
            self._owed = max(self._owed - (self._clock() - began), -_LONGEST_SLOT)
            await self._desk.settle()
        return True

    async def _sample_freely(self) -> bool:
        """One short turn while training has nothing to do; False if there was nothing to do.

        A client that trains step by step comes back a moment later: it is owed that turn, but no more.
        """
        began = self._clock()
        sampled = await self._sampling.advance(_FREE_TURN)
        self._owed = -min(self._clock() - began, _LONGEST_SLOT) if sampled else 0.0
        return sampled

    async def _rest(self) -> None:
        """Wait for news, or for the next deadline."""
        await self._under_way.mark()
        deadline = self._training.next_deadline()
        pause = None if deadline is None else max(0.0, deadline - self._clock())
        try:
            async with asyncio.timeout(pause):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _call(self, method: str, *args: Any, executes: Sequence[Entry] = ()) -> Any:
        async with self._under_way.call(executes):
            return await self._call_now(method, *args)

    async def _call_now(self, method: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(self._turn_timeout if method in _TURNS else None):
                value = await self._group.call(method, *args)
        except TimeoutError:
            message = f"the worker did not finish a turn within {self._turn_timeout:g} s and was ended"
            _log.error("%s: %s", self.name, message)
            await self._group.stop()
            raise WorkerDied(message) from None
        except WorkerDied:
            raise
        except TinsmithError:
            self._restarts = 0
            raise
        self._restarts = 0
        return value

    # -- death -----------------------------------------------------------------------------------------------------
    def _wake_up(self) -> None:
        self._wake.set()

    def _note_death(self, error: TinsmithError) -> None:
        self._death = error
        self._wake.set()

    async def _recover(self, error: TinsmithError) -> None:
        """Set the models back and start the group again; raises the last error when it cannot be started.

        The models are brought back afterwards, in turn with other work.
        """
        _log.error("restarting the worker of %s: %s", self.name, error.message)
        self.state, self._since = "restarting", self._clock()
        lost, failed = self._training.lose_models()
        failed += self._sampling.requeue()
        if lost:
            await self._tell_lost(lost)
        for entry, reason in failed:
            self._desk.finish(entry, reason)
        while self._restarts < self._restart_limit:
            await asyncio.sleep(min(self._restart_pause * 2**self._restarts, _LONGEST_PAUSE))
            self._restarts += 1
            await self._group.stop()
            self._death = None
            try:
                self.info = await self._group.start()
            except TinsmithError as start_error:
                _log.error("restart %d of %s failed: %s", self._restarts, self.name, start_error.message)
                error = start_error
            else:
                self.state = "ready"
                self._meter.note_restart()
                _log.info("the worker of %s is there again", self.name)
                return
        raise error

    async def _tell_lost(self, lost: Sequence[str]) -> None:
        try:
            await self._on_models_lost(lost)
        except Exception:
            _log.exception("the loss of %d models of %s cannot be recorded", len(lost), self.name)

    async def _fail(self, error: TinsmithError) -> None:
        self.state, self.failure = "failed", error
        _log.error("base model %s is not available: %s", self.name, error.message)
        self._desk.finish_all(self._unavailable())
        await self._group.stop()

    def _unavailable(self) -> Unavailable:
        if self.failure is None:
            return Unavailable("the server is shutting down")
        return Unavailable(f"base model {self.name!r} is not available: {self.failure.message}", hint=self.failure.hint)
