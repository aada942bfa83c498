"""Limits as rows: which values were set for which project or key. Not responsible for what they mean
(`app/services/tenant_limits.py`) or for what is counted (`store/limit_counters.py`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import cast

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.limits import LimitName
from store.tables import ApiKey, Limit


@dataclass(frozen=True, slots=True)
class SetLimit:
    """A limit that was set. `value` None: expressly none."""

    value: float | None
    set_at: datetime


def project_subject(project_id: str) -> str:
    """Whose limits those of a project are."""
    return f"project:{project_id}"


def key_subject(key_id: str) -> str:
    """Whose limits those of a key are."""
    return f"key:{key_id}"


async def limits_of(db: AsyncSession, subjects: Collection[str]) -> dict[str, dict[LimitName, SetLimit]]:
    """What was set for each of these subjects; one without limits is left out."""
    found: dict[str, dict[LimitName, SetLimit]] = {}
    for row in await db.scalars(select(Limit).where(Limit.subject.in_(list(subjects)))):
        found.setdefault(row.subject, {})[cast(LimitName, row.name)] = SetLimit(row.value, row.set_at)
    return found


async def set_limits(db: AsyncSession, subject: str, values: Mapping[LimitName, float | None], now: datetime) -> None:
    """Set these limits of a subject, and leave its others as they are."""
    for name, value in values.items():
        await db.merge(Limit(subject=subject, name=name, value=value, set_at=now))
    await db.flush()


async def clear_limits(db: AsyncSession, subject: str, names: Collection[LimitName] | None) -> None:
    """Forget these limits of a subject, or all of them."""
    wanted = [Limit.subject == subject]
    if names is not None:
        wanted.append(Limit.name.in_(list(names)))
    await db.execute(delete(Limit).where(*wanted))


async def rotated_keys(db: AsyncSession, key_id: str) -> tuple[str, list[str]]:
    """Keys that were rotated into one another are one key to limits: (the first of them, all of them)."""
    rows = await db.execute(select(ApiKey.key_id, ApiKey.replaced_by).where(ApiKey.replaced_by.is_not(None)))
    after = {row.key_id: row.replaced_by for row in rows}
    before = {new: old for old, new in after.items()}
    first = key_id
    while first in before:
        first = before[first]
    found = [first]
    while found[-1] in after:
        found.append(after[found[-1]])
    return first, found


async def project_of_key(db: AsyncSession, key_id: str) -> str | None:
    """The project that a key belongs to; None if there is no such key."""
    row = await db.get(ApiKey, key_id)
    return None if row is None else row.project_id
