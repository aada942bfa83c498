"""Which limits apply to a request: those of its project, of its key, and what the server sets for every project.

A project's own value replaces the server's. A key's limits hold beside those of its project, so the narrower one
rules. What applies is remembered for a moment, so that projects without limits pay next to nothing. Not responsible for
counting (`limit_charges.py`) or for holding work back (`held.py`).
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from sqlalchemy.ext.asyncio import AsyncSession

from app.services.project_keys import require_project
from schemas.errors import InvalidRequest, NotFound, OverLimit
from schemas.limits import BURST_SECONDS, BURSTS, LimitName
from store import limits as rows
from store.database import Store
from store.events import add_event
from store.limit_counters import restart_budget
from store.limits import SetLimit, key_subject, project_subject

Source = Literal["key", "project", "server"]
CACHE_SECONDS = 2.0
CACHE_SIZE = 4096
_WHOSE: Mapping[Source, str] = {"key": "of this key", "project": "of this project", "server": "of every project"}


@dataclass(frozen=True, slots=True)
class Cost:
    """What an operation will take, as far as it is known before it runs.

    `training`: tokens of its datums. `longest`: tokens of the context that it needs. `prompt`, `sequences`, `most`: of
    a sample, its prompt, how many continuations, and how many tokens each may draw (None: not known). `rank`: of the
    adapter that it makes. `stores`: whether it makes a checkpoint.
    """

    training: int = 0
    longest: int = 0
    prompt: int = 0
    sequences: int = 0
    most: int | None = 0
    rank: int | None = None
    stores: bool = False


@dataclass(frozen=True, slots=True)
class Scope:
    """The limits of one subject. `set_at`: since when, of those that were set while the server ran. `lifted`: of which
    it is said that there are none."""

    subject: str
    whose: Literal["key", "project"]
    values: Mapping[LimitName, float]
    sources: Mapping[LimitName, Source]
    set_at: Mapping[LimitName, datetime]
    lifted: tuple[LimitName, ...] = ()

    def rate(self, name: LimitName, burst: LimitName) -> tuple[float, float] | None:
        """What flows into a bucket in a second, and what it holds; None = no limit."""
        rate = self.values.get(name)
        return None if rate is None else (rate, self.values.get(burst, max(1.0, rate * BURST_SECONDS)))

    def words(self, name: LimitName) -> str:
        """A limit for a message: its name, whose it is and its value."""
        value = self.values[name] if name in self.values else max(1.0, self.values[BURSTS[name]] * BURST_SECONDS)
        source = self.sources[name] if name in self.sources else self.sources[BURSTS[name]]
        return f"{name} {_WHOSE[source]} is {value:,.10g}"


@dataclass(frozen=True, slots=True)
class Effective:
    """All limits that apply to what one key asks for, by subject in the order of its name. `keys`: this one and those
    that it was rotated from or into, which count as one."""

    project_id: str
    key_id: str | None
    scopes: tuple[Scope, ...]
    keys: tuple[str, ...] = ()

    def counted(self, scope: Scope) -> tuple[str, ...] | None:
        """By which keys the things of a scope were made; None: by any."""
        return self.keys if scope.whose == "key" else None

    def narrowest(self, name: LimitName) -> Scope | None:
        """Whose value of a limit is the smallest; None = there is none."""
        limited = [scope for scope in self.scopes if name in scope.values]
        return min(limited, key=lambda scope: scope.values[name], default=None)


class TenantLimits:
    """Limits of all projects and keys.

    Args:
        defaults: for every project that has no value of its own.
        clock: the time, aware UTC.
        monotonic: seconds, for what is remembered.
    """

    def __init__(
        self,
        store: Store,
        defaults: Mapping[LimitName, float],
        clock: Callable[[], datetime],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._defaults = dict(defaults)
        self._clock = clock
        self._monotonic = monotonic
        self._known: OrderedDict[tuple[str, str | None], tuple[float, Effective | None]] = OrderedDict()

    async def effective(self, project_id: str, key_id: str | None) -> Effective | None:
        """What applies to a request of this project with this key (None: only what applies to the project); None if
        nothing does. At most `CACHE_SECONDS` old."""
        known = self._known.get((project_id, key_id))
        if known is not None and known[0] > self._monotonic():
            return known[1]
        found = await self._read(project_id, key_id)
        scopes = tuple(scope for scope in found.scopes if scope.values)
        applies = replace(found, scopes=scopes) if scopes else None
        self._known[project_id, key_id] = (self._monotonic() + CACHE_SECONDS, applies)
        self._known.move_to_end((project_id, key_id))
        while len(self._known) > CACHE_SIZE:
            self._known.popitem(last=False)
        return applies

    async def context_length(self, project_id: str, key_id: str | None) -> int | None:
        """The longest context that a request may use; None = no limit but the base model's."""
        effective = await self.effective(project_id, key_id)
        scope = None if effective is None else effective.narrowest("context_length")
        return None if scope is None else int(scope.values["context_length"])

    async def of_project(self, project_id: str) -> Effective:
        """What applies to a project, read now. Raises `NotFound`."""
        await self._store.read(lambda db: require_project(db, project_id))
        return await self._read(project_id, None)

    async def of_key(self, key_id: str) -> Effective:
        """What applies to what a key asks for, read now. Raises `NotFound`."""
        return await self._read(await self._project_of(key_id), key_id)

    async def set_for_project(self, project_id: str, values: Mapping[LimitName, float | None], *, by: str) -> None:
        """Set limits of a project; None = none, whatever the server's. Raises `NotFound`, `InvalidRequest`."""
        await self.of_project(project_id)
        await self._set(project_id, project_subject(project_id), {"project_id": project_id}, values, by)

    async def set_for_key(self, key_id: str, values: Mapping[LimitName, float | None], *, by: str) -> None:
        """Set limits of a key; None = none beside the project's. Raises `NotFound`, `InvalidRequest`."""
        subject = key_subject((await self._store.read(lambda db: rows.rotated_keys(db, key_id)))[0])
        await self._set(await self._project_of(key_id), subject, {"limited_key_id": key_id}, values, by)

    async def clear_for_project(self, project_id: str, names: Collection[LimitName] | None, *, by: str) -> None:
        """Let the server's values apply to a project again. Raises `NotFound`, `InvalidRequest`."""
        await self.of_project(project_id)
        await self._clear(project_id, project_subject(project_id), {"project_id": project_id}, names, by)

    async def clear_for_key(self, key_id: str, names: Collection[LimitName] | None, *, by: str) -> None:
        """Let only the project's limits apply to a key. Raises `NotFound`, `InvalidRequest`."""
        subject = key_subject((await self._store.read(lambda db: rows.rotated_keys(db, key_id)))[0])
        await self._clear(await self._project_of(key_id), subject, {"limited_key_id": key_id}, names, by)

    async def _project_of(self, key_id: str) -> str:
        project_id = await self._store.read(lambda db: rows.project_of_key(db, key_id))
        if project_id is None:
            raise NotFound(f"there is no key {key_id[:200]!r}", field="key_id")
        return project_id

    async def _set(
        self,
        project_id: str,
        subject: str,
        about: Mapping[str, str],
        values: Mapping[LimitName, float | None],
        by: str,
    ) -> None:
        now = self._clock()

        async def write(db: AsyncSession) -> None:
            await rows.clear_limits(db, subject, _bursts_of(name for name, value in values.items() if value is None))
            await rows.set_limits(db, subject, values, now)
            await self._check_bursts(db, subject)
            if values.get("training_token_budget") is not None:
                await restart_budget(db, subject, "training")
            if values.get("sampling_token_budget") is not None:
                await restart_budget(db, subject, "sampling")
            await self._note(db, project_id, subject, {**about, "set": dict(values), "key_id": by}, now)

        await self._store.write(write)
        self._known.clear()

    async def _clear(
        self,
        project_id: str,
        subject: str,
        about: Mapping[str, str],
        names: Collection[LimitName] | None,
        by: str,
    ) -> None:
        now = self._clock()

        async def write(db: AsyncSession) -> None:
            await rows.clear_limits(db, subject, None if names is None else [*names, *_bursts_of(names)])
            await self._check_bursts(db, subject)
            cleared = "all" if names is None else sorted(names)
            await self._note(db, project_id, subject, {**about, "cleared": cleared, "key_id": by}, now)

        await self._store.write(write)
        self._known.clear()

    async def _check_bursts(self, db: AsyncSession, subject: str) -> None:
        """Raise `InvalidRequest` if a subject has the size of a bucket without a rate: it would mean nothing."""
        found = (await rows.limits_of(db, [subject])).get(subject, {})
        server = self._defaults if subject.startswith("project:") else {}
        for burst, rate in BURSTS.items():
            has_rate = found[rate].value is not None if rate in found else rate in server
            if burst in found and found[burst].value is not None and not has_rate:
                raise InvalidRequest(f"{burst} means nothing without {rate}; set that too", field=burst)

    @staticmethod
    async def _note(db: AsyncSession, project_id: str, subject: str, details: Mapping[str, Any], now: datetime) -> None:
        of_key = subject.startswith("key:")
        await add_event(db, project_id, "key_limits_changed" if of_key else "project_limits_changed", now, details)

    async def _read(self, project_id: str, key_id: str | None) -> Effective:
        async def read(db: AsyncSession) -> tuple[list[str], list[str], dict[str, dict[LimitName, SetLimit]]]:
            first, keys = (None, []) if key_id is None else await rows.rotated_keys(db, key_id)
            subjects = [project_subject(project_id), *([] if first is None else [key_subject(first)])]
            return subjects, keys, await rows.limits_of(db, subjects)

        subjects, keys, found = await self._store.look_up(read)
        scopes = []
        for subject in sorted(subjects):
            defaults = self._defaults if subject == subjects[0] else {}
            scopes.append(_scope(subject, found.get(subject, {}), defaults))
        return Effective(project_id, key_id, tuple(scopes), tuple(keys))


def _bursts_of(rates: Iterable[LimitName]) -> list[LimitName]:
    """What buckets of these rates hold: it goes with its rate."""
    gone = set(rates)
    return [burst for burst, rate in BURSTS.items() if rate in gone]


def _scope(subject: str, found: Mapping[LimitName, SetLimit], defaults: Mapping[LimitName, float]) -> Scope:
    whose: Literal["key", "project"] = "key" if subject.startswith("key:") else "project"
    values, sources = dict(defaults), dict.fromkeys(defaults, "server")
    for name, limit in found.items():
        values.pop(name, None)
        if limit.value is not None:
            values[name], sources[name] = limit.value, whose
    for burst, rate in BURSTS.items():
        own_rate = rate in found
        if rate not in values or (own_rate and burst not in found):  # a bucket of the server's is for the server's rate
            values.pop(burst, None)
    return Scope(
        subject,
        whose,
        values,
        {name: sources[name] for name in values},  # type: ignore[misc]
        {name: limit.set_at for name, limit in found.items()},
        tuple(name for name, limit in found.items() if limit.value is None),
    )


def check_fits(effective: Effective, cost: Cost) -> None:
    """Raise `OverLimit` for what could never be taken, whatever else is under way."""
    if cost.rank is not None:
        _at_most(effective, "lora_rank", cost.rank, "the LoRA rank", "lora_config.rank")
    sample = cost.sequences > 0
    asked = "prompt and max_tokens together" if sample else "the longest datum"
    _at_most(effective, "context_length", cost.longest, asked, "prompt" if sample else "data", "tokens")
    for scope in effective.scopes:
        training = scope.rate("training_tokens_per_second", "training_tokens_burst")
        if training is not None and cost.training > training[1]:
            raise _larger_than_burst(scope, "training_tokens_burst", "data", cost.training, training[1])
        sampling, least = (
            scope.rate("sampling_tokens_per_second", "sampling_tokens_burst"),
            cost.prompt + cost.sequences,
        )
        if sampling is not None and least > sampling[1]:
            raise _larger_than_burst(scope, "sampling_tokens_burst", "prompt", least, sampling[1])


def _at_most(effective: Effective, name: LimitName, asked: int, what: str, field: str, unit: str = "") -> None:
    scope = effective.narrowest(name)
    if scope is not None and asked > scope.values[name]:
        amount = f"{asked} {unit}".rstrip()
        raise OverLimit(
            f"{what} would be {amount}; limit {scope.words(name)}, so at most that is accepted", field=field
        )


def _larger_than_burst(scope: Scope, name: LimitName, field: str, asked: int, burst: float) -> OverLimit:
    return OverLimit(
        f"this request has {asked} tokens, but limit {scope.words(name)}: it would never be let through; at most "
        f"{math.floor(burst)} tokens are accepted in one request",
        field=field,
        hint="send it in several requests" if field == "data" else "send a shorter prompt, or fewer samples at a time",
    )
