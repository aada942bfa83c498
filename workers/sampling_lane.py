"""Executes samples: batches of them decode side by side, a slice of tokens at a time.

Responsible for forming batches, cancelling, and running again what a dying worker took along. Not responsible for
decoding itself (`engines/rollout.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from schemas.errors import EngineFailure, Gone, InvalidRequest, TinsmithError, WorkerDied
from schemas.operations import Sample
from workers.scheduler import SampleLine
from workers.tickets import Desk, Entry
from workers.training_lane import MAX_RERUNS
from workers.turn_runner import WorkerCall

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
    tokens: int
    """The most that its rows can hold of the key-value cache."""
    cancelled: list[str] = field(default_factory=list)


class SamplingLane:
    """All samples of one base model.

    Args:
        max_rows: sequences that decode together in one batch.
        max_tokens: tokens that the rows of all batches may hold at once (the key-value cache grows up to that).
        context_length: that of the base model, once it is known.
    """

    def __init__(
        self,
        desk: Desk,
        call: WorkerCall,
        *,
        max_rows: int,
        max_tokens: int,
        context_length: Callable[[], int],
        decode_slice: int,
    ) -> None:
        self._max_tokens = max_tokens
        self._context_length = context_length
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
            tokens = sum(self._tokens(sample) for _, sample in chosen)
            batch = _Batch(batch_id, entries, _alone(chosen[0][0]), tokens)
            for entry in entries.values():
                entry.start()
                entry.unload()
            self._batches[batch_id] = batch
            samples = {entry.ticket.request_id: sample for entry, sample in chosen}
            await self._guard(batch, self._call("start_generation", batch_id, samples))

    async def _choose(self) -> list[tuple[Entry, Sample]]:
        """Take samples in turn until the rows of a batch, or the room for tokens, are full. A sample wider than a batch
        goes by itself; one that needs more room than is left waits for other batches to end."""
        chosen: list[tuple[Entry, Sample]] = []
        rows = 0
        room = self._max_tokens - sum(batch.tokens for batch in self._batches.values())
        while rows < self._max_rows and (entry := self._line.peek()) is not None:
            alone = _alone(entry)
            if alone and (chosen or self._batches):
                break
            sample = await self._load(entry)
            if sample is None:
                continue
            if chosen and rows + sample.num_samples > self._max_rows:
                break
            if self._tokens(sample) > room:
                break
            self._line.take(entry)
            chosen.append((entry, sample))
            rows += sample.num_samples
            room -= self._tokens(sample)
            if alone:
                break
        return chosen

    def _tokens(self, sample: Sample) -> int:
        return sample.most_tokens(self._context_length())

    async def _load(self, entry: Entry) -> Sample | None:
        """The sample of an entry; None if it cannot be read (it is answered then) or was cancelled meanwhile."""
        try:
            operation = await entry.load()
            if not isinstance(operation, Sample):
                raise EngineFailure(f"a sampler has no operation {type(operation).__name__}")
            refuse_too_large(operation, self._context_length(), self._max_tokens)
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


def refuse_too_large(sample: Sample, context_length: int, room: int) -> None:
    """Raise `InvalidRequest` if the sequences of a sample could need more than `room` tokens of the key-value cache."""
    needed = sample.most_tokens(context_length)
    if needed > room:
        raise InvalidRequest(
            f"num_samples {sample.num_samples} of up to {needed // sample.num_samples} tokens (prompt and max_tokens) "
            f"may need room for {needed} tokens; this server has room for {room}",
            field="num_samples",
            hint="ask for fewer samples at a time, or give a smaller max_tokens",
            code="sample_too_large",
        )


def _alone(entry: Entry) -> bool:
    return entry.attempts >= MAX_RERUNS
