"""Runs the turns of training on the worker and answers what ends in them.

Responsible for the batches that are under way: sent, continued, ended, abandoned. Not responsible for what a turn is
made of (`workers/turns.py`), nor for the life of the models (`workers/training_lane.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from schemas.errors import EngineFailure, Gone, TinsmithError, WorkerDied, is_adapters_busy
from schemas.fail_points import fail_point
from schemas.operations import (
    MicroBatch,
    MicroBatchResult,
    OperationResult,
    PassStats,
    StepResult,
    TrainResult,
)
from workers.adapters import WorkerCall
from workers.throughput import ThroughputMeter
from workers.tickets import Entry, TurnNote
from workers.turns import Composer, OpenBatch, Turn

_log = logging.getLogger("tinsmith.runtime")

GATHER_SECONDS = 0.005
"""How long a turn that is not half full waits, once, for other models: clients that were answered together come back
together, a few milliseconds later. Measured with passes of 30 ms: two clients get a fifth more tokens per second, eight
one twentieth more."""


class TurnRunner:
    """One turn at a time.

    Args:
        budget: tokens of a turn, once the base model is loaded.
        meter: told what each turn cost.
        is_open: whether anybody still wants results of a model.
        expects_company: whether models other than these are likely to send something within milliseconds.
        finish: answers an entry.
        distrust: told of models of which nobody knows how far a call came, once their operations are answered.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        call: WorkerCall,
        composer: Composer,
        meter: ThroughputMeter,
        *,
        budget: Callable[[], int],
        is_open: Callable[[str], bool],
        expects_company: Callable[[set[str]], bool],
        finish: Callable[[Entry, OperationResult | TinsmithError], None],
        distrust: Callable[[set[str]], None],
        clock: Callable[[], float],
    ) -> None:
        self._call = call
        self._composer = composer
        self._meter = meter
        self._budget = budget
        self._is_open = is_open
        self._expects_company = expects_company
        self._finish = finish
        self._distrust = distrust
        self._clock = clock
        self._turn: Turn | None = None
        """The one that is composed or runs."""
        self._dropped: list[str] = []
        """Batches that the worker still has and that nobody waits for."""

    # -- what the lane does ----------------------------------------------------------------------------------------
    async def compose(self) -> Turn | Entry | None:
        """The next turn, or the operation that is to be a call of its own before it; None if nothing can run."""
        turn = self._turn = Turn(self._budget())
        single = await self._composer.fill(turn)
        if single is None and not turn.empty:
            if 2 * turn.tokens < turn.budget and self._expects_company(turn.models()):
                await asyncio.sleep(GATHER_SECONDS)
                await self._composer.fill(turn)
            return turn
        self._turn = None
        return single

    async def run(self, turn: Turn) -> None:
        """Run what `compose` gave. Raises `WorkerDied`; the turn then stays here until `lose`."""
        micro = turn.message(self._take_dropped())
        if not turn.empty or micro.dropped:
            self._composer.prefetch()
            began = self._clock()
            fail_point("turn.before_call")
            try:
                result: MicroBatchResult = await self._call("run_micro_batch", micro, executes=turn.entries())
            except WorkerDied:
                raise
            except TinsmithError as error:
                self._fail(turn, error)
            else:
                fail_point("turn.after_call")
                self._tell(turn, result.stats, began)
                unused = self._settle(turn, result.outcomes)
                self._measure(turn, result.stats, began, unused)
        self._turn = None

    async def forget_dropped(self) -> None:
        """Let the worker forget abandoned batches now; if that fails, only memory is at stake. Raises `WorkerDied`."""
        if not self._dropped:
            return
        try:
            await self._call("run_micro_batch", MicroBatch(dropped=self._take_dropped()))
        except WorkerDied:
            raise
        except TinsmithError as error:
            _log.warning("batches cannot be dropped: %s", error.message)

    def close(self, model_id: str) -> list[Entry]:
        """A model is closed: what gets no result. What ends in the running turn still gets one."""
        self._composer.parked.passed(model_id)
        batch = self._composer.under_way.get(model_id)
        batches = {} if batch is None else {batch: None}
        gone: list[Entry] = []
        if self._turn is not None:
            in_turn = {one: None for one in self._turn.batches if one.model_id == model_id}
            if self._turn.sent:
                batches = {one: None for one in batches if one not in in_turn}
            else:
                batches |= in_turn
                gone += [entry for closed, (entry, _) in self._turn.steps.items() if closed == model_id]
        for one in batches:
            self._abandon(one)
            gone.append(one.entry)
        return gone

    def lose(self) -> list[Entry]:
        """The worker died: every operation that was under way, none of which is any more."""
        lost = dict.fromkeys([] if self._turn is None else self._turn.entries())
        for batch in list(self._composer.under_way.values()):
            lost[batch.entry] = None
            self._composer.forget(batch)
        self._turn = None
        self._dropped.clear()
        self._composer.parked.clear()
        return list(lost)

    @property
    def holds_adapters(self) -> bool:
        """Whether the worker keeps adapters in memory for batches that are under way."""
        return bool(self._composer.under_way or self._dropped)

    @property
    def tokens(self) -> int:
        """Tokens of the turn that runs; 0 while none does."""
        return self._turn.tokens if self._turn is not None and self._turn.sent else 0

    def progress(self, entry: Entry) -> str:
        """How far an operation that was started has come, for people."""
        for batch in [*self._composer.under_way.values(), *(self._turn.batches if self._turn is not None else ())]:
            if batch.entry is entry and (batch.left or batch.done):
                return f"running: {batch.done} of {len(batch.lengths)} datums"
        return "running"

    # -- the end of a turn -----------------------------------------------------------------------------------------
    def _settle(self, turn: Turn, outcomes: Mapping[str, TrainResult | StepResult | TinsmithError]) -> int:
        """Answer what ended. A batch that failed early gets no more turns; neither does one whose model was closed
        meanwhile. What found no room in the worker's memory is put back; returns how many tokens that were."""
        refused: dict[str, list[tuple[Entry, int]]] = {}
        for batch in turn.batches:
            outcome = outcomes.get(batch.operation_id)
            if is_adapters_busy(outcome):
                self._composer.forget(batch)
                refused.setdefault(batch.model_id, []).append((batch.entry, sum(batch.lengths[: batch.planned])))
                continue
            self._composer.parked.passed(batch.model_id)
            batch.done = batch.planned
            if outcome is None and batch.left and self._is_open(batch.model_id):
                continue
            if outcome is None:
                outcome = gone() if batch.left else EngineFailure("the worker gave no result for this batch")
                self._abandon(batch)
            self._composer.forget(batch)
            self._composer.parked.freed()
            if isinstance(outcome, TrainResult):
                self._meter.note_gap(outcome.metrics)
            self._finish(batch.entry, outcome)
        for model_id, (entry, _) in turn.steps.items():
            stepped = outcomes.get(entry.ticket.request_id)
            if is_adapters_busy(stepped):
                refused.setdefault(model_id, []).append((entry, 0))
                continue
            self._composer.parked.passed(model_id)
            self._finish(entry, stepped or EngineFailure("the worker gave no result for this step"))
        return sum(self._put_back(model_id, entries, outcomes) for model_id, entries in refused.items())

    def _put_back(
        self,
        model_id: str,
        refused: Sequence[tuple[Entry, int]],
        outcomes: Mapping[str, TrainResult | StepResult | TinsmithError],
    ) -> int:
        """Operations of a model that found no room, with their tokens, are to run again when others have ended; if no
        other is under way, there will never be room. Returns their tokens."""
        entries, tokens = [entry for entry, _ in refused], sum(tokens for _, tokens in refused)
        waits = self.holds_adapters and self._composer.put_back(model_id, entries, tokens)
        if not waits:
            self._composer.parked.passed(model_id)
            for entry in entries:
                error = outcomes[entry.ticket.request_id] if self._is_open(model_id) else gone()
                self._finish(entry, error)
        return tokens

    def _fail(self, turn: Turn, error: TinsmithError) -> None:
        """The call failed as a whole: nobody knows how far it came."""
        for batch in turn.batches:
            self._abandon(batch)
        for model_id in turn.models():
            self._composer.parked.passed(model_id)
        self._composer.parked.freed()
        for entry in turn.entries():
            self._finish(entry, error)
        self._distrust(turn.models())

    def _measure(self, turn: Turn, stats: PassStats, began: float, unused: int) -> None:
        now, tokens = self._clock(), turn.tokens - unused
        self._meter.add(stats, tokens=tokens, budget=turn.budget, steps=len(turn.steps), busy=now - began, now=now)

    def _tell(self, turn: Turn, stats: PassStats, began: float) -> None:
        listening = [entry.ticket.turn for entry in turn.entries() if entry.ticket.turn is not None]
        if listening:
            note = TurnNote(self._clock() - began, dict(stats.seconds), turn.tokens, len(turn.entries()))
            for tell in listening:
                tell(note)

    def _abandon(self, batch: OpenBatch) -> None:
        """No more turns for a batch; the worker forgets it with the next call, if it was sent."""
        self._composer.forget(batch)
        if batch.batch is None:
            self._dropped.append(batch.operation_id)

    def _take_dropped(self) -> tuple[str, ...]:
        dropped, self._dropped = tuple(self._dropped), []
        return dropped


def gone() -> Gone:
    """What the operations of a closed model end with."""
    return Gone("this model was unloaded, or its session is over", field="model_id")
