"""Driving an engine turn by turn through the interface that the scheduler uses, and comparing what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.torch_engine.engine import TorchEngine
from schemas.errors import TinsmithError
from schemas.operations import DatumRange, TrainBatch, TrainResult

Outcome = TrainResult | TinsmithError
Cuts = Sequence[Sequence[tuple[str, int]]]
"""Turns: which operation goes on by how many datums."""


def whole(operations: Mapping[str, TrainBatch]) -> Cuts:
    """Everything in one turn, in order."""
    return [[(name, max(1, len(batch.datums))) for name, batch in operations.items()]]


def run(engine: TorchEngine, operations: Mapping[str, TrainBatch], cuts: Cuts | None = None) -> dict[str, Outcome]:
    """Open all, compute them as cut (None: in one turn); each operation's result, or what refused it."""
    ended: dict[str, Outcome] = {}
    for name, batch in operations.items():
        try:
            engine.open_operation(name, batch)
        except TinsmithError as error:
            ended[name] = error
    done = dict.fromkeys(operations, 0)
    for turn in whole(operations) if cuts is None else cuts:
        ranges = []
        for name, count in turn:
            if name not in ended:
                ranges.append(DatumRange(name, done[name], done[name] + count))
                done[name] += count
        outcomes = engine.compute(ranges)
        assert not outcomes.keys() & ended.keys(), "an operation ended twice"
        assert outcomes.keys() <= {part.operation_id for part in ranges}
        ended.update(outcomes)
    assert ended.keys() == operations.keys(), "an operation did not end with its last datum"
    return ended


def succeeded(outcome: Outcome) -> TrainResult:
    """The result; the error is raised."""
    if isinstance(outcome, TinsmithError):
        raise outcome
    return outcome


@dataclass(frozen=True)
class Bits:
    """A result in a form in which == means: the same bit for bit."""

    logprobs: tuple[tuple[tuple[int, ...], bytes], ...]
    metrics: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, outcome: Outcome) -> Bits:
        """Of an operation that must have succeeded."""
        result = succeeded(outcome)
        return cls(
            tuple((lp.shape, lp.tobytes()) for lp in result.logprobs),
            tuple(sorted((name, float(value).hex()) for name, value in result.metrics.items())),
        )
