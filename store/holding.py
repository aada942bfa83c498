"""What a write looks at stays true until its commit.

On SQLite nobody else writes, so looking is enough. On PostgreSQL another server may change the row between the look and
the commit: rows that a decision rests on are locked, and so is what is counted. Reads lock nothing. Locks are taken by
every place that decides something about a row that it does not itself insert; natural keys are left to their unique
constraints (the loser runs again and finds the row). Not responsible for what is decided.
"""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncSession

WRITING = "writing"
"""In `AsyncSession.info` while a write runs."""

S = TypeVar("S", bound=Select[Any])


def held(db: AsyncSession, statement: S) -> S:
    """The same look-up; within a write, nobody changes the rows before the commit (others may look)."""
    return statement.with_for_update(read=True) if WRITING in db.info else statement


def held_alone(db: AsyncSession, statement: S) -> S:
    """The same look-up; within a write, whoever else wants to hold or change the rows waits for the commit."""
    return statement.with_for_update(key_share=True) if WRITING in db.info else statement


def may_meet_others(db: AsyncSession) -> bool:
    """Whether other servers may write to the database."""
    return db.get_bind().dialect.name == "postgresql"


async def in_turn(db: AsyncSession, name: str) -> None:
    """Within a write: everybody who calls this with the same name comes one after the other, commits included.

    What is numbered without holes, or counted against a limit, is numbered and counted behind this.
    """
    if WRITING in db.info and may_meet_others(db):
        await db.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(name, 0))))
