"""The order of one model's operations: strictly by seq_id, whatever order they arrive in.

Pure: no clock, no tasks. Times are passed in as seconds of any monotonic clock. Not responsible for fairness between
models (`workers/scheduler.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from schemas.errors import InvalidRequest, SeqIdConflict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[T]):
    item: T
    arrived: float


class ModelQueue(Generic[T]):
    """Items by seq_id. An item may start when every smaller seq_id has started, was refused, or was given up.

    A client posts seq_id n+1 before n has run, and posts the chunks of one call in any order, so a later one often
    arrives first and waits. A refused request consumes its seq_id. A seq_id that never arrives is given up after
    `gap_timeout` seconds: what waits behind it fails, since running it would silently leave out a part.
    """

    def __init__(self, gap_timeout: float, first_seq: int = 0) -> None:
        self._gap_timeout = gap_timeout
        self._last_started = first_seq - 1
        """The largest seq_id that has started or was given up."""
        self._waiting: dict[int, _Waiting[T]] = {}
        self._first: deque[tuple[int, T]] = deque()
        """Goes before everything that waits under its seq_id."""
        self.paused = False
        """Nothing may start, and no time runs."""
        self._refused: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._first)

    def put_first(self, items: Iterable[tuple[int, T]]) -> None:
        """Items with their seq_ids that had started before, or whose turn is over: they start before all others."""
        self._first.extend(items)

    def take_first(self) -> list[T]:
        """Take out what `put_first` has put in and that has not started."""
        taken = [item for _, item in self._first]
        self._first.clear()
        return taken

    def add(self, seq_id: int | None, item: T, now: float) -> int:
        """Enqueue; returns the seq_id, which for None is the one after everything known so far.

        Raises `SeqIdConflict` if an item of this seq_id waits already, `InvalidRequest` if its turn is over.
        """
        if seq_id is None:
            seq_id = max([self._last_started, *self._waiting, *self._refused]) + 1
        if seq_id in self._waiting:
            raise SeqIdConflict(f"seq_id {seq_id} of this model was used before", field="seq_id")
        if seq_id <= self._last_started:
            raise InvalidRequest(
                f"seq_id {seq_id} comes too late: seq_id {self._last_started} of this model has already been reached",
                field="seq_id",
                hint=f"send it again with a seq_id above {self._last_started}",
                code="seq_id_passed",
            )
        self._refused.discard(seq_id)
        self._waiting[seq_id] = _Waiting(item, now)
        return seq_id

    def note_refused(self, seq_id: int) -> None:
        """The request with this seq_id was refused: nothing waits for it. A corrected one may still be added."""
        if seq_id > self._last_started and seq_id not in self._waiting:
            self._refused.add(seq_id)

    def missing(self) -> int | None:
        """The seq_id that everything waits for; None if nothing waits or the next item can start."""
        expected = self._expected()
        if self.paused or self._first:
            return None
        return None if not self._waiting or expected in self._waiting else expected

    def peek(self) -> T | None:
        """The item that may start now, if there is one."""
        if self.paused:
            return None
        if self._first:
            return self._first[0][1]
        waiting = self._waiting.get(self._expected())
        return None if waiting is None else waiting.item

    def pop(self) -> T:
        """Start the item that `peek` shows; raises `LookupError` if there is none."""
        if self._first:
            return self._first.popleft()[1]
        seq_id = self._expected()
        item = self._waiting.pop(seq_id).item
        self._pass(seq_id)
        return item

    def put_back(self, items: Sequence[tuple[int, T]]) -> None:
        """Items with their seq_ids, in order, that have started but have to start again, before all others."""
        self._first.extendleft(reversed(items))

    def gap_deadline(self) -> float | None:
        """When the missing seq_id will be given up; None if none is missing."""
        if self.missing() is None:
            return None
        return min(waiting.arrived for waiting in self._waiting.values()) + self._gap_timeout

    def expire(self, now: float) -> list[tuple[T, InvalidRequest]]:
        """Give up an overdue gap: all that waits behind it, in order, with the error of each. Later items go on."""
        deadline, missing = self.gap_deadline(), self.missing()
        if deadline is None or now < deadline:
            return []
        failed = sorted(self._waiting)
        items = [(self._waiting.pop(seq_id).item, self._gap_error(seq_id, missing)) for seq_id in failed]
        self._pass(failed[-1])
        return items

    def drain(self) -> list[T]:
        """Take everything out, in order; the seq_ids count as passed."""
        seq_ids = sorted(self._waiting)
        items = [*self.take_first(), *(self._waiting.pop(seq_id).item for seq_id in seq_ids)]
        if seq_ids:
            self._pass(seq_ids[-1])
        return items

    def ahead(self, seq_id: int) -> int:
        """How many waiting items have a smaller seq_id."""
        return sum(1 for waiting in [*self._waiting, *(first for first, _ in self._first)] if waiting < seq_id)

    def _expected(self) -> int:
        """The smallest seq_id that has neither started nor been refused or given up."""
        expected = self._last_started + 1
        while expected in self._refused:
            expected += 1
        return expected

    def _pass(self, seq_id: int) -> None:
        self._last_started = seq_id
        self._refused = {refused for refused in self._refused if refused > seq_id}

    def _gap_error(self, seq_id: int, missing: int | None) -> InvalidRequest:
        return InvalidRequest(
            f"seq_id {seq_id} was not executed: seq_id {missing} of this model did not arrive "
            f"within {self._gap_timeout:g} s after a later one",
            field="seq_id",
            hint="a call of the SDK that fails before it is sent leaves such a gap, too; number requests without gaps, "
            "and go on with the next seq_id after the failed ones",
            code="seq_id_gap",
        )
