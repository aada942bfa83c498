"""What was used: tokens of operations and storage of checkpoints, by the hour.

Responsible for what counts as a token, for adding storage up and for the window of a question. Not responsible for
writing tokens down (`settling.py`, in the transaction that settles the operation) or for prices: there are none.

* training: every position of every datum of a forward or forward_backward that succeeded.
* sampling_prefill: the prompt, once for each request whatever its `num_samples`; what came out of the prefix cache is
  counted apart. sampling_sample: every token drawn, the stop token included. Of a sample that was cancelled, what was
  read and drawn until it was stopped; of one that failed, nothing.
* storage: bytes times time, to the microsecond, of every checkpoint, those without a name included. A gigabyte is 10^9
  bytes.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import Cancelled, InvalidRequest
from schemas.operations import SampleResult, TrainResult
from store import usage
from store.database import Store
from store.records import StorageRecord, TokenUsageRecord
from store.usage import TokenKind

HOUR = timedelta(hours=1)
MAX_WINDOW = timedelta(days=14)
GIGABYTE = 10**9

UsageKind = Literal[
    "training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample", "checkpoint", "storage"
]


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One hour of one kind. `quantity` is tokens, checkpoints, or gigabyte-hours; `session_id` None for storage and for
    samples that belong to no session."""

    bucket_start: datetime
    kind: UsageKind
    base_model: str
    session_id: str | None
    quantity: float


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The rows of a window, and the `user_metadata` of every session in them."""

    rows: list[UsageRow]
    sessions: Mapping[str, Mapping[str, Any]]


def batch_tokens(outcome: object) -> Mapping[TokenKind, int]:
    """What a training result used: the positions of its datums. Nothing for other results."""
    if not isinstance(outcome, TrainResult):
        return {}
    return {"training": sum(int(logprobs.shape[0]) for logprobs in outcome.logprobs)}


def sample_tokens(prompt_length: int, outcome: object) -> Mapping[TokenKind, int]:
    """What a sample used: its prompt (cached or not) and the tokens drawn."""
    if not isinstance(outcome, SampleResult):
        return {}
    cached = min(outcome.prompt_cache_hit_tokens, prompt_length)
    return {
        "sampling_prefill": prompt_length - cached,
        "sampling_prefill_cached": cached,
        "sampling_sample": sum(len(sequence.tokens) for sequence in outcome.sequences),
    }


def cancelled_tokens(prompt_length: int, stopped: Cancelled) -> Mapping[TokenKind, int]:
    """What a sample used that was cancelled: what was read of its prompt (cached or not), and the tokens drawn."""
    read = prompt_length if stopped.drawn_tokens else min(stopped.prompt_tokens, prompt_length)
    cached = min(stopped.cached_tokens, read)
    return {
        "sampling_prefill": read - cached,
        "sampling_prefill_cached": cached,
        "sampling_sample": stopped.drawn_tokens,
    }


class Usage:
    """Reads the usage of a project. `clock` is the time, aware UTC."""

    def __init__(self, store: Store, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._clock = clock

    async def report(self, project_id: str, starting_on: datetime, ending_before: datetime) -> UsageReport:
        """The usage of a project by the hour: by hour, then the largest quantity of each kind first.

        Raises:
            InvalidRequest: the window is not of whole UTC hours, is empty, longer than 14 days, or begins in the
                future.
        """
        start, end = self._window(starting_on, ending_before)

        async def read(db: AsyncSession) -> UsageReport:
            tokens = await usage.tokens_between(db, project_id, start, end)
            stored = await usage.storage_between(db, project_id, start, end)
            until = min(end, self._clock())
            rows = await asyncio.to_thread(_rows, tokens, stored, start, end, until)  # there may be many
            session_ids = {row.session_id for row in rows if row.session_id is not None}
            return UsageReport(rows, await usage.metadata_of_sessions(db, project_id, session_ids))

        return await self._store.read(read)

    async def stored_now(self, project_id: str) -> tuple[int, int]:
        """How many checkpoints a project has stored, and their size in bytes."""
        return await self._store.read(lambda db: usage.current_storage(db, project_id))

    def _window(self, starting_on: datetime, ending_before: datetime) -> tuple[datetime, datetime]:
        start, end = _hour(starting_on, "starting_on"), _hour(ending_before, "ending_before")
        if start > self._clock():
            raise InvalidRequest(f"starting_on {start.isoformat()} is in the future", field="starting_on")
        if end <= start:
            raise InvalidRequest(
                f"ending_before {end.isoformat()} is not after starting_on {start.isoformat()}", field="ending_before"
            )
        if end - start > MAX_WINDOW:
            raise InvalidRequest(
                f"ending_before {end.isoformat()} is {(end - start).days} days or more after starting_on; at most "
                f"{MAX_WINDOW.days} days are accepted",
                field="ending_before",
            )
        return start, end


_ORDER: tuple[UsageKind, ...] = (
    "training",
    "sampling_prefill",
    "sampling_prefill_cached",
    "sampling_sample",
    "checkpoint",
    "storage",
)


def _hour(value: datetime, field: str) -> datetime:
    if value.tzinfo is None:
        raise InvalidRequest(f"{field} {value.isoformat()} has no time zone; write 2026-07-13T00:00:00Z", field=field)
    utc = value.astimezone(UTC)
    if (utc.minute, utc.second, utc.microsecond) != (0, 0, 0):
        raise InvalidRequest(f"{field} {value.isoformat()} is not the beginning of a UTC hour", field=field)
    return utc


def _rows(
    tokens: Sequence[TokenUsageRecord],
    stored: Sequence[StorageRecord],
    start: datetime,
    end: datetime,
    until: datetime,
) -> list[UsageRow]:
    rows = [
        *(_token_row(record) for record in tokens),
        *_count_rows(stored, start, end),
        *_storage_rows(stored, start, until),
    ]
    rows.sort(key=lambda row: (row.bucket_start, _ORDER.index(row.kind), -row.quantity))
    return rows


def _token_row(record: TokenUsageRecord) -> UsageRow:
    kind = next(kind for kind in _ORDER if kind == record.kind)
    return UsageRow(record.bucket_start, kind, record.base_model, record.session_id or None, record.tokens)


def _floor(time: datetime) -> datetime:
    return time.replace(minute=0, second=0, microsecond=0)


def _count_rows(stored: Iterable[StorageRecord], start: datetime, end: datetime) -> list[UsageRow]:
    """Checkpoints by the hour in which they were saved."""
    counts: dict[tuple[datetime, str, str], int] = defaultdict(int)
    for record in stored:
        if start <= record.created_at < end:
            counts[(_floor(record.created_at), record.base_model, record.session_id)] += 1
    return [UsageRow(hour, "checkpoint", model, session, count) for (hour, model, session), count in counts.items()]


def _storage_rows(stored: Iterable[StorageRecord], start: datetime, end: datetime) -> list[UsageRow]:
    """Gigabyte-hours of each base model by the hour, up to `end`.

    A record adds its share to its first and its last hour; what lies between is a whole hour each, which a running sum
    of changes gives without visiting every hour of every record.
    """
    partial: dict[tuple[str, datetime], float] = defaultdict(float)
    change: dict[tuple[str, datetime], float] = defaultdict(float)
    for record in stored:
        begin, finish = max(record.created_at, start), min(record.deleted_at or end, end)
        if finish <= begin:
            continue
        first, last, size = _floor(begin), _floor(finish), record.size_bytes / GIGABYTE
        if first == last:
            partial[(record.base_model, first)] += size * ((finish - begin) / HOUR)
            continue
        partial[(record.base_model, first)] += size * ((first + HOUR - begin) / HOUR)
        partial[(record.base_model, last)] += size * ((finish - last) / HOUR)
        change[(record.base_model, first + HOUR)] += size
        change[(record.base_model, last)] -= size
    rows: list[UsageRow] = []
    for model in sorted({name for name, _ in partial}):
        whole, hour = 0.0, start
        while hour < end:
            whole += change.get((model, hour), 0.0)
            quantity = whole + partial.get((model, hour), 0.0)
            if quantity > 1e-15:  # what rounding leaves of a sum that is back at zero
                rows.append(UsageRow(hour, "storage", model, None, quantity))
            hour += HOUR
    return rows
