"""Whose turn it is on one base model: fair between projects, then between their models; in order within a model.

Pure: no tasks, times are passed in. Two lines, one for training operations and one for samples; the runtime takes
from them alternately.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from schemas.errors import InvalidRequest
from workers.queues import ModelQueue
from workers.tickets import Entry


class TrainingLine:
    """The queues of all open models. Round robin over projects, then over the models of the project."""

    def __init__(self, gap_timeout: float) -> None:
        self._gap_timeout = gap_timeout
        self._queues: dict[str, ModelQueue[Entry]] = {}
        self._turns: dict[str, dict[str, None]] = {}
        """Project -> its models with waiting entries; the first of each is next. Dicts are used as ordered sets."""

    def open_model(self, model_id: str) -> None:
        """Begin a queue whose first seq_id is 0."""
        self._queues[model_id] = ModelQueue(self._gap_timeout)

    def close_model(self, model_id: str) -> list[Entry]:
        """Drop a queue; returns what waited in it, in order."""
        queue = self._queues.pop(model_id, None)
        for models in self._turns.values():
            models.pop(model_id, None)
        self._forget_idle_projects()
        return queue.drain() if queue is not None else []

    def add(self, model_id: str, entry: Entry, now: float) -> None:
        """Enqueue under the ticket's seq_id; raises `InvalidRequest` as `ModelQueue.add` does."""
        entry.seq_id = self._queues[model_id].add(entry.ticket.seq_id, entry, now)
        self._turns.setdefault(entry.ticket.project_id, {}).setdefault(model_id)

    def note_refused(self, model_id: str, seq_id: int) -> None:
        """A refused request consumed this seq_id."""
        if model_id in self._queues:
            self._queues[model_id].note_refused(seq_id)

    def peek(self) -> Entry | None:
        """The entry whose turn it is."""
        return next(self._ready(), None)

    def pop(self) -> Entry | None:
        """Take the entry whose turn it is; its model and its project go to the end of their rounds."""
        entry = self.peek()
        if entry is None:
            return None
        model_id, project_id = entry.ticket.model_id, entry.ticket.project_id
        assert model_id is not None
        queue = self._queues[model_id]
        queue.pop()
        models = self._turns.pop(project_id)
        del models[model_id]
        if len(queue) > 0:
            models[model_id] = None
        if models:
            self._turns[project_id] = models
        return entry

    def expire(self, now: float) -> list[tuple[Entry, InvalidRequest]]:
        """Everything that waited too long behind a missing seq_id."""
        failed = [pair for queue in self._queues.values() for pair in queue.expire(now)]
        for entry, _ in failed:
            models = self._turns.get(entry.ticket.project_id, {})
            models.pop(entry.ticket.model_id or "", None)
        self._forget_idle_projects()
        return failed

    def next_deadline(self) -> float | None:
        """When `expire` will have something to do."""
        deadlines = (queue.gap_deadline() for queue in self._queues.values() if len(queue) > 0)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def reason(self, entry: Entry) -> str:
        """Why a waiting entry does not run, for people."""
        queue = self._queues.get(entry.ticket.model_id or "")
        if queue is None:
            return "about to be answered"
        missing = queue.missing()
        if missing is not None:
            return f"waiting for seq_id {missing} of this model"
        ahead = queue.ahead(entry.seq_id)
        return f"{_count(ahead, 'operation')} of this model ahead" if ahead else "next, after the turns of other models"

    def _ready(self) -> Iterator[Entry]:
        for models in self._turns.values():
            for model_id in models:
                entry = self._queues[model_id].peek()
                if entry is not None:
                    yield entry

    def _forget_idle_projects(self) -> None:
        self._turns = {project_id: models for project_id, models in self._turns.items() if models}


class SampleLine:
    """Waiting samples, first come first served within a project, round robin between projects."""

    def __init__(self) -> None:
        self._turns: dict[str, deque[Entry]] = {}

    def add(self, entry: Entry) -> None:
        """Enqueue a new sample."""
        self._turns.setdefault(entry.ticket.project_id, deque()).append(entry)

    def add_first(self, entry: Entry) -> None:
        """Put a sample that has to run again before the new ones of its project."""
        self._turns.setdefault(entry.ticket.project_id, deque()).appendleft(entry)

    def peek(self) -> Entry | None:
        """The sample whose turn it is. Samples that were answered meanwhile (cancelled) are dropped here."""
        for project_id in list(self._turns):
            waiting = self._turns[project_id]
            while waiting and waiting[0].over:
                waiting.popleft()
            if waiting:
                return waiting[0]
            del self._turns[project_id]
        return None

    def take(self, entry: Entry) -> None:
        """Remove the entry that `peek` showed; its project goes to the end of the round."""
        waiting = self._turns.pop(entry.ticket.project_id)
        waiting.remove(entry)
        if waiting:
            self._turns[entry.ticket.project_id] = waiting

    def reason(self, entry: Entry) -> str:
        """Why a waiting entry does not run, for people."""
        waiting = self._turns.get(entry.ticket.project_id, deque())
        if entry not in waiting:
            return "about to start"
        ahead = waiting.index(entry)
        return f"{_count(ahead, 'sample')} of this project ahead" if ahead else "next, when a running batch has ended"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
