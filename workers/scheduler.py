"""Who is next on one base model: fair between projects, then between their models; in order within a model.

Pure: no tasks, times are passed in. This line is for training operations; samples have their own
(`workers/sample_line.py`), and the runtime takes from both alternately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from schemas.errors import InvalidRequest
from workers.fairness import FairShare
from workers.queues import ModelQueue
from workers.sample_line import count
from workers.tickets import Entry


class TrainingLine:
    """The queues of all open models. Their projects, and within a project its models, get equal shares of tokens.

    A model is in line while its next operation can start, or while it is held because an operation is under way. One
    whose next operation cannot be read back now is not: what it could not do then gives it no claim later.
    """

    def __init__(self, gap_timeout: float) -> None:
        self._gap_timeout = gap_timeout
        self._queues: dict[str, ModelQueue[Entry]] = {}
        self._project_of: dict[str, str] = {}
        self._held: set[str] = set()
        self._projects: FairShare[str] = FairShare()
        self._models: dict[str, FairShare[str]] = {}
        """By project."""

    def open_model(self, model_id: str, first_seq: int = 0) -> None:
        """Begin a queue."""
        self._queues[model_id] = ModelQueue(self._gap_timeout, first_seq)

    def set_back(self, model_id: str) -> list[Entry]:
        """Nothing of a model may start until `put_first`; returns what that had put in and that has not started."""
        queue = self._queues[model_id]
        queue.paused = True
        first = queue.take_first()
        self._update(model_id)
        return first

    def waiting(self, model_id: str) -> bool:
        """Whether anything waits in the queue of a model."""
        return model_id in self._queues and len(self._queues[model_id]) > 0

    def put_first(self, model_id: str, project_id: str, entries: Sequence[Entry]) -> None:
        """Go on with a model that was set back: first these, then what is in its queue."""
        queue = self._queues[model_id]
        queue.put_first((entry.seq_id, entry) for entry in entries)
        queue.paused = False
        self._join(model_id, project_id)

    def close_model(self, model_id: str) -> list[Entry]:
        """Drop a queue; returns what waited in it, in order."""
        queue = self._queues.pop(model_id, None)
        waiting = queue.drain() if queue is not None else []
        self._held.discard(model_id)
        self._update(model_id)
        project_id = self._project_of.pop(model_id, None)
        if project_id is not None:
            self._models[project_id].forget(model_id)
            if project_id not in self._project_of.values():
                del self._models[project_id]
        return waiting

    def add(self, model_id: str, entry: Entry, now: float) -> None:
        """Enqueue under the ticket's seq_id; raises `InvalidRequest` as `ModelQueue.add` does."""
        entry.seq_id = self._queues[model_id].add(entry.ticket.seq_id, entry, now)
        self._join(model_id, entry.ticket.project_id)

    def _join(self, model_id: str, project_id: str) -> None:
        self._models.setdefault(self._project_of.setdefault(model_id, project_id), FairShare())
        self._update(model_id)

    def note_refused(self, model_id: str, seq_id: int) -> None:
        """A refused request consumed this seq_id."""
        if model_id in self._queues:
            self._queues[model_id].note_refused(seq_id)
            self._update(model_id)

    def order(self) -> Iterator[str]:
        """The models in line, the one whose turn it is first."""
        for project_id in self._projects.order():
            yield from self._models[project_id].order()

    def head(self, model_id: str) -> Entry | None:
        """The operation of a model that may start next."""
        queue = self._queues.get(model_id)
        return None if queue is None else queue.peek()

    def pop(self, model_id: str) -> Entry:
        """Start the operation that `head` shows."""
        entry = self._queues[model_id].pop()
        self._update(model_id)
        return entry

    def put_back(self, model_id: str, entries: Sequence[Entry]) -> bool:
        """Operations of a model that were popped, in order, are to start again; False if the model is closed."""
        queue = self._queues.get(model_id)
        if queue is None:
            return False
        queue.put_back([(entry.seq_id, entry) for entry in entries])
        self._update(model_id)
        return True

    def note_reading(self, model_id: str) -> None:
        """The next operation of the model cannot be read back any more, or can again."""
        self._update(model_id)

    def hold(self, model_id: str) -> None:
        """Keep the model in line: an operation of it is under way."""
        self._held.add(model_id)
        self._update(model_id)

    def release(self, model_id: str) -> None:
        """No operation of the model is under way any more."""
        self._held.discard(model_id)
        self._update(model_id)

    def charge(self, model_id: str, tokens: int) -> None:
        """A model that is in line is served: it and its project move back by as much."""
        project_id = self._project_of[model_id]
        self._projects.charge(project_id, tokens)
        self._models[project_id].charge(model_id, tokens)

    def expire(self, now: float) -> list[tuple[Entry, InvalidRequest]]:
        """Everything that waited too long behind a missing seq_id."""
        failed: list[tuple[Entry, InvalidRequest]] = []
        for model_id, queue in self._queues.items():
            overdue = queue.expire(now)
            if overdue:
                failed += overdue
                self._update(model_id)
        return failed

    def next_deadline(self) -> float | None:
        """When `expire` will have something to do."""
        deadlines = (queue.gap_deadline() for queue in self._queues.values() if len(queue) > 0)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def reason(self, entry: Entry, in_turn: int = 0) -> str:
        """Why a waiting entry does not run, for people; the turn that runs now has `in_turn` tokens."""
        model_id = entry.ticket.model_id or ""
        queue = self._queues.get(model_id)
        if queue is None:
            return "about to be answered"
        missing = queue.missing()
        if missing is not None:
            return f"waiting for seq_id {missing} of this model"
        ahead = queue.ahead(entry.seq_id)
        if ahead:
            return f"{count(ahead, 'operation')} of this model ahead"
        if model_id in self._held:
            return "waiting for the operation of this model that is under way"
        return self._turn_reason(model_id, in_turn)

    def _turn_reason(self, model_id: str, in_turn: int) -> str:
        project_id = self._project_of[model_id]
        models = self._models[project_id]
        projects, siblings = len(self._projects) - 1, len(models) - 1
        if projects:
            others = f"{count(projects, 'other project')} {'is' if projects == 1 else 'are'} training"
        elif siblings:
            others = f"{count(siblings, 'other model')} of this project {'is' if siblings == 1 else 'are'} training"
        else:
            return "waiting for its turn: next"
        tokens = in_turn + self._projects.ahead(project_id) + models.ahead(model_id)
        return f"waiting for its turn: {others}, about {tokens:,.0f} tokens ahead"

    def _update(self, model_id: str) -> None:
        """Put the model in line, or take it out."""
        project_id = self._project_of.get(model_id)
        if project_id is None:
            return
        models = self._models[project_id]
        head = self.head(model_id)
        if model_id in self._held or (head is not None and head.unread is None):
            models.enter(model_id)
            self._projects.enter(project_id)
        else:
            models.leave(model_id)
            if not len(models):
                self._projects.leave(project_id)
