"""The bare engine: operations of all clients in turns of a worker, without server, HTTP or log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.training.work import BETAS, EPS, LEARNING_RATE, Example, Outcome, SideSpec, Work
from engines.torch_engine.engine import TorchEngine
from schemas.errors import TinsmithError
from schemas.operations import (
    AdapterStep,
    Datum,
    DatumRange,
    LoraSpec,
    OptimStep,
    OptimStepParams,
    TrainBatch,
    TrainResult,
)

STEP = OptimStep(OptimStepParams(LEARNING_RATE, BETAS, EPS, 0.0))


class EngineSide:
    """One engine with N adapters, driven as the training lane drives it."""

    def __init__(self, spec: SideSpec) -> None:
        self.engine = TorchEngine(
            Path(spec.folder),
            dtype=spec.dtype,
            device=spec.device,
            threads=spec.threads,
            gradient_checkpointing="on" if spec.checkpointing else "auto",
        )
        self.budget = self.engine.load().micro_batch_tokens
        for client in range(spec.clients):
            self.engine.create_adapter(
                str(client), LoraSpec(rank=spec.rank, seed=client, train_unembed=spec.unembed), "adamw"
            )

    def step(self, work: Work) -> Outcome:
        """Rounds of all clients, and what the engine says that they cost."""
        self.engine.take_stats()
        begin = time.perf_counter()
        rounds = [self._round(work) for _ in range(work.steps)]
        total = time.perf_counter() - begin
        stats = self.engine.take_stats()
        parts = {f"seconds {name}": seconds for name, seconds in stats.seconds.items()}
        if stats.passes:
            parts.update(rows=float(stats.rows), passes=float(stats.passes))
            parts["seconds elsewhere"] = total - sum(stats.seconds.values())
        return Outcome(rounds[0], parts)

    def _round(self, work: Work) -> tuple[float, ...]:
        """All clients' operations, packed into turns, then all optimizer steps together. Raises the first error."""
        ended: dict[str, TrainResult | TinsmithError] = {}
        for client, batch in enumerate(work.clients):
            self.engine.open_operation(str(client), train_batch(client, batch))
        for turn in turns(work.clients, self.budget):
            ended.update(self.engine.compute(turn))
        names = [str(client) for client in range(len(work.clients))]
        stepped = self.engine.optimizer_steps([AdapterStep(f"step {name}", name, STEP) for name in names])
        losses = []
        for outcome in [*stepped, *(ended[name] for name in names)]:
            if isinstance(outcome, TinsmithError):
                raise outcome
            if isinstance(outcome, TrainResult):
                losses.append(outcome.metrics["loss:sum"])
        return tuple(losses)

    def cpu_seconds(self) -> float:
        """This process has no children."""
        return time.process_time()

    def close(self) -> None:
        """Nothing was started."""


def train_batch(client: int, batch: Sequence[Example]) -> TrainBatch:
    """As the edge hands it over."""
    datums = tuple(Datum(example.tokens, {"target_tokens": example.targets}) for example in batch)
    return TrainBatch(str(client), datums, "cross_entropy")


def turns(clients: Sequence[Sequence[Example]], budget: int) -> Iterator[list[DatumRange]]:
    """All datums, in order, in turns of at most `budget` tokens (a longer datum is a turn of its own)."""
    turn: list[DatumRange] = []
    filled = 0
    for client, batch in enumerate(clients):
        start = 0
        for index, example in enumerate(batch):
            if filled and filled + len(example.tokens) > budget:
                if index > start:
                    turn.append(DatumRange(str(client), start, index))
                yield turn
                turn, filled, start = [], 0, index
            filled += len(example.tokens)
        turn.append(DatumRange(str(client), start, len(batch)))
    yield turn
