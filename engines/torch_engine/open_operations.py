"""The operations that are open on an engine, and the passes that their datums go through.

Responsible for what one operation's failure means to the others (nothing). Not responsible for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from engines.torch_engine.checkpointing import use_checkpointing
from engines.torch_engine.faults import unexpected
from engines.torch_engine.memory import Checkpointing, checkpoints_pass
from engines.torch_engine.memory_errors import is_out_of_memory
from engines.torch_engine.operations import DatumLoss, OpenOperation
from engines.torch_engine.training_pass import PassItem, TrainingPass
from schemas.base_model_info import MemoryEstimate
from schemas.errors import EngineFailure, NotFound, OutOfMemory, TinsmithError
from schemas.operations import DatumRange, TrainResult

Ended = dict[str, TrainResult | TinsmithError]


@dataclass(frozen=True, slots=True)
class Work:
    """One datum to be computed."""

    operation_id: str
    operation: OpenOperation
    index: int

    @property
    def tokens(self) -> int:
        return len(self.operation.batch.datums[self.index].tokens)


@dataclass(eq=False, slots=True)
class OpenOperations:
    """Open operations by id.

    Args:
        run: computes a pass.
        budget: tokens of a pass.
        checkpointing: whether activations are computed twice instead of kept; auto = where they would not fit.
        memory: what is known of sizes.
        room: bytes that a pass may take; None = not known.
    """

    run: TrainingPass
    budget: int
    checkpointing: Checkpointing
    memory: MemoryEstimate
    room: int | None
    _open: dict[str, OpenOperation] = field(default_factory=dict)

    def __contains__(self, operation_id: str) -> bool:
        return operation_id in self._open

    def open(self, operation_id: str, operation: OpenOperation) -> None:
        """Take an operation in. Raises `EngineFailure` if its id is open."""
        if operation_id in self._open:
            raise EngineFailure("an operation of that id is open")
        self._open[operation_id] = operation

    def drop(self, operation_id: str) -> OpenOperation | None:
        """Forget an operation and what it collected; returns it, if there was one."""
        return self._open.pop(operation_id, None)

    def of_adapter(self, adapter_id: str) -> list[str]:
        """The open operations of an adapter."""
        return [name for name, operation in self._open.items() if operation.batch.adapter_id == adapter_id]

    def compute(self, ranges: Sequence[DatumRange]) -> Mapping[str, TrainResult | TinsmithError]:
        """See `BaseEngine.compute`. Ended operations stay open until they are dropped."""
        ended: Ended = {}
        works = [work for part in ranges for work in self._datums(part, ended)]
        self.execute(works, ended)
        for operation_id in dict.fromkeys(part.operation_id for part in ranges):
            operation = self._open.get(operation_id)
            if operation is not None and operation.complete and operation_id not in ended:
                ended[operation_id] = self._finish(operation)
        return ended

    def whole(self, operation: OpenOperation) -> TrainResult:
        """Compute an operation that is not open, all at once; nothing is committed. Raises its error."""
        ended: Ended = {}
        self.execute([Work("", operation, index) for index in range(len(operation.batch.datums))], ended)
        error = ended.get("")
        if isinstance(error, TinsmithError):
            raise error
        return operation.result()

    def execute(self, works: Iterable[Work], ended: Ended) -> None:
        """Run datums in passes, forward-only ones apart from the others; errors go into `ended`."""
        works = list(works)
        for backward in (False, True):
            for chosen in self.passes([work for work in works if work.operation.batch.backward is backward]):
                self._attempt([work for work in chosen if work.operation_id not in ended], ended)

    def passes(self, works: Sequence[Work]) -> Iterator[list[Work]]:
        """Split by the token budget, in order; a datum beyond the budget goes alone."""
        chosen: list[Work] = []
        tokens = 0
        for work in works:
            if chosen and (not self.run.packs or tokens + work.tokens > self.budget):
                yield chosen
                chosen, tokens = [], 0
            chosen.append(work)
            tokens += work.tokens
        if chosen:
            yield chosen

    def run_pass(
        self, works: Sequence[Work], *, body: bool | None = None
    ) -> list[tuple[Tensor | TinsmithError, DatumLoss]]:
        """One pass: logprobs or the error of each datum, and its loss. `body`: as in `TrainingPass.run`."""
        device = self.run.device
        losses = [work.operation.loss(work.index, device) for work in works]
        items = [
            PassItem(
                work.operation.batch.datums[work.index].tokens,
                work.operation.state.weights,
                loss,
                work.operation.collect() if work.operation.batch.backward else None,
            )
            for work, loss in zip(works, losses, strict=True)
        ]
        lengths = [work.tokens for work in works]
        twice = items[0].gradient is not None and checkpoints_pass(self.memory, lengths, self.room, self.checkpointing)
        with use_checkpointing(self.run.model, twice):
            return list(zip(self.run.run(items, body=body), losses, strict=True))

    def take(self, work: Work, outcome: Tensor | TinsmithError, loss: DatumLoss, ended: Ended) -> None:
        """Give a datum's numbers to its operation; errors go into `ended`."""
        if work.operation_id in ended:
            return
        try:
            if not isinstance(outcome, Tensor):
                raise outcome
            work.operation.take(work.index, outcome, loss)
        except TinsmithError as error:
            ended[work.operation_id] = error
        except Exception as error:
            ended[work.operation_id] = unexpected(error, "the metrics of a datum")

    def commit(self, operation: OpenOperation) -> None:
        """Add what a complete operation collected to its adapter's gradient (the open stage's, inside `train_mode`)."""
        if operation.flat is None:
            return
        state = operation.state
        target = state.gradient if state.stage is None else state.stage
        target.add(operation.flat, 1, operation.poison())
        operation.flat = operation.gradient = None

    def _finish(self, operation: OpenOperation) -> TrainResult | TinsmithError:
        """Commit a complete operation; if its result cannot be made, nothing of it is kept."""
        try:
            result = operation.result()
            self.commit(operation)
        except Exception as error:
            return unexpected(error, "the result of a batch")
        return result

    def _datums(self, part: DatumRange, ended: Ended) -> Iterator[Work]:
        operation = self._open.get(part.operation_id)
        if operation is None:
            ended[part.operation_id] = NotFound("there is no such open operation")
            return
        for index in range(part.start, part.stop):
            yield Work(part.operation_id, operation, index)

    def _attempt(self, works: list[Work], ended: Ended) -> None:
        """One pass; where it fails before anything is written, two smaller ones, until who is at fault is alone."""
        if not works:
            return
        self.run.meter.writing = False
        try:
            outcomes = self.run_pass(works)
        except Exception as error:
            failure = error
        else:
            for work, (outcome, loss) in zip(works, outcomes, strict=True):
                self.take(work, outcome, loss, ended)
            return
        if len(works) > 1 and not self.run.meter.writing:
            middle = len(works) // 2
            self._attempt(works[:middle], ended)
            self._attempt([work for work in works[middle:] if work.operation_id not in ended], ended)
            return
        if not is_out_of_memory(failure):
            # Gradients may hold a part of the pass: none of its operations can go on.
            ended.update(dict.fromkeys([work.operation_id for work in works], unexpected(failure, "a training pass")))
            return
        for work in reversed(works):
            ended[work.operation_id] = OutOfMemory(
                f"data[{work.index}] of {work.tokens} tokens does not fit in the memory of the device",
                hint="send shorter datums, or ask the operator for gradient checkpointing",
            )
