"""When a snapshot of which model is taken, and the way of each from the worker's memory into the record.

One at a time: copied in the worker between two turns, written by a thread there, then recorded. Not responsible for
what is in a snapshot (engines), nor for which one a model goes back to (`workers/recovery.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from schemas.errors import TinsmithError, WorkerDied
from schemas.operations import SavedSnapshot
from workers.adapters import WorkerCall
from workers.recovery import History

_log = logging.getLogger("tinsmith.runtime")

_POLL_SECONDS = 0.05
_RECORD_ATTEMPTS = 20
_RECORD_PAUSE = 0.1
"""Results are on their way to the disk when a snapshot is written: it is recorded when they are there."""
_AFTER_FAILURE = 30.0


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """When a model is due: this many operations that changed it, bytes of them, or seconds since the first of them.

    `share` is the part of the time that taking and writing snapshots may fill.
    """

    operations: int = 64
    seconds: float = 300.0
    size_bytes: int = 256 << 20
    share: float = 0.05


@dataclass(slots=True)
class _Model:
    """What has happened to a model since its last snapshot."""

    applied_seq: int = 0
    operations: int = 0
    size: int = 0
    since: float = 0.0

    def due(self, policy: SnapshotPolicy, now: float) -> bool:
        """Whether it is time."""
        if not self.operations:
            return False
        enough = self.operations >= policy.operations or self.size >= policy.size_bytes
        return enough or now - self.since >= policy.seconds


@dataclass(slots=True)
class _Writing:
    """The snapshot that is under way. `before` is what it covers, put back if it comes to nothing."""

    model_id: str
    path: str
    before: _Model
    began: float
    record: asyncio.Task[bool] | None = None


class Snapshots:
    """The snapshots of all models of one base model. `clock` is monotonic seconds."""

    def __init__(
        self,
        history: History,
        call: WorkerCall,
        policy: SnapshotPolicy,
        clock: Callable[[], float],
    ) -> None:
        self._history = history
        self._call = call
        self._policy = policy
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._writing: _Writing | None = None
        self._not_before = 0.0

    def note(self, model_id: str, seq_id: int, size: int, changed: bool) -> None:
        """An operation of a model has ended; all before it had."""
        model = self._models.setdefault(model_id, _Model())
        model.applied_seq = seq_id
        if changed:
            if not model.operations:
                model.since = self._clock()
            model.operations += 1
            model.size += size

    def hurry(self, model_id: str) -> None:
        """Take the next one as soon as possible: what was done last should not have to be done again."""
        self._models.setdefault(model_id, _Model()).operations += self._policy.operations

    def forget(self, model_id: str) -> None:
        """The model is over, or its state on the worker is not to be used."""
        self._models.pop(model_id, None)

    def lose(self) -> None:
        """The worker died, and whatever it was writing with it; what is being recorded is recorded."""
        self._models.clear()
        if self._writing is not None and self._writing.record is None:
            self._writing = None

    def next_deadline(self) -> float | None:
        """When `advance` wants to be called without news from outside."""
        now = self._clock()
        if self._writing is not None:
            return now + _POLL_SECONDS
        since = [model.since for model in self._models.values() if model.operations]
        if not since:
            return None
        if any(model.due(self._policy, now) for model in self._models.values()):
            return max(self._not_before, now + _POLL_SECONDS)
        return max(self._not_before, min(since) + self._policy.seconds)

    async def advance(self, free: Callable[[str], bool]) -> None:
        """Go on with the snapshot that is under way, or begin the next one; `free`: no operation of a model is open.

        Raises `WorkerDied`.
        """
        if self._writing is not None:
            await self._follow(self._writing)
        elif self._clock() >= self._not_before:
            now = self._clock()
            due = [name for name, model in self._models.items() if model.due(self._policy, now) and free(name)]
            if due:
                await self._begin(min(due, key=lambda name: self._models[name].since))

    async def close(self) -> None:
        """Wait until what is being recorded is recorded."""
        if self._writing is not None and self._writing.record is not None:
            await asyncio.gather(self._writing.record, return_exceptions=True)

    async def _begin(self, model_id: str) -> None:
        try:
            path = await self._history.new_snapshot_path()
        except TinsmithError as error:
            _log.warning("no snapshot of model %s: %s", model_id, error.message)
            self._not_before = self._clock() + _AFTER_FAILURE
            return
        before = self._models.get(model_id)
        if before is None:  # it was closed meanwhile
            return
        self._models[model_id] = _Model(before.applied_seq)
        self._writing = _Writing(model_id, path, before, self._clock())
        try:
            await self._call("begin_snapshot", model_id, path)
        except WorkerDied:
            raise
        except TinsmithError as error:
            self._fail(self._writing, error.message)

    async def _follow(self, writing: _Writing) -> None:
        if writing.record is None:
            finished = await self._call("finished_snapshots")
            outcome = finished.get(writing.path)
            if isinstance(outcome, SavedSnapshot):
                writing.record = asyncio.ensure_future(self._keep(writing, outcome))
            elif outcome is not None:
                self._fail(writing, outcome.message)
        elif writing.record.done():
            if writing.record.result():
                self._end(0.0)
            else:
                self._fail(writing, "it could not be recorded")

    async def _keep(self, writing: _Writing, saved: SavedSnapshot) -> bool:
        """Record a written snapshot, once the results of all that it contains are durable."""
        try:
            for _ in range(_RECORD_ATTEMPTS):
                if await self._history.keep_snapshot(writing.model_id, writing.before.applied_seq, writing.path, saved):
                    return True
                if writing.model_id not in self._models:
                    break
                await asyncio.sleep(_RECORD_PAUSE)
            await self._history.drop_snapshot(writing.path)
        except Exception:
            _log.exception("a snapshot of model %s cannot be recorded", writing.model_id)
        return False

    def _fail(self, writing: _Writing, reason: str) -> None:
        """It came to nothing; training goes on, and it is tried again later."""
        model = self._models.get(writing.model_id)
        if model is not None:
            _log.warning("no snapshot of model %s: %s", writing.model_id, reason)
            model.operations += writing.before.operations
            model.size += writing.before.size
            model.since = writing.before.since
        self._end(_AFTER_FAILURE)

    def _end(self, pause: float) -> None:
        assert self._writing is not None
        now = self._clock()
        took, self._writing = now - self._writing.began, None
        self._not_before = now + max(pause, took * (1 / self._policy.share - 1))
