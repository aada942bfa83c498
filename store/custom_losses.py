"""Uploaded losses: the graph of each, under its id. Not responsible for what a graph may hold."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from store.holding import in_turn
from store.tables import CustomLoss


async def add_custom_loss(
    db: AsyncSession, *, loss_id: str, project_id: str, session_id: str, name: str, graph: str, now: datetime
) -> None:
    """Keep a loss. Its id is new: a repeated request is recognised by the operation log before it comes here."""
    row = CustomLoss(
        loss_id=loss_id, project_id=project_id, session_id=session_id, name=name, graph=graph, created_at=now
    )
    db.add(row)
    await db.flush()


async def get_graph(db: AsyncSession, project_id: str, loss_id: str) -> str | None:
    """The graph (JSON text) of a loss, or None if there is no such loss or it belongs to another project."""
    row = await db.get(CustomLoss, loss_id)
    return row.graph if row is not None and row.project_id == project_id else None


async def count_losses(db: AsyncSession, session_id: str) -> int:
    """How many losses a session has. Within a write nobody adds one until its commit."""
    await in_turn(db, f"losses {session_id}")
    wanted = select(func.count()).select_from(CustomLoss).where(CustomLoss.session_id == session_id)
    return await db.scalar(wanted) or 0
