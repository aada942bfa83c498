"""Executes samples: batches of them decode side by side, a slice of tokens at a time.

Responsible for forming batches, cancelling, and running again what a dying worker took along. Not responsible for
decoding itself (`engines/rollout.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, field

from schemas.errors import EngineFailure, Gone, TinsmithError, WorkerDied
from schemas.operations import Sample
from workers.scheduler import SampleLine
from workers.tickets import Desk, Entry
from workers.training_lane import MAX_RERUNS, WorkerCall

_log = logging.getLogger("tinsmith.runtime")

MAX_GENERATIONS = 4
"""Batches in flight. A new sample need not wait for the end of a long batch, and memory stays bounded."""
GATHER_SECONDS = 0.01
"""How long an idle sampler waits before the first batch: the samples of one burst arrive over a few milliseconds, and
decoding them together costs hardly more than decoding the first one alone."""


@dataclass(slots=True)
class _Batch:
    batch_id: str
    entries: dict[str, Entry]
    alone: bool
    """Holds one sample at its last attempt: nothing runs beside it, so that it can only hurt itself."""
    cancelled: list[str] = field(default_factory=list)


class SamplingLane:
    """All samples of one base model."""

    def __init__(self, desk: Desk, call: WorkerCall, *, max_rows: int, decode_slice: int) -> None:
        self._desk = desk
        self._call = call
        self._line = SampleLine()
        self._max_rows = max_rows
        self._decode_slice = decode_slice
        self._batches: dict[str, _Batch] = {}
        self._batch_ids = itertools.count()

    def submit(self, entry: Entry) -> None:
        """Queue a sample."""
        self._line.add(entry)

    def cancel(self, entry: Entry) -> None:
        """Answer a sample that nobody wants any more with `Gone`; one that decodes stops before the next slice."""
        for batch in self._batches.values():
            if batch.entries.pop(entry.ticket.request_id, None) is not None:
                batch.cancelled.append(entry.ticket.request_id)
        self._desk.finish(entry, Gone("the sample was cancelled", code="cancelled"))

    def reason(self, entry: Entry) -> str:
        """Why a waiting entry does not run, for people."""
        return self._line.reason(entry)

    async def advance(self) -> bool:
        """Start what fits, then decode one slice of every batch; False if there was nothing to do.

        Raises `WorkerDied`; what was decoding then stays with the lane until `requeue`.
        """
        if not self._batches and self._line.peek() is not None:
            await asyncio.sleep(GATHER_SECONDS)
        await self._start_batches()
        if not self._batches:
            return False
        for batch in list(self._batches.values()):
            await self._guard(batch, self._step(batch))
        return True

    def requeue(self) -> list[tuple[Entry, TinsmithError]]:
        """The worker died: put what was decoding back in line; returns those that were lost too often."""
        failed: list[tuple[Entry, TinsmithError]] = []
        for batch in self._batches.values():
            failed += self._run_again(batch, WorkerDied("the worker died each time that it ran this sample"))
        self._batches.clear()
        return failed

    def _run_again(self, batch: _Batch, error: TinsmithError) -> list[tuple[Entry, TinsmithError]]:
        failed: list[tuple[Entry, TinsmithError]] = []
        for entry in reversed(batch.entries.values()):
            entry.running = False
            entry.attempts += 1
            if entry.attempts <= MAX_RERUNS:
                self._line.add_first(entry)
            else:
                failed.append((entry, error))
        return failed

    # -- starting --------------------------------------------------------------------------------------------------
    async def _start_batches(self) -> None:
        while len(self._batches) < MAX_GENERATIONS and not any(batch.alone for batch in self._batches.values()):
            chosen = await self._choose()
            if not chosen:
                return
            chosen = [(entry, sample) for entry, sample in chosen if not entry.over]
            if not chosen:
                continue
            batch_id = f"batch-{next(self._batch_ids)}"
            entries = {entry.ticket.request_id: entry for entry, _ in chosen}
            batch = _Batch(batch_id, entries, alone=_alone(chosen[0][0]))
            for entry in entries.values():
                entry.running = True
                entry.unload()
            self._batches[batch_id] = batch
            samples = {entry.ticket.request_id: sample for entry, sample in chosen}
            await self._guard(batch, self._call("start_generation", batch_id, samples))

    async def _choose(self) -> list[tuple[Entry, Sample]]:
        """Take samples in turn until the rows of a batch are full. A sample wider than that goes by itself."""
        chosen: list[tuple[Entry, Sample]] = []
        rows = 0
        while rows < self._max_rows and (entry := self._line.peek()) is not None:
            alone = _alone(entry)
            if alone and (chosen or self._batches):
                break
            sample = await self._load(entry)
            if sample is None:
                continue
            if chosen and rows + sample.num_samples > self._max_rows:
                break
            self._line.take(entry)
            chosen.append((entry, sample))
            rows += sample.num_samples
            if alone:
                break
        return chosen

    async def _load(self, entry: Entry) -> Sample | None:
        """The sample of an entry; None if it cannot be read (it is answered then) or was cancelled meanwhile."""
        try:
            operation = await entry.load()
            if not isinstance(operation, Sample):
                raise EngineFailure(f"a sampler has no operation {type(operation).__name__}")
        except TinsmithError as error:
            self._desk.finish(entry, error)
            return None
        return None if entry.over else operation

    # -- decoding --------------------------------------------------------------------------------------------------
    async def _step(self, batch: _Batch) -> None:
        while batch.cancelled:
            await self._call("cancel_sample", batch.batch_id, batch.cancelled.pop())
        if not batch.entries:
            await self._call("end_generation", batch.batch_id)
            del self._batches[batch.batch_id]
            return
        ended = await self._call("step_generation", batch.batch_id, self._decode_slice)
        for request_id, outcome in ended.items():
            entry = batch.entries.pop(request_id, None)
            if entry is not None:
                self._desk.finish(entry, outcome)
        if not batch.entries and not batch.cancelled:
            del self._batches[batch.batch_id]

    async def _guard(self, batch: _Batch, work: Awaitable[None]) -> None:
        """Run a call of a batch. If it fails as a whole, its samples run again, the last time one by one, so that one
        bad or too large sample fails alone; a sample that is alone already fails with the error."""
        try:
            await work
        except WorkerDied:
            raise
        except TinsmithError as error:
            self._batches.pop(batch.batch_id, None)
            if len(batch.entries) > 1:
                failed = self._run_again(batch, error)
            else:
                failed = [(entry, error) for entry in batch.entries.values()]
            for entry, reason in failed:
                self._desk.finish(entry, reason)
            await self._forget(batch)

    async def _forget(self, batch: _Batch) -> None:
        """Let the worker drop a batch; if it fails again, only memory is at stake."""
        try:
            await self._call("end_generation", batch.batch_id)
        except WorkerDied:
            raise
        except TinsmithError as error:
            _log.warning("%s cannot be dropped: %s", batch.batch_id, error.message)


def _alone(entry: Entry) -> bool:
    return entry.attempts >= MAX_RERUNS
