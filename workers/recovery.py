"""Bringing models back after a worker has died: a snapshot of their state, then the operations after it again.

Responsible for which snapshot a model goes back to, for what of its log is executed again, and for how far that has
come. The operations themselves then run in turns like all others. Not responsible for when snapshots are taken
(`workers/snapshots.py`), nor for what is in the log (the caller's `History`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from schemas.errors import ModelLost, NotNow, OutOfMemory, TinsmithError, Unavailable, WorkerDied
from schemas.fail_points import fail_point
from schemas.operations import CreateModel, LoadWeights, Operation, OperationResult, SavedSnapshot
from workers.adapters import WorkerCall, create_adapter
from workers.tickets import Entry, Ticket

_log = logging.getLogger("tinsmith.runtime")

RECOVERING = "recovering"
"""How the reason begins that the operations of a model wait for while it is brought back."""
MAX_DEATHS = 5
"""How often an operation of a live model may be under way when the worker dies; from the first time on it runs alone,
so that the next one blames nobody else."""
MAX_SERVER_DEATHS = 3
"""How often an operation may be under way when the server dies, all its processes at once; after that it fails."""
CREATION = 0
"""The seq_id of what makes a model."""
_RETRY_SECONDS = 1.0
"""Pause before the first new try after something that passes; it doubles with each, up to `_LONGEST_RETRY`."""
_LONGEST_RETRY = 30.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A file with the state of a model after all its operations up to `applied_seq`; its SHA-256 in hex."""

    applied_seq: int
    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class PastOperation:
    """A settled operation that changed its model. `failed`: it ended with an error that is expected again.

    `deaths`: how often a server was killed while it executed this again.
    """

    seq_id: int
    request_id: str
    is_step: bool
    size: int
    failed: bool
    load: Callable[[], Awaitable[Operation]]
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of a model. Operations up to `collected_seq` cannot be read back any more (-1: all can).

    `snapshots` newest first; `operations` in order of `seq_id`, all that were not collected; `creation` reads what
    made the model (a `CreateModel`, or a `LoadWeights` with `create`).
    """

    project_id: str
    snapshots: tuple[Snapshot, ...]
    operations: tuple[PastOperation, ...]
    collected_seq: int
    creation: Callable[[], Awaitable[Operation]]


class History(Protocol):
    """The log and the snapshots, as the owner of both shows them."""

    async def recall(self, model_id: str) -> Past:
        """Everything needed to bring a model back. Raises `ModelLost`, or `Unavailable` (ask again later)."""
        ...

    async def new_snapshot_path(self) -> str:
        """Where the next snapshot goes; nothing is there. Raises `Unavailable` (ask again later)."""
        ...

    async def keep_snapshot(self, model_id: str, applied_seq: int, path: str, saved: SavedSnapshot) -> bool:
        """Record a written snapshot. False if it cannot be used: an operation that it contains is not settled, or the
        model is over."""
        ...

    async def drop_snapshot(self, path: str) -> None:
        """Forget a snapshot that is damaged or was not recorded."""
        ...


@dataclass(frozen=True, slots=True)
class Restored:
    """A model that may go on: what runs next, in order, whether its adapter is on the worker, and the last seq_id that
    is in its state."""

    project_id: str
    entries: list[Entry]
    created: bool
    applied_seq: int


@dataclass(slots=True)
class _Recovering:
    """A model on its way back. `cut_off`: operations that wait for it and go before all that is in its queue."""

    cut_off: list[Entry] = field(default_factory=list)
    restored: bool = False
    total: int = 0
    done: int = 0
    deaths: int = 0
    """How often this was broken off."""
    not_before: float = 0.0
    pause: float = field(default_factory=lambda: _RETRY_SECONDS)
    """Seconds until the next try, should this one come to nothing."""
    passed_over: bool = False
    """Whether a snapshot could not be read at the last try, and may be later."""
    obstacle: str | None = None
    """What keeps it from being read back now, for people."""


class Recovery:
    """The models that are on their way back. Each comes when there is work for it: one that is idle costs nobody time.

    Args:
        wanted: whether anything waits in a model's queue.
        failed: told at once when an operation that had succeeded fails when it is executed again.
        death_limit: how often a server may be killed while it executes one operation again.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        history: History,
        call: WorkerCall,
        *,
        wanted: Callable[[str], bool],
        failed: Callable[[str, TinsmithError], None],
        clock: Callable[[], float],
        death_limit: int = MAX_SERVER_DEATHS,
    ) -> None:
        self._history = history
        self._death_limit = death_limit
        self._call = call
        self._wanted = wanted
        self._failed = failed
        self._clock = clock
        self._models: dict[str, _Recovering] = {}
        self._due: deque[str] = deque()

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._models

    def begin(self, model_id: str, cut_off: list[Entry], *, died: bool = False) -> bool:
        """A model has to be brought back (again); `died`: bringing it back was broken off.

        Returns False if that has happened too often: the model is lost. The entries in `cut_off` are still kept.
        """
        record = self._models.setdefault(model_id, _Recovering())
        record.deaths += died
        record.cut_off += [entry for entry in cut_off if entry.again is None and not entry.over]
        record.restored = False
        if model_id not in self._due:
            self._due.append(model_id)
        return record.deaths <= MAX_DEATHS

    def restoring(self, model_id: str) -> bool:
        """Whether the state of a model is still to be read back."""
        record = self._models.get(model_id)
        return record is not None and not record.restored

    def wait(self, model_id: str, entry: Entry) -> None:
        """An operation that comes before what is in the model's queue."""
        if entry.again is None:
            self._models[model_id].cut_off.append(entry)

    def forget(self, model_id: str) -> list[Entry]:
        """The model is over; returns what waited for it."""
        record = self._models.pop(model_id, None)
        if model_id in self._due:
            self._due.remove(model_id)
        return [] if record is None else [entry for entry in record.cut_off if not entry.over]

    def next_due(self) -> str | None:
        """A model whose state is wanted and can be read back now."""
        now = self._clock()
        return next((model_id for model_id, not_before in self._waited_for() if not_before <= now), None)

    def next_deadline(self) -> float | None:
        """When `next_due` will have something, if nothing else happens."""
        return min((not_before for _, not_before in self._waited_for()), default=None)

    def _waited_for(self) -> Iterator[tuple[str, float]]:
        for model_id in self._due:
            record = self._models[model_id]
            if record.cut_off or self._wanted(model_id):
                yield model_id, record.not_before

    @property
    def waiting(self) -> int:
        """How many models are not on the worker yet."""
        return len(self._due)

    def reason(self, model_id: str) -> str | None:
        """What is being done for a model, for people; None if it is not on its way back."""
        record = self._models.get(model_id)
        if record is None:
            return None
        if not record.restored:
            if record.obstacle is not None:
                seconds = max(0.0, record.not_before - self._clock())
                return f"{RECOVERING}: not possible now, tried again in {seconds:.0f} s: {record.obstacle}"
            return f"{RECOVERING}: the state of this model is about to be read back"
        operations = "operation" if record.total == 1 else "operations"
        verb = "is" if record.total == 1 else "are"
        return f"{RECOVERING}: {record.done} of {record.total} {operations} of this model {verb} being executed again"

    async def restore(self, model_id: str) -> Restored | None:
        """Put a model back on the worker, which has nothing of it. A creation that was cut off itself is not done here
        but is what runs first.

        None if that is not possible now; it is tried again later. Raises `ModelLost`, `WorkerDied`.
        """
        record = self._models[model_id]
        fail_point("recover.before_restore")
        try:
            past = await self._history.recall(model_id)
        except ModelLost:
            raise
        except TinsmithError as error:
            self.put_off(model_id, error)
            return None
        created = not any(entry.seq_id == CREATION and not entry.over for entry in record.cut_off)
        try:
            applied_seq = await self._restore_state(record, model_id, past) if created else CREATION
        except (WorkerDied, ModelLost):
            raise
        except TinsmithError as error:
            record.deaths += not passes(error)
            if error.category == "user" or record.deaths > MAX_DEATHS:
                raise lost(model_id, error.message) from error
            self.put_off(model_id, error)
            return None
        after = [old for old in past.operations if old.seq_id > applied_seq]
        if any(old.deaths >= self._death_limit for old in after):
            raise lost(model_id, "the server died each time that it executed one of its operations again")
        replays = [self._replay(model_id, past, old) for old in after]
        cut_off = [entry for entry in record.cut_off if not entry.over]
        record.cut_off, record.restored, record.obstacle = [], True, None
        record.total, record.done = len(replays), 0
        if model_id in self._due:
            self._due.remove(model_id)
        _log.info("model %s: back at operation %d, %d are executed again", model_id, applied_seq, len(replays))
        if not replays:
            self._models.pop(model_id, None)
        entries = sorted([*replays, *cut_off], key=lambda entry: entry.seq_id)
        return Restored(past.project_id, entries, created, applied_seq)

    def put_off(self, model_id: str, error: TinsmithError) -> None:
        """Bringing a model back is not possible now: it is tried again after a pause that grows."""
        record = self._models.get(model_id)
        if record is None:  # its session has ended meanwhile
            return
        _log.warning("model %s cannot be brought back now: %s", model_id, error.message)
        record.obstacle, record.not_before = error.message, self._clock() + record.pause
        record.pause = min(2 * record.pause, _LONGEST_RETRY)

    def waits_for_a_snapshot(self, model_id: str) -> bool:
        """Whether a snapshot of a model was passed over that may be readable later: what fails on another way back says
        nothing of the model."""
        record = self._models.get(model_id)
        return record is not None and record.passed_over

    async def _restore_state(self, record: _Recovering, model_id: str, past: Past) -> int:
        """Restore the newest snapshot that can be used, or create the model anew; returns the last seq_id in it.

        One that is damaged is forgotten. One that cannot be read now may be whole: it stays, and if nothing else leads
        back, it is waited for (`NotNow`).
        """
        unread: NotNow | None = None
        record.passed_over = False
        for snapshot in past.snapshots:
            if snapshot.applied_seq < past.collected_seq:
                break
            try:
                await self._call("restore_snapshot", model_id, snapshot.path, snapshot.sha256)
            except NotNow as error:
                _log.warning("a snapshot of model %s is passed over: %s", model_id, error.message)
                unread, record.passed_over = unread or error, True
            except ModelLost:
                _log.error("a snapshot of model %s is damaged; the one before is used", model_id)
                await self._history.drop_snapshot(snapshot.path)
            else:
                fail_point("restore.done")
                return snapshot.applied_seq
            await self._call("remove_adapter", model_id)  # of several ranks, some may have read it
        try:
            return await self._create_anew(model_id, past)
        except WorkerDied:
            raise
        except TinsmithError as error:
            if unread is None:
                raise
            raise unread from error

    async def _create_anew(self, model_id: str, past: Past) -> int:
        if past.collected_seq >= 0:
            raise lost(model_id, "no snapshot of it is intact")
        creation = await past.creation()
        if not isinstance(creation, CreateModel | LoadWeights):
            raise lost(model_id, "the log does not say how it was created")
        await create_adapter(self._call, model_id, creation)
        return CREATION

    def _replay(self, model_id: str, past: Past, old: PastOperation) -> Entry:
        """A settled operation as one that nobody is answered for."""

        async def done(_: OperationResult | TinsmithError) -> None:
            """Its outcome is in the log already."""

        def again(outcome: OperationResult | TinsmithError) -> None:
            self._note(model_id, old, outcome)

        ticket = Ticket(
            old.request_id,
            past.project_id,
            model_id,
            old.seq_id,
            old.load,
            done,
            is_step=old.is_step,
            size=old.size,
            deaths=old.deaths,
        )
        return Entry(ticket, seq_id=old.seq_id, again=again)

    def _note(self, model_id: str, old: PastOperation, outcome: OperationResult | TinsmithError) -> None:
        record = self._models.get(model_id)
        if record is None or not record.restored:
            return
        record.done += 1
        fail_point("recover.replayed")
        if isinstance(outcome, TinsmithError) and not old.failed:
            self._failed(model_id, outcome)
        elif record.done >= record.total:
            del self._models[model_id]
            _log.info("model %s is back: %d operations were executed again", model_id, record.total)


def passes(error: TinsmithError) -> bool:
    """Whether an error says nothing of the model: memory, disk or database are short or away, and not for ever."""
    return isinstance(error, OutOfMemory | Unavailable)


def lost(model_id: str, reason: str) -> ModelLost:
    """The error of a model that cannot be brought back, and why."""
    return ModelLost(
        f"the live state of model {model_id!r} was lost when its worker process ended: {reason}",
        field="model_id",
        hint="resume from its last checkpoint with create_training_client_from_state_with_optimizer",
    )
