"""When the operations of a session happened, read back from the operation log. Not responsible for showing it."""

from __future__ import annotations

from typing import cast

from sqlalchemy import ColumnElement, and_, func, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.records import OperationState, TimelineRecord
from store.tables import Operation, Session


async def session_exists(db: AsyncSession, session_id: str) -> bool:
    """Whether any project has this session: only for who has been given its id by its owner (a signed address)."""
    return await db.get(Session, session_id) is not None


async def count_operations(db: AsyncSession, session_id: str) -> int:
    """How many operations the models and samplers of a session have."""
    return await db.scalar(select(func.count()).select_from(Operation).where(_of_session(session_id))) or 0


async def session_timeline(db: AsyncSession, session_id: str) -> list[TimelineRecord]:
    """Every operation of a session, those that create its models included, in the order of their acceptance.

    The caller has checked whose session it is.
    """
    columns = (
        Operation.request_id,
        Operation.kind,
        Operation.scope,
        Operation.seq_id,
        Operation.state,
        Operation.error["code"].as_string().label("error_code"),
        Operation.created_at,
        Operation.started_at,
        Operation.finished_at,
        Operation.delivered_at,
    )
    order = (Operation.created_at, Operation.scope, Operation.seq_id)
    rows = await db.execute(select(*columns).where(_of_session(session_id)).order_by(*order))
    return [
        TimelineRecord(
            request_id=row.request_id,
            kind=row.kind,
            scope=row.scope,
            seq_id=row.seq_id,
            state=cast(OperationState, row.state),
            error_code=row.error_code,
            created_at=row.created_at,
            started_at=row.started_at,
            finished_at=row.finished_at,
            delivered_at=row.delivered_at,
        )
        for row in rows
    ]


def _of_session(session_id: str) -> ColumnElement[bool]:
    return and_(scopes_of(literal(session_id)), Operation.state != "refused")


def scopes_of(session_id: ColumnElement[str]) -> ColumnElement[bool]:
    """The scopes of a session. Ranges and not LIKE: they use the index, and no character means anything else."""
    begins = [literal(kind) + session_id for kind in ("model:", "sampler:", "session:")]
    return or_(*(and_(Operation.scope >= begin + ":", Operation.scope < begin + ";") for begin in begins))
