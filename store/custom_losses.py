"""Uploaded losses: the graph of each, under its id. Not responsible for what a graph may hold."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.holding import in_turn
from store.tables import CustomLoss, Session
from store.timeline import scopes_of

ROW_BYTES = 512
"""What a loss takes beside its graph, about: a row, its keys in the indices, and its line in the operation log."""


async def add_custom_loss(
    db: AsyncSession, *, loss_id: str, project_id: str, session_id: str, name: str, graph: str, now: datetime
) -> None:
    """Keep a loss. Its id is new: a repeated request is recognised by the operation log before it comes here."""
    row = CustomLoss(
        loss_id=loss_id,
        project_id=project_id,
        session_id=session_id,
        name=name,
        graph=graph,
        created_at=now,
        size_bytes=size_of(graph),
    )
    db.add(row)
    await db.flush()


async def get_graph(db: AsyncSession, project_id: str, loss_id: str) -> str | None:
    """The graph (JSON text) of a loss, or None if there is no such loss or it belongs to another project."""
    row = await db.get(CustomLoss, loss_id)
    return row.graph if row is not None and row.project_id == project_id else None


def size_of(graph: str) -> int:
    """The bytes that a loss with this graph counts for."""
    return len(graph.encode()) + ROW_BYTES


async def count_losses(db: AsyncSession, project_id: str, session_id: str) -> tuple[int, int]:
    """How many losses a session has, and the bytes of all of its project's. Within a write nobody adds one to the
    project until its commit."""
    await in_turn(db, f"losses {project_id}")
    of_session = select(func.count()).select_from(CustomLoss).where(CustomLoss.session_id == session_id)
    of_project = select(func.sum(CustomLoss.size_bytes)).where(CustomLoss.project_id == project_id)
    return await db.scalar(of_session) or 0, int(await db.scalar(of_project) or 0)


async def forget_losses(db: AsyncSession, before: datetime, *, sessions: int = 20, losses: int = 200) -> int:
    """Delete losses of sessions that ended before, once the operation log has no line of those any more.

    Batches in the log hold the graph themselves, so no line needs a loss to be executed again. At most `losses`, of
    `sessions` sessions, so that no other write waits long; the next sweep takes the rest.

    Returns:
        The number of losses that are gone.
    """
    has_losses = exists().where(CustomLoss.session_id == Session.session_id)
    has_lines = exists().where(scopes_of(Session.session_id.expression))
    over = select(Session.session_id).where(Session.ended_at < before, has_losses, ~has_lines).limit(sessions)
    ended = (await db.scalars(over)).all()
    chosen = select(CustomLoss.loss_id).where(CustomLoss.session_id.in_(ended)).limit(losses)
    dropped = await db.execute(delete(CustomLoss).where(CustomLoss.loss_id.in_(chosen)).returning(CustomLoss.loss_id))
    return len(dropped.all())
