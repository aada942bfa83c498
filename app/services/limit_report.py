"""Limits as people ask for them: each with its value, where it comes from, what is used and what is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.tenant_limits import Effective, Scope, Source, TenantLimits
from schemas.limits import BURSTS, LIMIT_NAMES, LimitName
from store import runs, usage
from store.database import Store
from store.limit_counters import BucketName, Counters, counters_of

_BUCKETS: dict[LimitName, BucketName] = {
    "requests_per_second": "requests",
    "training_tokens_per_second": "training",
    "sampling_tokens_per_second": "sampling",
}
_BURST_OF = {rate: burst for burst, rate in BURSTS.items()}


@dataclass(frozen=True, slots=True)
class LimitState:
    """One limit. `value` None: expressly none. `burst`: what the bucket of a rate holds. `used` and `remaining`: for a
    rate, out of the bucket now; for a budget, with what unfinished requests may use; None where nothing is counted.
    `held`: operations that wait for a place."""

    name: LimitName
    value: float | None
    source: Source
    set_at: datetime | None = None
    burst: float | None = None
    used: float | None = None
    remaining: float | None = None
    held: int | None = None


class LimitReport:
    """Reads limits and their use.

    Args:
        max_rank: the largest LoRA rank that the server takes of anybody.
        clock: the time, aware UTC.
    """

    def __init__(self, store: Store, limits: TenantLimits, max_rank: int, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._limits = limits
        self._max_rank = max_rank
        self._clock = clock

    async def of_key(self, key_id: str) -> tuple[Effective, list[LimitState]]:
        """What applies to a key: its own limits and those of its project. Raises `NotFound`."""
        effective = await self._limits.of_key(key_id)
        return effective, await self._states(effective)

    async def of_project(self, project_id: str) -> tuple[Effective, list[LimitState]]:
        """What applies to a project. Raises `NotFound`."""
        effective = await self._limits.of_project(project_id)
        return effective, await self._states(effective)

    async def _states(self, effective: Effective) -> list[LimitState]:
        async def read(db: AsyncSession) -> list[LimitState]:
            states: list[LimitState] = []
            for scope in effective.scopes:
                counters = await counters_of(db, scope.subject)
                states += [LimitState(name, None, scope.whose, scope.set_at.get(name)) for name in scope.lifted]
                for name in scope.values:
                    if name not in BURSTS:
                        states.append(await self._state(db, effective, scope, counters, name))
            return states

        states = await self._store.read(read)
        if not any(state.name == "lora_rank" and state.value is not None for state in states):
            states.append(LimitState("lora_rank", float(self._max_rank), "server"))
        return sorted(states, key=lambda state: (LIMIT_NAMES.index(state.name), state.source))

    async def _state(
        self, db: AsyncSession, effective: Effective, scope: Scope, counters: Counters, name: LimitName
    ) -> LimitState:
        value, source, set_at = scope.values[name], scope.sources[name], scope.set_at.get(name)
        bucket = _BUCKETS.get(name)
        if bucket is not None:
            rate = scope.rate(name, _BURST_OF[name])
            assert rate is not None  # the name is among the values
            left = min(rate[1], max(0.0, counters.available(bucket, self._clock().timestamp(), *rate)))
            return LimitState(name, value, source, set_at, rate[1], rate[1] - left, left)
        keys = effective.counted(scope)
        used: float
        if name == "unfinished_operations":
            used = counters.operations
            return LimitState(name, value, source, set_at, None, used, max(0.0, value - used), counters.held)
        if name == "live_runs":
            used = await runs.count_live(db, effective.project_id, keys)
        elif name == "checkpoint_bytes":
            used = await usage.stored_bytes(db, effective.project_id, keys)
        elif name == "training_token_budget":
            used = counters.training_used + counters.training_reserved
        elif name == "sampling_token_budget":
            used = counters.sampling_used + counters.sampling_reserved
        else:
            return LimitState(name, value, source, set_at)
        return LimitState(name, value, source, set_at, None, used, max(0.0, value - used))
