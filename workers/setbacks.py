"""Models that were set back: their state left the worker, or is not to be trusted.

Responsible for which models are set back, in which order they come back, and for what becomes of those that cannot:
they are given up, and lost as soon as that is recorded. Not responsible for how a state is restored
(`workers/recovery.py`), nor for what a live model does (`workers/training_lane.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from schemas.errors import ModelLost, TinsmithError, WorkerDied
from workers.adapters import Adapters, WorkerCall
from workers.models import Models
from workers.recovery import MAX_DEATHS, History, Recovery, lost, passes
from workers.scheduler import TrainingLine
from workers.snapshots import Snapshots
from workers.tickets import Desk, Entry
from workers.turn_runner import TurnRunner

RESTORE_SECONDS = 0.25
"""How long models are brought back in front of one turn, the first one whatever it takes: those that are back share
their turns, so a hundred small ones take a few turns rather than one each, and nobody else waits for much longer."""

Failures = list[tuple[Entry, TinsmithError]]
"""Entries that are to be answered, and with what."""


class Setbacks:
    """The models of one training lane that are not on the worker.

    Args:
        history: the log and the snapshots from which models are brought back; None = none can be.
        snapshots: told of models whose state is not to be used.
        tell_lost: told which models cannot be brought back, before their operations fail.
        death_limit: how often a server may be killed while it executes one operation again.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        models: Models,
        line: TrainingLine,
        turns: TurnRunner,
        adapters: Adapters,
        desk: Desk,
        call: WorkerCall,
        *,
        history: History | None,
        snapshots: Snapshots | None,
        tell_lost: Callable[[Sequence[str]], Awaitable[None]],
        death_limit: int,
        clock: Callable[[], float],
    ) -> None:
        self._models = models
        self._line = line
        self._turns = turns
        self._adapters = adapters
        self._desk = desk
        self._call = call
        self._snapshots = snapshots
        self._tell_lost = tell_lost
        self._clock = clock
        self._recovery: Recovery | None = None
        if history is not None:
            self._recovery = Recovery(
                history, call, wanted=line.waiting, failed=self._try_again, clock=clock, death_limit=death_limit
            )
        self._coming_back: str | None = None
        """The model whose state is being restored."""
        self._given_up: dict[str, TinsmithError] = {}
        """Models that cannot be brought back, until that is recorded."""

    # -- what is set back ------------------------------------------------------------------------------------------
    def restoring(self, model_id: str) -> bool:
        """Whether a model is on its way back and its state still has to be restored."""
        return self._recovery is not None and self._recovery.restoring(model_id)

    def reason(self, model_id: str) -> str | None:
        """What is being done for a model, for people; None if it is not on its way back."""
        return None if self._recovery is None else self._recovery.reason(model_id)

    @property
    def waiting(self) -> int:
        """How many models will come to the worker."""
        return 0 if self._recovery is None else self._recovery.waiting

    def next_deadline(self) -> float | None:
        """When `bring_back_some` will have something to do, if nothing else happens."""
        return None if self._recovery is None else self._recovery.next_deadline()

    def set_back(self, model_id: str, cut_off: list[Entry], *, died: bool = False) -> bool:
        """Nothing of a model runs until it is brought back; False if that was tried too often.

        Args:
            cut_off: its operations that were under way, to run again in their places.
            died: the worker died, or the model's log failed, while it was being brought back.
        """
        assert self._recovery is not None
        self._models[model_id].live = False
        if self._snapshots is not None:
            self._snapshots.forget(model_id)
        cut_off = [*cut_off, *self._line.set_back(model_id)]
        for entry in cut_off:
            entry.unload()
        return self._recovery.begin(model_id, cut_off, died=died)

    def wait(self, model_id: str, entry: Entry) -> None:
        """An operation of a model that was set back, to run before what is in its queue."""
        assert self._recovery is not None
        self._recovery.wait(model_id, entry)

    def forget(self, model_id: str) -> list[Entry]:
        """The model is over; returns what waited for it to come back."""
        return [] if self._recovery is None else self._recovery.forget(model_id)

    def distrust(self, model_ids: set[str]) -> None:
        """Nobody knows how far a call came with these models: they go back to what the log says."""
        for model_id in model_ids:
            if self._recovery is not None and self._models.is_live(model_id):
                self.set_back(model_id, self._turns.close(model_id))

    def runs_again(self, entry: Entry) -> bool:
        """The worker has lost the state of one model (a damaged file, say): bring it back, and run this again."""
        entry.attempts += 1
        if self._recovery is None or entry.attempts > MAX_DEATHS:
            return False
        entry.running = False
        model_id = entry.ticket.model_id or ""
        self.set_back(model_id, [entry, *self._turns.close(model_id)])
        return True

    def worker_died(self, running: Sequence[Entry]) -> tuple[list[str], Failures]:
        """No adapter is left. Returns the models that are lost, and what waited for them, to be failed.

        Models that were not created yet are not lost either way.
        """
        failed: Failures = []
        gone_models: list[str] = []
        over_again = {self._coming_back} | {entry.ticket.model_id for entry in running if entry.again is not None}
        self._coming_back = None
        for model_id, model in self._models.items():
            if not model.live and not self.restoring(model_id):
                continue
            if self._recovery is not None and self.set_back(model_id, [], died=model_id in over_again):
                continue
            gone_models.append(model_id)
            failed += self._lose(model_id, lost(model_id, "it cannot be brought back"))
        return gone_models, failed

    # -- the way back ----------------------------------------------------------------------------------------------
    async def bring_back_some(self) -> bool:
        """Restore models that are wanted; False if there was none."""
        began, brought = self._clock(), False
        while await self._bring_back_next():
            brought = True
            if self._clock() - began >= RESTORE_SECONDS:
                break
        return brought

    async def _bring_back_next(self) -> bool:
        """Restore the state of one model; its operations after that state are then first in its queue.

        Raises `WorkerDied`.
        """
        model_id = None if self._recovery is None else self._recovery.next_due()
        if self._recovery is None or model_id is None:
            return False
        model, self._coming_back = self._models[model_id], model_id
        await self._desk.close()  # what is being answered belongs to the past that it goes back to
        try:
            if model_id in self._adapters.on_worker:
                await self._call("remove_adapter", model_id)
            self._adapters.on_worker.add(model_id)
            restored = await self._recovery.restore(model_id)
        except WorkerDied:
            raise
        except TinsmithError as error:
            self._coming_back = None
            self._give_up(model_id, error)
            await self.record_given_up()
            return True
        self._coming_back = None
        if self._models.get(model_id) is not model:
            self._adapters.free(model_id)
        elif restored is not None:
            model.live = restored.created
            if self._snapshots is not None and restored.created:
                self._snapshots.note(model_id, restored.applied_seq, 0, changed=False)
            self._line.put_first(model_id, restored.project_id, restored.entries)
        return True

    def _try_again(self, model_id: str, error: TinsmithError) -> None:
        """An operation that had succeeded failed when it was executed again: from the beginning, or not at all."""
        if not self._models.is_live(model_id):  # it could not even be created
            return
        assert self._recovery is not None
        passing = passes(error) or self._recovery.waits_for_a_snapshot(model_id)
        if not self.set_back(model_id, self._turns.close(model_id), died=not passing):
            self._give_up(model_id, error)
        elif passing:
            self._recovery.put_off(model_id, error)

    # -- no way back -----------------------------------------------------------------------------------------------
    def _give_up(self, model_id: str, error: TinsmithError) -> None:
        """A model cannot be brought back: it is lost as soon as that is recorded, and runs nothing until then."""
        if model_id in self._models:
            error = error if isinstance(error, ModelLost) else lost(model_id, error.message)
            self._given_up[model_id] = error
            self.set_back(model_id, self._turns.close(model_id))

    async def record_given_up(self) -> None:
        """Have it recorded that models were given up; they are lost then, and what waited for them is answered."""
        given_up, self._given_up = self._given_up, {}
        if given_up:
            await self._tell_lost(list(given_up))
        for model_id, error in given_up.items():
            if model_id in self._models:
                for entry, reason in self._lose(model_id, error):
                    self._desk.finish(entry, reason)
                if model_id in self._adapters.on_worker:
                    self._adapters.free(model_id)

    def _lose(self, model_id: str, error: TinsmithError) -> Failures:
        """A model is lost; returns what waited for it, to be failed."""
        model = self._models[model_id]
        model.live, model.error = False, error
        return [(entry, error) for entry in [*self.forget(model_id), *self._line.close_model(model_id)]]
