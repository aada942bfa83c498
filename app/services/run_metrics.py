"""What training runs measured: noted with each result, read as steps, told while it happens, thinned when it is long.

A step is everything that was asked of a run since its last optimizer step, that step included. Not responsible for
computing any of the numbers (`engines`) or for the rows (`store/run_metrics.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import isfinite

import numpy as np
from sqlalchemy.ext.asyncio import AsyncSession

from app.services.submission import Measure, Rows, Timing
from app.services.waiting import Waiters
from schemas.errors import TooManyRequests, Unavailable
from schemas.operations import Operation, OperationResult, StepResult, TrainBatch, TrainResult
from store import run_metrics as rows_of
from store import runs
from store.database import Store
from store.records import MetricKind, MetricRecord, OperationRecord, RunState

MOST_ROWS = 3000
"""Rows of a run from which neighbouring steps are merged, to about half as many: enough for any plot, 300 KB."""
CHECK_EVERY = 500
"""New rows of a run after which it is looked at again."""
NEWEST = 64
"""Steps that are never merged: a stream may be about to tell them."""
UNSETTLED_STEPS = 8
"""Steps that a stream tells again: results of neighbouring operations may become durable in another order."""
STREAM_SECONDS = 300.0
"""How long a stream is open: a client that still wants it asks again, and its key is checked again."""
LOOK_SECONDS = 5.0
"""A stream looks so often by itself: the run may be executed by another server."""
PAUSE_SECONDS = 0.25
MOST_REMEMBERED = 2000
MOST_STREAMS = 64
"""Open streams of one project."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step with the batches before it, or the batches after the last one (`done` False).

    `step` counts from 1. Sums: `loss`, `weight`, `tokens`, `batches`, `waited`, `seconds`. Of `merged` steps of a long
    run, the last `grad_norm` and `learning_rate`.
    """

    step: int
    seq_id: int
    at: datetime
    done: bool
    merged: int
    batches: int
    tokens: int
    waited: float
    seconds: float
    loss: float | None
    weight: float
    gap: float | None
    kl: float | None
    grad_norm: float | None
    learning_rate: float | None

    @property
    def loss_per_token(self) -> float | None:
        """The mean over what counts; None if nothing does."""
        return None if self.loss is None or self.weight <= 0 else self.loss / self.weight


@dataclass(frozen=True, slots=True)
class News:
    """What a stream tells: steps that are new or changed, and the state of the run if that is new."""

    steps: Sequence[Step]
    state: RunState | None


@dataclass(slots=True)
class _Seen:
    """How far a stream is: rows up to `seq_id`, which are `steps` steps, are told and will not change."""

    seq_id: int = -1
    steps: int = 0
    told: Mapping[int, Step] = field(default_factory=dict)
    state: RunState | None = None


class RunMetrics:
    """Metrics of the runs of all projects; the callers have checked whose. Implements no order and no permission."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiters = Waiters()
        self._closed = False
        self._written: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._overviews: dict[str, tuple[int, rows_of.RunOverview]] = {}
        """Run -> its newest row, and the run in short as of that."""
        self._measures: Mapping[str, Measure] = {
            "forward_backward": _OfBatch(self._note),
            "optim_step": _OfStep(self._note),
        }

    def of(self, kind: str) -> Measure | None:
        """What is kept of operations of this kind; None: nothing."""
        return self._measures.get(kind)

    def wake(self, scope: str | None) -> None:
        """Something of this scope of the operation log is durable; None = perhaps of any scope."""
        if scope is None:
            self._waiters.wake_all()
        else:
            self._waiters.wake(scope.replace("unload:", "model:", 1))

    def close(self) -> None:
        """End every stream (the server is stopping)."""
        self._closed = True
        self._waiters.close()

    async def series(self, model_id: str) -> list[Step]:
        """All steps of a run."""
        return steps_of(await self._store.read(lambda db: rows_of.metrics_of(db, model_id)))

    async def overviews(self, model_ids: Collection[str]) -> dict[str, rows_of.RunOverview]:
        """These runs in short; those that measured nothing are left out.

        Remembered until a run goes on: lists are looked at all the time, and most of what is in them rests.
        """

        async def read(db: AsyncSession) -> dict[str, tuple[int, rows_of.RunOverview]]:
            newest = await rows_of.newest(db, model_ids)
            known = {model_id: self._overviews.get(model_id) for model_id in newest}
            moved = [model_id for model_id, one in known.items() if one is None or one[0] != newest[model_id]]
            fresh = await rows_of.overviews(db, moved) if moved else {}
            found = {model_id: (newest[model_id], one) for model_id, one in fresh.items()}
            return {**{model_id: one for model_id, one in known.items() if one is not None}, **found}

        if not model_ids:
            return {}
        found = await self._store.read(read)
        self._overviews.update(found)
        while len(self._overviews) > MOST_REMEMBERED:
            del self._overviews[next(iter(self._overviews))]
        return {model_id: overview for model_id, (_, overview) in found.items()}

    async def follow(self, project_id: str, model_id: str, after: int = 0) -> AsyncGenerator[News | None]:
        """The steps of a run behind step `after`, then new ones as they come; None: nothing for a while.

        Raises:
            TooManyRequests: the project has `MOST_STREAMS` open already.
            Unavailable: the server is stopping.
        """
        if self._closed:
            raise Unavailable("the server is shutting down", hint="try again in a moment")
        if self._streams[project_id] >= MOST_STREAMS:
            raise TooManyRequests(
                f"{MOST_STREAMS} streams of this project are open already",
                hint="close some, or ask for the metrics without a stream",
            )
        self._streams[project_id] += 1
        seen, until = _Seen(), asyncio.get_running_loop().time() + STREAM_SECONDS
        try:
            while not self._closed and asyncio.get_running_loop().time() < until:
                with self._waiters.waiter(f"model:{model_id}") as waiter:
                    news = await self._look(model_id, seen, after)
                    yield news
                    if news is not None and news.state in ("closed", "lost", "failed"):
                        return
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_SECONDS):
                            await waiter
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            self._streams[project_id] -= 1

    async def thin(self) -> None:
        """Merge neighbouring steps of runs that have grown long."""
        due = [model_id for model_id, count in self._written.items() if count >= CHECK_EVERY]
        for model_id in due:
            del self._written[model_id]
            await self._store.write(lambda db, model_id=model_id: _thin(db, model_id))  # type: ignore[misc]

    async def _look(self, model_id: str, seen: _Seen, after: int) -> News | None:
        async def read(db: AsyncSession) -> tuple[list[MetricRecord], RunState]:
            run = await runs.find_run(db, model_id)
            return await rows_of.metrics_of(db, model_id, seen.seq_id), "closed" if run is None else run.state

        rows, state = await self._store.read(read)
        steps = steps_of(rows, seen.steps)
        new = [step for step in steps if step.step > after and seen.told.get(step.step) != step]
        settled = [step for step in steps if step.done][:-UNSETTLED_STEPS]
        if settled:
            seen.seq_id, seen.steps = settled[-1].seq_id, settled[-1].step
        seen.told = {step.step: step for step in steps if step.seq_id > seen.seq_id}
        changed, seen.state = state if state != seen.state else None, state
        return News(new, changed) if new or changed else None

    def _note(self, model_id: str, record: MetricRecord) -> Rows:
        async def rows(db: AsyncSession) -> None:
            await rows_of.add_metric(db, model_id, record)
            self._written[model_id] += 1

        return rows


Note = Callable[[str, MetricRecord], Rows]


class _OfBatch:
    """Of a forward_backward: its loss, and how far the trainer's logprobs are from the sampler's where it has both."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def weigh(self, operation: Operation) -> float:
        """See `Measure.weigh`."""
        return weight_of(operation) if isinstance(operation, TrainBatch) else 0.0

    def rows(self, record: OperationRecord, outcome: OperationResult, weight: float | None, timing: Timing) -> Rows:
        """See `Measure.rows`."""
        assert isinstance(outcome, TrainResult)
        tokens, metrics = sum(int(part.shape[0]) for part in outcome.logprobs), outcome.metrics
        noted = replace(
            _timed(record, "forward_backward", timing),
            tokens=tokens,
            loss=_finite(metrics.get("loss:sum")),
            weight=float(tokens) if weight is None else weight,
            gap=_finite(metrics.get("logprob_gap_abs:mean")),
            kl=_finite(metrics.get("kl_sample_train:mean")),
        )
        return self._note(_model_of(record), noted)


class _OfStep:
    """Of an optimizer step: the norm of the gradient before clipping, and the step size."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def weigh(self, operation: Operation) -> float:
        """See `Measure.weigh`."""
        return 0.0

    def rows(self, record: OperationRecord, outcome: OperationResult, weight: float | None, timing: Timing) -> Rows:
        """See `Measure.rows`."""
        assert isinstance(outcome, StepResult)
        noted = replace(
            _timed(record, "optim_step", timing),
            steps=1,
            grad_norm=_finite(_named(outcome.metrics, "grad_norm")),
            learning_rate=_finite(_named(outcome.metrics, "learning_rate")),
        )
        return self._note(_model_of(record), noted)


def weight_of(batch: TrainBatch) -> float:
    """What to divide the loss of a batch by for a mean per token that counts.

    Cross-entropy: the sum of `weights`, if that is positive. Others: the positions whose advantage or weight is not 0.
    """
    total, counted = 0.0, 0
    for datum in batch.datums:
        chosen = datum.inputs.get("weights", datum.inputs.get("advantages"))
        if chosen is None:
            size = int(datum.inputs["target_tokens"].size) if "target_tokens" in datum.inputs else len(datum.tokens)
            total, counted = total + size, counted + size
        else:
            total, counted = total + float(chosen.sum(dtype=np.float64)), counted + int(np.count_nonzero(chosen))
    return total if batch.loss_fn == "cross_entropy" and total > 0 else float(counted)


def steps_of(rows: Iterable[MetricRecord], before: int = 0) -> list[Step]:
    """Rows as steps. `before`: how many steps came before the first row."""
    steps: list[Step] = []
    group: list[MetricRecord] = []
    count = before
    for row in rows:
        group.append(row)
        if row.kind == "optim_step":
            count += row.steps
            steps.append(_step(group, count))
            group = []
    if group:
        steps.append(_step(group, count + 1))
    return steps


def _step(group: Sequence[MetricRecord], number: int) -> Step:
    last, batches = group[-1], [row for row in group if row.kind == "forward_backward"]
    whole = _added(group)
    return Step(
        step=number,
        seq_id=last.seq_id,
        at=max(row.at for row in group),
        done=last.kind == "optim_step",
        merged=max(1, last.steps),
        batches=len(batches),
        tokens=whole.tokens,
        waited=whole.waited,
        seconds=whole.seconds,
        loss=whole.loss,
        weight=whole.weight,
        gap=whole.gap,
        kl=whole.kl,
        grad_norm=last.grad_norm,
        learning_rate=last.learning_rate,
    )


async def _thin(db: AsyncSession, model_id: str) -> None:
    if await rows_of.count_metrics(db, model_id) <= MOST_ROWS:
        return
    gone, merged = merge(await rows_of.metrics_of(db, model_id), MOST_ROWS // 2)
    await rows_of.replace_metrics(db, model_id, gone, merged)


def merge(rows: Sequence[MetricRecord], most: int) -> tuple[list[int], list[MetricRecord]]:
    """Which rows to drop and what to put in their place, so that about `most` are left. The newest stay as they are."""
    ends = [place for place, row in enumerate(rows) if row.kind == "optim_step"]
    if len(ends) <= NEWEST:
        return [], []
    old = rows[: ends[-NEWEST - 1] + 1]
    stride = 1
    while sum(row.steps for row in old) * 2 > most * stride:  # two rows a group: its batches, its step
        stride *= 2
    gone: list[int] = []
    merged: list[MetricRecord] = []
    group: list[MetricRecord] = []
    steps = 0
    for row in old:
        group.append(row)
        if row.kind == "optim_step" and (steps := steps + row.steps) >= stride:
            gone += [one.seq_id for one in group]
            merged += _merged(group)
            group, steps = [], 0
    return gone, merged


def _merged(group: Sequence[MetricRecord]) -> list[MetricRecord]:
    """A row for the batches of several steps, and one for the steps."""
    batches = [row for row in group if row.kind == "forward_backward"]
    steps = [row for row in group if row.kind == "optim_step"]
    return [_added(part) for part in (batches, steps) if part]


def _added(rows: Sequence[MetricRecord]) -> MetricRecord:
    """Rows as one, in the place of the last: what adds up is added up, `gap` and `kl` are means over `weight`."""
    losses = [row.loss for row in rows if row.loss is not None]
    return replace(
        rows[-1],
        waited=sum(row.waited for row in rows),
        seconds=sum(row.seconds for row in rows),
        tokens=sum(row.tokens for row in rows),
        steps=sum(row.steps for row in rows),
        loss=sum(losses) if losses else None,
        weight=sum(row.weight for row in rows),
        gap=_mean(rows, lambda row: row.gap),
        kl=_mean(rows, lambda row: row.kl),
    )


def _mean(rows: Sequence[MetricRecord], value: Callable[[MetricRecord], float | None]) -> float | None:
    known = [(found, row.weight) for row in rows if (found := value(row)) is not None and row.weight > 0]
    total = sum(weight for _, weight in known)
    return sum(found * weight for found, weight in known) / total if total else None


def _timed(record: OperationRecord, kind: MetricKind, timing: Timing) -> MetricRecord:
    started = timing.started or timing.finished
    waited = (started - timing.accepted).total_seconds()
    seconds = (timing.finished - started).total_seconds()
    return MetricRecord(record.seq_id or 0, kind, timing.finished, max(0.0, waited), max(0.0, seconds))


def _model_of(record: OperationRecord) -> str:
    return record.scope.partition(":")[2]


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and isfinite(value) else None


def _named(metrics: Mapping[str, float], name: str) -> float | None:
    """The metric, with or without the way in which it is reduced behind its name."""
    return next((value for key, value in metrics.items() if key.partition(":")[0] == name), None)
