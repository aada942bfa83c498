"""Projects as their operator sees them: all of them, made and archived. Not responsible for who may do that."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import AlreadyExists
from store.events import add_event
from store.holding import held_alone
from store.keys import ensure_project, get_project
from store.records import ProjectRecord
from store.runs import LIVE
from store.tables import Project, Run, Session


@dataclass(frozen=True, slots=True)
class ListedProject:
    """A project, and how many of its runs take work."""

    project: ProjectRecord
    live_runs: int


async def create_project(db: AsyncSession, name: str, now: datetime, *, by: str | None) -> ProjectRecord:
    """Add a project.

    Raises:
        AlreadyExists: a project has this name; archived ones keep theirs.
    """
    known = await db.scalar(select(Project).where(Project.name == name))
    if known is not None:
        archived = "" if known.archived_at is None else ", which is archived"
        raise AlreadyExists(f"there is a project {name!r} already{archived}", field="name", hint="choose another name")
    project = await get_project(db, await ensure_project(db, name, now=now, by=by))
    assert project is not None
    return project


async def list_projects(db: AsyncSession) -> list[ListedProject]:
    """Every project, archived ones included, by name."""
    counted = select(Run.project_id, func.count()).where(Run.state.in_(LIVE)).group_by(Run.project_id)
    live = {row[0]: row[1] for row in await db.execute(counted)}
    rows = await db.scalars(select(Project).order_by(Project.name))
    return [ListedProject(_record(row), live.get(row.project_id, 0)) for row in rows]


async def list_project(db: AsyncSession, project_id: str) -> ListedProject | None:
    """One project; within a write it stays as it is."""
    row = await db.scalar(held_alone(db, select(Project).where(Project.project_id == project_id)))
    if row is None:
        return None
    live = select(func.count()).select_from(Run).where(Run.project_id == project_id, Run.state.in_(LIVE))
    return ListedProject(_record(row), await db.scalar(live) or 0)


async def archive_project(db: AsyncSession, project_id: str, now: datetime, *, by: str | None) -> None:
    """Let nobody into a project any more. What it has stays. Doing it again changes nothing."""
    row = await db.get_one(Project, project_id)
    if row.archived_at is None:
        row.archived_at = now
        await db.flush()
        await add_event(db, project_id, "project_archived", now, {"name": row.name, "key_id": by})


async def active_sessions(db: AsyncSession, project_id: str) -> list[str]:
    """The sessions of a project that take work, oldest first."""
    active = (Session.project_id == project_id, Session.state == "active")
    return list(await db.scalars(select(Session.session_id).where(*active).order_by(Session.created_at)))


def _record(row: Project) -> ProjectRecord:
    return ProjectRecord(row.project_id, row.name, row.created_at, row.archived_at)
