"""Executes samples: they wait here, and join the batch that runs on the worker as it has room.

Responsible for handing samples over, for passing on what was drawn, for cancelling, and for running again what a dying
worker took along. Not responsible for the order of waiting samples (`workers/sample_line.py`), for decoding
(`engines/sampling/`) or for when sampling gets the worker (`workers/runtime.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from schemas.errors import Cancelled, EngineFailure, NotNow, TinsmithError, WorkerDied
from schemas.operations import (
    Sample,
    SampleDelta,
    SampleResult,
    SamplerLoad,
    SampleTurn,
    SampleTurnResult,
)
from workers.adapters import WorkerCall
from workers.reruns import MAX_RERUNS, seeded, unheard
from workers.sample_line import SampleLine
from workers.throughput import ThroughputMeter
from workers.tickets import Desk, Entry

_log = logging.getLogger("tinsmith.runtime")

READY_INSIDE = 4
"""Samples that wait inside the worker for room there: enough that it has the next ones when rows become free, few
enough that the order between projects is decided here."""
PREFETCHED = 16
"""Waiting samples that are in memory at most, so that reading them back does not hold up the worker."""
STREAM_TURN = 0.03
"""Seconds of a turn while somebody reads along: tokens are told at the end of a turn. Where a step takes as long, each
token is told when it is drawn; where it takes less, the way to the worker still costs little."""


@dataclass(slots=True)
class _Running:
    """A sample that the worker has."""

    entry: Entry
    sequences: int
    alone: bool
    """It is at its last attempt: nothing runs beside it, so that it can only hurt itself."""
    handed: bool = False
    """It was sent to the worker, and is not just about to be."""
    drawn: dict[int, int] = field(default_factory=dict)
    """Of one that streams: sequence -> tokens reported in this attempt."""


class SamplingLane:
    """All samples of one base model.

    Args:
        meter: told what each turn did.
        max_rows: sequences that decode together, until the worker has said how many it takes.
        steps: the least number of steps of a turn.
        context_length: that of the base model, once it is known.
        clock: monotonic seconds.
        wake: told that there is something to do that nobody else told.
    """

    def __init__(
        self,
        desk: Desk,
        call: WorkerCall,
        *,
        meter: ThroughputMeter,
        max_rows: int,
        steps: int,
        context_length: Callable[[], int],
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._desk = desk
        self._wake = wake
        self._call = call
        self._meter = meter
        self._max_rows = max_rows
        self._steps = steps
        self._context_length = context_length
        self._clock = clock
        self._line = SampleLine()
        self._running: dict[str, _Running] = {}
        self._cancelled: dict[str, None] = {}
        """Samples that the worker is to forget: nobody wants them any more, or a turn with them failed."""
        self._load = SamplerLoad()
        """What the worker said last."""
        self._ahead: dict[Entry, None] = {}
        """Waiting samples that are in memory or being read."""

    # -- what the edge does ----------------------------------------------------------------------------------------
    def submit(self, entry: Entry) -> None:
        """Queue a sample, unless servers have died over it too often."""
        if entry.attempts > MAX_RERUNS:
            self._desk.finish(entry, WorkerDied("the server died each time that it ran this sample"))
        else:
            self._line.add(entry)

    def cancel(self, entry: Entry) -> None:
        """End a sample that nobody wants any more with `Cancelled`.

        One that the worker has stops before the next turn, which tells what it took. If it ends before it can be
        stopped, that is its outcome.
        """
        request_id = entry.ticket.request_id
        entry.unwanted = True
        self._ahead.pop(entry, None)
        running = self._running.get(request_id)
        if running is not None and running.handed:
            self._cancelled[request_id] = None
            return
        if not self._line.discard(entry):
            self._drop(request_id)
        self._desk.finish(entry, Cancelled())

    def waiting(self, project_id: str) -> int:
        """How many samples of a project wait here; those that the worker has do not count."""
        return self._line.waiting(project_id)

    def reason(self, entry: Entry) -> str:
        """Why a waiting entry does not run, for people."""
        if _alone(entry):
            return "waiting to run alone: it was running each time that the worker failed"
        return self._line.reason(entry)

    # -- what the loop does ----------------------------------------------------------------------------------------
    async def advance(self, seconds: float) -> bool:
        """Hand over what there is room for and run one turn of at least `seconds`; False if there was nothing to do.

        Raises `WorkerDied`; what was running then stays with the lane until `requeue`.
        """
        idle = not self._running
        added = await self._choose()
        if not self._running and not self._cancelled:
            return False
        for running in self._running.values():
            running.handed = True
        cancelled, self._cancelled = self._cancelled, {}
        turn = SampleTurn(added, tuple(cancelled), *self._length(idle, seconds))
        began = self._clock()
        try:
            executes = [running.entry for running in self._running.values()]
            result: SampleTurnResult = await self._call("sample_turn", turn, executes=executes)
        except WorkerDied:
            raise
        except TinsmithError as error:
            self._cancelled.update(cancelled if self._running else ())
            self._fail_turn(error)
            return True
        now = self._clock()
        self._meter.add_sampling(result.stats, busy=now - began, now=now)
        self._load = result.load
        self._settle(result, cancelled)
        return True

    def _length(self, idle: bool, seconds: float) -> tuple[int, float]:
        """The least number of steps and seconds of a turn.

        A batch that begins with the first sample of a burst is short, so that the others need not wait for it.
        """
        if idle:
            return 1, 0.0
        if any(running.entry.ticket.progress is not None for running in self._running.values()):
            return 1, min(seconds, STREAM_TURN)
        return self._steps, seconds

    def requeue(self) -> list[tuple[Entry, TinsmithError]]:
        """The worker died: put what was running back in line; returns those that were lost too often."""
        self._cancelled.clear()
        self._load = SamplerLoad()
        return self._run_again(WorkerDied("the worker died each time that it ran this sample"))

    # -- handing over ----------------------------------------------------------------------------------------------
    async def _choose(self) -> Mapping[str, Sample]:
        """Take samples in turn while the worker has room. One at its last attempt waits until nothing else runs."""
        added: dict[str, Sample] = {}
        most = self._load.max_rows or self._max_rows
        rows, waiting = (self._load.rows, self._load.waiting) if self._running else (0, 0)
        alone = any(running.alone for running in self._running.values())
        while not alone and waiting < READY_INSIDE and (entry := self._line.peek()) is not None:
            alone = _alone(entry)
            if alone and self._running:
                break
            self._prefetch(max(0, most - rows) + READY_INSIDE - waiting)
            sample = await self._read(entry)
            if sample is None:
                alone = False
                continue
            added[entry.ticket.request_id] = self._take(entry, sample)
            if waiting or rows + sample.num_samples > most:
                waiting += 1
            else:
                rows += sample.num_samples
        self._prefetch(READY_INSIDE)  # read while the worker is busy
        # Whoever was cancelled while another one was read is not running any more.
        return {request_id: sample for request_id, sample in added.items() if request_id in self._running}

    def _take(self, entry: Entry, sample: Sample) -> Sample:
        """Take a sample out of the line; returns it as the worker gets it."""
        self._line.take(entry, prompt=len(sample.prompt), sequences=sample.num_samples, most=self._most_drawn(sample))
        entry.start()
        entry.unload()
        self._ahead.pop(entry, None)
        self._running[entry.ticket.request_id] = _Running(entry, sample.num_samples, _alone(entry))
        return _prepared(entry, sample)

    def _prefetch(self, most: int) -> None:
        """Begin to read the next samples; of those read for nothing lately, the oldest are given back."""
        for entry in self._line.upcoming(min(most, PREFETCHED)):
            entry.prefetch()
            self._ahead[entry] = None
        while len(self._ahead) > PREFETCHED:
            oldest = next(iter(self._ahead))
            del self._ahead[oldest]
            oldest.unload()

    def _most_drawn(self, sample: Sample) -> int:
        wanted = sample.params.max_tokens
        return max(0, self._context_length() - len(sample.prompt)) if wanted is None else wanted

    async def _read(self, entry: Entry) -> Sample | None:
        """The sample of an entry; None if it cannot be read (it is answered then, or put off if that may pass) or was
        cancelled meanwhile."""
        try:
            operation = await entry.load()
            if not isinstance(operation, Sample):
                raise EngineFailure(f"a sampler has no operation {type(operation).__name__}")
            if not entry.over:
                return operation
        except NotNow as error:
            if not entry.over:
                self._ahead.pop(entry, None)
                self._line.put_off(entry, error, self._wake)
                return None
        except TinsmithError as error:
            self._desk.finish(entry, error)
        self._line.discard(entry)
        self._ahead.pop(entry, None)
        return None

    # -- after a turn ----------------------------------------------------------------------------------------------
    def _settle(self, result: SampleTurnResult, cancelled: Iterable[str]) -> None:
        """Pass on what was drawn, then answer what ended, or was `cancelled` with this turn."""
        for request_id, deltas in result.deltas.items():
            running = self._running.get(request_id)
            if running is not None:
                for delta in deltas:
                    self._tell(running, delta)
        ended = dict(result.ended)
        for request_id in cancelled:
            if request_id in self._running and self._running[request_id].entry.unwanted:
                ended.setdefault(request_id, Cancelled())  # the worker knows nothing of it
        for request_id, outcome in ended.items():
            running = self._drop(request_id, outcome)
            if running is not None:
                self._cancelled.pop(request_id, None)
                self._desk.finish(running.entry, outcome)
        if self._running and not self._load.active:
            self._fail_turn(EngineFailure("the worker gave no result for this sample"))

    def _tell(self, running: _Running, delta: SampleDelta) -> None:
        """Pass new tokens on, without those that an earlier attempt had told: the seed is the same, and so are they."""
        entry = running.entry
        progress = entry.ticket.progress
        if progress is None:
            return
        new = unheard(entry.told, running.drawn, delta)
        if new is None:
            return
        try:
            progress(new)
        except Exception:
            _log.exception("the progress of request %s cannot be told", entry.ticket.request_id)

    def _drop(self, request_id: str, outcome: SampleResult | TinsmithError | None = None) -> _Running | None:
        """Forget a sample that runs no longer; None if it was not running."""
        running = self._running.pop(request_id, None)
        if running is not None:
            whole, drawn = isinstance(outcome, SampleResult), None
            if isinstance(outcome, SampleResult):
                drawn = sum(len(sequence.tokens) for sequence in outcome.sequences)
            elif isinstance(outcome, Cancelled):
                drawn = outcome.drawn_tokens
            self._line.end(running.entry, sequences=running.sequences, drawn=drawn, whole=whole)
        return running

    # -- failures of the whole batch -------------------------------------------------------------------------------
    def _fail_turn(self, error: TinsmithError) -> None:
        """A turn failed as a whole: nobody knows through whom. Its samples run again, the last time one by one, so that
        one bad or too large sample fails alone; a sample that is alone already fails with the error."""
        self._cancelled.update(dict.fromkeys(self._running))
        if len(self._running) == 1:
            [running] = self._running.values()
            self._drop(running.entry.ticket.request_id)
            self._desk.finish(running.entry, error)
            return
        for entry, reason in self._run_again(error):
            self._desk.finish(entry, reason)

    def _run_again(self, error: TinsmithError) -> list[tuple[Entry, TinsmithError]]:
        """Put all that is running back in line, in the order in which it was taken; returns what ends instead: it has
        failed too often, or nobody wants it."""
        failed: list[tuple[Entry, TinsmithError]] = []
        for running in reversed(list(self._running.values())):
            entry = running.entry
            self._drop(entry.ticket.request_id)
            if entry.unwanted:
                failed.append((entry, Cancelled()))
                continue
            entry.running = False
            entry.attempts += 1
            if entry.attempts <= MAX_RERUNS:
                self._line.add_first(entry)
            else:
                failed.append((entry, error))
        return failed


def _alone(entry: Entry) -> bool:
    return entry.attempts >= MAX_RERUNS


def _prepared(entry: Entry, sample: Sample) -> Sample:
    """The sample as the worker gets it."""
    ticket = entry.ticket
    return replace(
        seeded(sample, ticket.request_id), stream=ticket.progress is not None, cache_domain=ticket.project_id
    )
