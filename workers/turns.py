"""What goes into one call of the worker: datums and steps of several models, up to a number of tokens.

Responsible for the composition of turns and for reading operations back just in time. Not responsible for who is next
(`workers/scheduler.py`), nor for running a turn and answering its operations (`workers/turn_runner.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from schemas.errors import NotNow, TinsmithError
from schemas.operations import (
    AdapterStep,
    DatumRange,
    MicroBatch,
    Operation,
    OptimStep,
    TrainBatch,
)
from workers.parked import Parked
from workers.scheduler import TrainingLine
from workers.tickets import Entry

PREFETCHED_BATCHES = 8
"""Batches in memory that no turn has taken yet."""
STEP_TOKENS = 16
"""What an optimizer step counts in the shares: it costs about as much as the datums of a few tokens."""
CALL_TOKENS = 64
"""What an operation that is a call of its own (create, load, save, zero_grad) counts in the shares."""
_CHUNKS = 32
"""A turn is dealt out in pieces of this part of its budget, so that composing it costs little."""


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A batch on its way through the turns. Once it is sent, only the lengths of its datums stay here."""

    entry: Entry
    model_id: str
    lengths: tuple[int, ...]
    """Tokens of each datum."""
    batch: TrainBatch | None
    """Until it is sent."""
    planned: int = 0
    """Datums that are computed, or in the turn."""
    done: int = 0
    """Datums that are computed."""

    @property
    def operation_id(self) -> str:
        """Its name on the worker."""
        return self.entry.ticket.request_id

    @property
    def left(self) -> bool:
        """Whether datums remain for later turns."""
        return self.planned < len(self.lengths)


class Turn:
    """One call of the worker in the making. A datum that exceeds the budget goes alone."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens = 0
        self.sent = False
        self.closed = False
        """Whether what is in it is to run alone."""
        self.batches: dict[OpenBatch, int] = {}
        """With the first datum of each that is in this turn; in the order in which they began."""
        self.steps: dict[str, tuple[Entry, OptimStep]] = {}
        """By model. After its step, nothing else of a model is in the turn."""

    @property
    def empty(self) -> bool:
        """Whether nothing was put in."""
        return not self.batches and not self.steps

    @property
    def full(self) -> bool:
        """Whether no datum has room any more."""
        return self.tokens >= self.budget

    def fits(self, length: int) -> bool:
        """Whether a datum of this many tokens has room."""
        return self.tokens == 0 or self.tokens + length <= self.budget

    def add_datum(self, batch: OpenBatch) -> int:
        """Put in the next datum of a batch; returns its tokens."""
        length = batch.lengths[batch.planned]
        batch.planned += 1
        self.tokens += length
        return length

    def ended(self, model_id: str) -> bool:
        """Whether the last datum of a batch of this model is in the turn."""
        return any(batch.model_id == model_id and not batch.left for batch in self.batches)

    def models(self) -> set[str]:
        """Whose operations are in the turn."""
        return {batch.model_id for batch in self.batches} | set(self.steps)

    def entries(self) -> list[Entry]:
        """The operations in the turn."""
        return [batch.entry for batch in self.batches] + [entry for entry, _ in self.steps.values()]

    def message(self, dropped: tuple[str, ...]) -> MicroBatch:
        """The turn as the worker takes it, without what was answered meanwhile; the batches then belong to it alone."""
        self.sent = True
        self.batches = {batch: start for batch, start in self.batches.items() if not batch.entry.over}
        self.steps = {model_id: step for model_id, step in self.steps.items() if not step[0].over}
        opened = {batch.operation_id: batch.batch for batch in self.batches if batch.batch is not None}
        for batch in self.batches:
            batch.batch = None
        return MicroBatch(
            opened=opened,
            ranges=tuple(DatumRange(batch.operation_id, start, batch.planned) for batch, start in self.batches.items()),
            steps=tuple(
                AdapterStep(entry.ticket.request_id, model_id, step) for model_id, (entry, step) in self.steps.items()
            ),
            dropped=dropped,
        )


class Heads:
    """Reads operations back shortly before their turn, and holds at most `limit` batches that no turn has taken."""

    def __init__(self, limit: int = PREFETCHED_BATCHES) -> None:
        self._limit = limit
        self._held: dict[Entry, None] = {}

    def has_room(self) -> bool:
        """Whether one more may be read."""
        self._held = {entry: None for entry in self._held if entry.loading and not entry.over}
        return len(self._held) < self._limit

    def prefetch(self, entry: Entry) -> None:
        """Begin to read an operation, if there is room."""
        if entry.ticket.is_step:
            entry.prefetch()
        elif not entry.loading and self.has_room():
            self._held[entry] = None
            entry.prefetch()

    async def load(self, entry: Entry) -> Operation:
        """The operation; if there is no room, the one that was read last is put back, for its turn is the furthest.

        Raises a `TinsmithError` if it is unreadable.
        """
        if not entry.loading and not entry.ticket.is_step:
            if not self.has_room():
                self._held.popitem()[0].unload()
            self._held[entry] = None
        operation = await entry.load()
        if not isinstance(operation, TrainBatch):
            self._held.pop(entry, None)
        return operation

    def put_off(self, entry: Entry, error: NotNow, ready: Callable[[], None]) -> None:
        """The operation cannot be read now; `ready` is told when it can."""
        self._held.pop(entry, None)
        entry.put_off(error, ready)

    def take(self, entry: Entry) -> None:
        """A turn has taken the operation."""
        self._held.pop(entry, None)
        entry.unload()


class Composer:
    """Fills turns from the line.

    Args:
        banned: why an operation must not even be read back, if so.
        check: why a model cannot run an operation, if so.
        refuse: answers an entry that cannot run.
        wake: told that an operation can be read back that could not be.
    """

    def __init__(
        self,
        line: TrainingLine,
        heads: Heads,
        *,
        banned: Callable[[Entry], TinsmithError | None],
        check: Callable[[str, Operation], TinsmithError | None],
        refuse: Callable[[Entry, TinsmithError], None],
        wake: Callable[[], None],
    ) -> None:
        self._wake = wake
        self._line = line
        self._heads = heads
        self._banned = banned
        self._check = check
        self._refuse = refuse
        self.under_way: dict[str, OpenBatch] = {}
        """By model: the batch that has datums left."""
        self.parked = Parked()

    async def fill(self, turn: Turn) -> Entry | None:
        """Put in what fits, who is next first. Returns an operation that must be a call of its own, if that is next.

        What was under way when the worker died gets a turn of its own: should it die again, it is known over what.
        """
        if turn.empty and not self.under_way:
            self.parked.freed()
        passed = set(turn.steps)
        while (
            not turn.closed
            and (model_id := next((one for one in self._line.order() if self._may_run(one, passed)), None)) is not None
        ):
            batch = self.under_way.get(model_id)
            if batch is not None:
                if batch.entry.attempts and not turn.empty:
                    passed.add(model_id)
                    continue
                turn.closed = batch.entry.attempts > 0
                if not self._deal(turn, batch):
                    passed.add(model_id)
                continue
            if not self._may_look(turn, model_id):
                passed.add(model_id)
                continue
            head = await self._load_head(model_id)
            if head is None:
                continue
            entry, operation = head
            if entry.attempts and not turn.empty:
                passed.add(model_id)
                continue
            turn.closed = entry.attempts > 0
            if isinstance(operation, TrainBatch):
                if not self._begin(turn, model_id, entry, operation):
                    passed.add(model_id)
            elif isinstance(operation, OptimStep):
                self._start(model_id, entry, STEP_TOKENS)
                turn.steps[model_id] = (entry, operation)
                passed.add(model_id)
            elif turn.empty:
                self._start(model_id, entry, CALL_TOKENS)
                return entry
            else:
                passed.add(model_id)
        return None

    def prefetch(self) -> None:
        """Read ahead what the next turn will begin with, beside the one that runs."""
        for model_id in self._line.order():
            if not self._heads.has_room():
                return
            entry = self._line.head(model_id)
            if entry is None or entry.unread is not None or self._banned(entry) is not None:
                continue
            if model_id not in self.under_way and not self.parked.blocks(model_id):
                self._heads.prefetch(entry)

    def forget(self, batch: OpenBatch) -> None:
        """The batch gets no more turns."""
        if self.under_way.get(batch.model_id) is batch:
            del self.under_way[batch.model_id]
            self._line.release(batch.model_id)

    def put_off(self, model_id: str, entry: Entry, error: NotNow) -> None:
        """The next operation of a model cannot be read back now: others go on until it can."""
        self.parked.passed(model_id)  # it is not memory that it waits for
        self._heads.put_off(entry, error, partial(self._take_up, model_id))
        self._line.note_reading(model_id)

    def _take_up(self, model_id: str) -> None:
        self._line.note_reading(model_id)
        self._wake()

    def put_back(self, model_id: str, entries: Sequence[Entry], tokens: int) -> bool:
        """Operations of a model, in order, that found no room in the worker's memory are to start again, and what they
        were charged is given back; False if the model is closed."""
        if not self._line.put_back(model_id, entries):
            return False
        for entry in entries:
            entry.running = False
        self._line.charge(model_id, -tokens)
        self.parked.add(model_id)
        return True

    def _may_run(self, model_id: str, passed: set[str]) -> bool:
        if model_id in passed:
            return False
        return model_id in self.under_way or not (self.parked.blocks(model_id) or self._is_put_off(model_id))

    def _is_put_off(self, model_id: str) -> bool:
        entry = self._line.head(model_id)
        return entry is not None and entry.unread is not None

    def _may_look(self, turn: Turn, model_id: str) -> bool:
        """Whether to read the model's next operation: a full turn takes only the step behind a batch that ends in it,
        and what is read must have room in memory."""
        entry = self._line.head(model_id)
        if entry is None or (turn.full and not (entry.ticket.is_step and turn.ended(model_id))):
            return False
        return turn.empty or entry.loading or entry.ticket.is_step or self._heads.has_room()

    async def _load_head(self, model_id: str) -> tuple[Entry, Operation] | None:
        """The next operation of a model; None if that is not it any more: it is gone, was refused here, or is put off
        because it cannot be read now."""
        entry = self._line.head(model_id)
        assert entry is not None
        problem = self._banned(entry)
        try:
            if problem is None:
                operation = await self._heads.load(entry)
                problem = self._check(model_id, operation)
        except NotNow as error:
            if self._line.head(model_id) is entry and not entry.over:
                self.put_off(model_id, entry, error)
            return None
        except TinsmithError as error:
            problem = error
        if self._line.head(model_id) is not entry:
            return None
        if problem is not None:
            self._line.pop(model_id)
            self.parked.passed(model_id)
            self._refuse(entry, problem)
            return None
        return entry, operation

    def _begin(self, turn: Turn, model_id: str, entry: Entry, operation: TrainBatch) -> bool:
        """Begin a batch in this turn, if its first datum has room."""
        lengths = tuple(max(1, len(datum.tokens)) for datum in operation.datums)
        if lengths and not turn.fits(lengths[0]):
            return False
        if entry.again is not None:
            operation = replace(operation, again=True)
        batch = OpenBatch(entry, model_id, lengths, operation)
        self.under_way[model_id] = batch
        self._line.hold(model_id)
        self._start(model_id, entry, 0)
        self._heads.take(entry)
        return self._deal(turn, batch)

    def _deal(self, turn: Turn, batch: OpenBatch) -> bool:
        """Put in the next few datums; False if not even one has room."""
        start, tokens = batch.planned, 0
        while batch.left and tokens <= turn.budget // _CHUNKS and turn.fits(batch.lengths[batch.planned]):
            tokens += turn.add_datum(batch)
        if batch.planned == start and batch.left:
            return False
        turn.batches.setdefault(batch, start)
        self._line.charge(batch.model_id, tokens)
        if not batch.left:
            self.forget(batch)
        return True

    def _start(self, model_id: str, entry: Entry, tokens: int) -> None:
        entry.start()
        self._line.charge(model_id, tokens)
        self._line.pop(model_id)
