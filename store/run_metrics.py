"""What the settled operations of training runs measured: written with the outcome, thinned when there is too much.

Rows of a batch and of an optimizer step lie in the order of their `seq_id`, whatever order they were settled in. Not
responsible for what is measured or for turning rows into steps (`app/services/run_metrics.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import cast

from sqlalchemy import Insert, delete, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.records import MetricKind, MetricRecord
from store.tables import RunMetric

BUCKETS = 32
"""Points of a run's overview."""


@dataclass(frozen=True, slots=True)
class RunOverview:
    """A run in short: totals, and the mean loss per token that counts over `BUCKETS` parts of its batches, in order."""

    steps: int
    tokens: int
    losses: tuple[float | None, ...]


async def add_metric(db: AsyncSession, model_id: str, record: MetricRecord) -> None:
    """Keep one row. In the transaction that settles its operation: both are there, or neither."""
    await db.flush()
    await (await db.connection()).execute(_insert(), {"model_id": model_id, **_columns(record)})


@cache
def _insert() -> Insert:
    """Kept: every training operation runs it."""
    return insert(RunMetric.__table__)  # type: ignore[arg-type]


async def metrics_of(db: AsyncSession, model_id: str, after: int = -1) -> list[MetricRecord]:
    """The rows of a run behind `after`, by `seq_id`. The caller has checked whose run it is."""
    table = RunMetric.__table__
    chosen = select(table).where(table.c.model_id == model_id, table.c.seq_id > after).order_by(table.c.seq_id)
    rows = await (await db.connection()).execute(chosen)
    return [
        MetricRecord(
            seq_id=row.seq_id,
            kind=cast(MetricKind, row.kind),
            at=row.at,
            waited=row.waited,
            seconds=row.seconds,
            tokens=row.tokens,
            steps=row.steps,
            loss=row.loss,
            weight=row.weight,
            gap=row.gap,
            kl=row.kl,
            grad_norm=row.grad_norm,
            learning_rate=row.learning_rate,
        )
        for row in rows
    ]


async def count_metrics(db: AsyncSession, model_id: str) -> int:
    """How many rows a run has."""
    return await db.scalar(select(func.count()).select_from(RunMetric).where(RunMetric.model_id == model_id)) or 0


async def replace_metrics(
    db: AsyncSession, model_id: str, gone: Collection[int], merged: Sequence[MetricRecord]
) -> None:
    """Put merged rows in the place of those with these numbers."""
    numbers = list(gone)
    for begin in range(0, len(numbers), 500):  # SQLite bounds the parameters of a statement
        some = (RunMetric.model_id == model_id, RunMetric.seq_id.in_(numbers[begin : begin + 500]))
        await db.execute(delete(RunMetric).where(*some))
    if merged:
        rows = [{"model_id": model_id, **_columns(record)} for record in merged]
        await (await db.connection()).execute(_insert(), rows)


async def newest(db: AsyncSession, model_ids: Collection[str]) -> dict[str, int]:
    """The highest `seq_id` with a row, of each of these runs that has rows."""
    mine = RunMetric.model_id.in_(list(model_ids))
    rows = await db.execute(
        select(RunMetric.model_id, func.max(RunMetric.seq_id)).where(mine).group_by(RunMetric.model_id)
    )
    return {row[0]: int(row[1]) for row in rows}


async def overviews(db: AsyncSession, model_ids: Collection[str]) -> dict[str, RunOverview]:
    """These runs in short. The caller has checked whose they are; runs without rows are left out."""
    mine = RunMetric.model_id.in_(list(model_ids))
    sums = (func.sum(RunMetric.steps), func.sum(RunMetric.tokens))
    totals = (await db.execute(select(RunMetric.model_id, *sums).where(mine).group_by(RunMetric.model_id))).all()
    place = func.ntile(BUCKETS).over(partition_by=RunMetric.model_id, order_by=RunMetric.seq_id).label("place")
    columns = (RunMetric.model_id, RunMetric.loss, RunMetric.weight, place)
    batches = select(*columns).where(mine, RunMetric.kind == "forward_backward", RunMetric.weight > 0).subquery()
    mean = (func.sum(batches.c.loss) / func.sum(batches.c.weight)).label("mean")
    grouped = select(batches.c.model_id, mean).group_by(batches.c.model_id, batches.c.place)
    losses: dict[str, list[float | None]] = {}
    for row in await db.execute(grouped.order_by(batches.c.model_id, batches.c.place)):
        losses.setdefault(row.model_id, []).append(row.mean)
    return {row[0]: RunOverview(int(row[1]), int(row[2]), tuple(losses.get(row[0], ()))) for row in totals}


def _columns(record: MetricRecord) -> dict[str, object]:
    return asdict(record)
