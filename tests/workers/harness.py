"""What the runtime's tests share: a client that submits operations and holds their outcomes as futures."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import NotNow, TinsmithError
from schemas.operations import (
    CreateModel,
    Datum,
    LoraSpec,
    Operation,
    OptimStep,
    OptimStepParams,
    Sample,
    SampleDelta,
    SamplingParams,
    TrainBatch,
)
from tests.support.inline_group import InlineWorkerGroup
from tests.support.toy_worker import INFO, ToyEngine, ToySampler
from workers.group import WorkerGroup
from workers.runtime import ModelRuntime, Ticket
from workers.tinker import TinkerActorRolloutRefWorker


def toy_group(step_seconds: float = 0.0, max_rows: int = 64) -> InlineWorkerGroup:
    return InlineWorkerGroup(
        lambda progress: TinkerActorRolloutRefWorker(ToyEngine(), ToySampler(step_seconds, max_rows), INFO)
    )


def gate_of(group: InlineWorkerGroup) -> threading.Event:
    """Until it is set, the worker stands still when it opens a batch that says so: `batch(..., held=1)`."""
    gate = threading.Event()
    engine = group.worker.actor.engine
    open_operation = engine.open_operation

    def later(operation_id: str, batch: TrainBatch) -> None:
        if batch.loss_config.get("held"):
            gate.wait(60)
        open_operation(operation_id, batch)

    engine.open_operation = later
    return gate


def create(seed: int = 1, rank: int = 8) -> CreateModel:
    return CreateModel(LoraSpec(rank, seed=seed))


def batch(model_id: str, *, backward: bool = True, datums: int = 1, **config: float) -> TrainBatch:
    """Datums of two tokens with targets 2 and 3: each gives the toy engine a gradient of -5."""
    datum = Datum(np.array([1, 2], np.int64), {"target_tokens": np.array([2, 3]), "weights": np.ones(2, np.float32)})
    return TrainBatch(model_id, (datum,) * datums, "cross_entropy", config, backward)


def step(lr: float = 1.0) -> OptimStep:
    return OptimStep(OptimStepParams(lr=lr))


def sample(first: int = 1, *, tokens: int = 8, rows: int = 1, folder: str | None = None) -> Sample:
    return Sample(np.array([first, 5], np.int64), SamplingParams(max_tokens=tokens), rows, folder)


class Client:
    """Submits to a runtime; `order` records request ids in the order in which they were answered."""

    def __init__(self, runtime: ModelRuntime, project_id: str = "p") -> None:
        self.runtime = runtime
        self.project_id = project_id
        self.order: list[str] = []
        self.loads: list[str] = []
        self.started: list[str] = []
        self.answers: dict[str, int] = {}
        self._ids = itertools.count()

    def submit(
        self,
        operation: Operation | Exception,
        model_id: str | None = None,
        seq_id: int | None = None,
        request_id: str | None = None,
        project_id: str | None = None,
        progress: Callable[[SampleDelta], None] | None = None,
        unread: int | Callable[[], bool] = 0,
        unread_after: float = 0.0,
    ) -> asyncio.Future[Any]:
        """`unread`: how often it cannot be read back before it can (or whether it cannot now), and after how many
        seconds that is known."""
        name = request_id or f"{self.project_id}-{next(self._ids)}"
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def load() -> Operation:
            self.loads.append(name)
            if unread() if callable(unread) else self.loads.count(name) <= unread:
                await asyncio.sleep(unread_after)
                raise NotNow("the disk is away")
            if isinstance(operation, Exception):
                raise operation
            return operation

        async def done(value: Any) -> None:
            self.order.append(name)
            self.answers[name] = self.answers.get(name, 0) + 1
            if not outcome.done():
                outcome.set_result(value)

        project, is_step = project_id or self.project_id, isinstance(operation, OptimStep)
        self.runtime.submit(
            Ticket(
                name,
                project,
                model_id,
                seq_id,
                load,
                done,
                started=lambda: self.started.append(name),
                is_step=is_step,
                progress=progress,
            )
        )
        return outcome


async def value(outcome: asyncio.Future[Any], seconds: float = 10.0) -> Any:
    """The result; a failed operation raises its error."""
    result = await asyncio.wait_for(asyncio.shield(outcome), seconds)
    if isinstance(result, TinsmithError):
        raise result
    return result


@asynccontextmanager
async def running(
    group: WorkerGroup, *, wait: bool = True, grace: float = 0.0, **options: Any
) -> AsyncIterator[tuple[ModelRuntime, Client, list[str]]]:
    """A started runtime, a client of it, and the list of lost models."""
    lost: list[str] = []

    async def on_models_lost(models: Sequence[str]) -> None:
        lost.extend(models)

    runtime = ModelRuntime("toy", group, on_models_lost=on_models_lost, restart_pause=0.01, **options)
    client = Client(runtime)
    await runtime.start()
    try:
        if wait:
            await until_state(runtime, "ready")
        yield runtime, client, lost
    finally:
        await runtime.stop(grace)
    assert all(count == 1 for count in client.answers.values()), "a ticket was answered twice"


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait until a condition holds that no event tells of."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)


async def until_state(runtime: ModelRuntime, state: str) -> None:
    await until(lambda: runtime.state == state, 60)


def process_exists(pid: int) -> bool:
    """Whether the process is in the table, as a zombie or alive."""
    return Path(f"/proc/{pid}").exists()
