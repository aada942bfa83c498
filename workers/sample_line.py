"""Samples that wait for the worker: first come first served within a project, equal shares of tokens between projects.

No clock, and no tasks but those in which what cannot be read back now is tried again. Not responsible for how many
samples the worker takes (`workers/sampling_lane.py`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

from schemas.errors import NotNow
from workers.fairness import FairShare
from workers.tickets import Entry

_FIRST_GUESS = 256.0
"""Tokens that a sequence of a project is thought to draw before any of them has ended."""
_NEWEST = 1 / 16
"""Weight of the newest sample in what the sequences of a project are thought to draw."""


class SampleLine:
    """The waiting samples of all projects, and the shares that the projects have had.

    A sample costs its prompt and what it draws. What it draws is known only at its end, so at its start it is charged
    what samples of its project drew lately, and the rest at its end: a project with long answers must not fill the
    worker before it has paid for any.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, OrderedDict[Entry, None]] = {}
        """By project; never empty."""
        self._put_off: dict[Entry, None] = {}
        """Samples that cannot be read back now: they wait beside the line and hold up no other."""
        self._inside: Counter[str] = Counter()
        """Samples of a project that were taken and have not ended."""
        self._shares: FairShare[str] = FairShare()
        self._drawn: dict[str, float] = {}
        """Tokens per sequence, by project: a mean that forgets."""
        self._paid: dict[Entry, float] = {}
        """What a taken sample was charged for what it draws."""

    def add(self, entry: Entry) -> None:
        """Enqueue a new sample."""
        project_id = entry.ticket.project_id
        self._waiting.setdefault(project_id, OrderedDict())[entry] = None
        self._shares.enter(project_id)

    def add_first(self, entry: Entry) -> None:
        """Put a sample that has to run again before the new ones of its project."""
        self.add(entry)
        self._waiting[entry.ticket.project_id].move_to_end(entry, last=False)

    def discard(self, entry: Entry) -> bool:
        """Drop a sample that nobody wants any more; False if it does not wait here."""
        project_id = entry.ticket.project_id
        if entry in self._put_off:
            del self._put_off[entry]
            return True
        if entry not in self._waiting.get(project_id, ()):
            return False
        self._remove(entry)
        self._leave(project_id)
        return True

    def waiting(self, project_id: str) -> int:
        """How many samples of a project wait."""
        put_off = sum(entry.ticket.project_id == project_id for entry in self._put_off)
        return len(self._waiting.get(project_id, ())) + put_off

    def put_off(self, entry: Entry, error: NotNow, wake: Callable[[], None]) -> None:
        """A sample that waits here cannot be read back now; it is back in line, and `wake` is told, when it can."""
        self.discard(entry)
        self._put_off[entry] = None
        entry.put_off(error, partial(self._take_up, entry, wake))

    def take_put_off(self) -> list[Entry]:
        """Forget the samples that cannot be read back now; returns them."""
        taken, self._put_off = list(self._put_off), {}
        return taken

    def _take_up(self, entry: Entry, wake: Callable[[], None]) -> None:
        del self._put_off[entry]
        self.add_first(entry)
        wake()

    def peek(self) -> Entry | None:
        """The sample whose turn it is."""
        return next(iter(self.upcoming(1)), None)

    def upcoming(self, most: int) -> Iterator[Entry]:
        """The next samples of the project whose turn it is, at most `most` of them."""
        for project_id in self._shares.order():
            if project_id in self._waiting:
                return islice(self._waiting[project_id], most)
        return iter(())

    def take(self, entry: Entry, *, prompt: int, sequences: int, most: int) -> None:
        """Start a sample that waits here, and charge its project.

        Args:
            prompt: tokens of the prompt.
            sequences: continuations asked for.
            most: tokens that each of them may draw.
        """
        project_id = entry.ticket.project_id
        self._remove(entry)
        self._inside[project_id] += 1
        self._paid[entry] = sequences * min(self._drawn.get(project_id, _FIRST_GUESS), float(most))
        self._shares.charge(project_id, prompt + self._paid[entry])

    def end(self, entry: Entry, *, sequences: int = 1, drawn: int | None = None, whole: bool = True) -> None:
        """A taken sample has ended.

        Args:
            sequences: continuations asked for.
            drawn: tokens that they have together; None = it has failed.
            whole: False = it was stopped: it would have drawn at least as much.
        """
        project_id = entry.ticket.project_id
        paid = self._paid.pop(entry)
        if drawn is not None:
            mean = drawn / max(1, sequences)
            before = self._drawn.get(project_id, mean if whole else _FIRST_GUESS)
            if whole or mean > before:
                self._drawn[project_id] = before + _NEWEST * (mean - before)
            if drawn > paid:
                self._shares.charge(project_id, drawn - paid)
        self._inside[project_id] -= 1
        if not self._inside[project_id]:
            del self._inside[project_id]
        self._leave(project_id)

    def reason(self, entry: Entry) -> str:
        """Why a waiting entry does not run, for people."""
        project_id = entry.ticket.project_id
        waiting = self._waiting.get(project_id, OrderedDict())
        if entry not in waiting:
            return "about to start"
        ahead = next(place for place, other in enumerate(waiting) if other is entry)
        if ahead:
            return f"{count(ahead, 'sample')} of this project ahead"
        order = self._shares.order()
        others = sum(1 for other in order[: order.index(project_id)] if other in self._waiting)
        if others:
            return f"waiting for its turn: {count(others, 'other project')} first"
        return "next, when running samples leave room"

    def _remove(self, entry: Entry) -> None:
        project_id = entry.ticket.project_id
        del self._waiting[project_id][entry]
        if not self._waiting[project_id]:
            del self._waiting[project_id]

    def _leave(self, project_id: str) -> None:
        """Take a project out of the shares that has nothing here any more."""
        if project_id not in self._waiting and project_id not in self._inside:
            self._shares.leave(project_id)


def count(number: int, noun: str) -> str:
    """A number of things, in words."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
