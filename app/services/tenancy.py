"""Projects, users, and what users are in projects: what the operator of a server manages.

Not responsible for keys (`project_keys.py`), nor for who is an operator (`app/permissions.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from app.principal import Principal
from app.services.project_keys import keeping_a_key, require_project
from app.services.runs import Runs
from schemas.errors import InvalidRequest, NotFound
from schemas.roles import Role
from store import members, projects
from store.database import Store
from store.dev_key import DEV_PROJECT
from store.projects import ListedProject
from store.records import MemberRecord, ProjectRecord, UserRecord

ARCHIVED = "the project was archived"


@dataclass(frozen=True, slots=True)
class ListedUser:
    """A user, and what it is in which project."""

    user: UserRecord
    memberships: list[MemberRecord]


class Tenancy:
    """Projects and users of the server. `clock` is the time, aware UTC."""

    def __init__(self, store: Store, runs: Runs, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._runs = runs
        self._clock = clock

    async def projects(self) -> list[ListedProject]:
        """Every project, archived ones included, by name."""
        return await self._store.read(projects.list_projects)

    async def project(self, project_id: str) -> ListedProject:
        """One project. Raises `NotFound`."""
        return await self._store.read(lambda db: _listed(db, project_id))

    async def create_project(self, who: Principal, name: str) -> ProjectRecord:
        """Add a project. Raises `AlreadyExists`."""
        now = self._clock()
        return await self._store.write(lambda db: projects.create_project(db, name, now, by=who.key_id))

    async def archive_project(self, who: Principal, project_id: str, *, force: bool = False) -> None:
        """Let nobody into a project any more, and end its sessions. What it has stays, and goes on being counted.

        Raises:
            NotFound: there is no such project.
            InvalidRequest: it is the project of the development key, or has the only key of an operator; or it has live
                runs, and `force` is not given.
        """
        now = self._clock()

        async def rows(db: AsyncSession) -> list[str]:
            found = await _listed(db, project_id)
            if found.project.name == DEV_PROJECT:
                raise InvalidRequest("the project of the development key cannot be archived", field="project_id")
            if found.live_runs and not force:
                raise InvalidRequest(
                    f"{found.live_runs} training runs of the project {found.project.name!r} are live",
                    field="project_id",
                    hint="wait until their sessions are over, or archive it with force: they end then, but for their "
                    "checkpoints",
                    code="project_in_use",
                )
            async with keeping_a_key(db, project_id, now, force=True):
                await projects.archive_project(db, project_id, now, by=who.key_id)
            return await projects.active_sessions(db, project_id)

        for session_id in await self._store.write(rows):
            await self._runs.finish_session(project_id, session_id, "interrupted", ARCHIVED, by=who.key_id)

    async def members(self, project_id: str) -> list[MemberRecord]:
        """Who belongs to a project, by name. Raises `NotFound` if there is no such project."""

        async def rows(db: AsyncSession) -> list[MemberRecord]:
            await require_project(db, project_id)
            return await members.list_members(db, project_id)

        return await self._store.read(rows)

    async def set_member(
        self, who: Principal, project_id: str, user_id: str, role: Role, *, force: bool = False
    ) -> MemberRecord:
        """Make a user this in a project; the user's keys there can do no more from then on.

        Raises:
            NotFound: there is no such project or user.
            InvalidRequest: nobody could manage the project's keys any more, and `force` is not given.
        """
        now = self._clock()

        async def rows(db: AsyncSession) -> MemberRecord:
            await require_project(db, project_id)
            if await members.get_user(db, user_id) is None:
                raise _no_user(user_id)
            async with keeping_a_key(db, project_id, now, force=force):
                return await members.set_member(db, project_id, user_id, role, now, by=who.key_id)

        return await self._store.write(rows)

    async def remove_member(self, who: Principal, project_id: str, user_id: str, *, force: bool = False) -> None:
        """Take a user out of a project, and revoke the user's keys there. Raises as `set_member`."""
        now = self._clock()

        async def rows(db: AsyncSession) -> None:
            await require_project(db, project_id)
            async with keeping_a_key(db, project_id, now, force=force):
                if not await members.remove_member(db, project_id, user_id, now, by=who.key_id):
                    raise NotFound(f"there is no member {user_id[:200]!r} in this project", field="user_id")

        await self._store.write(rows)

    async def users(self) -> list[ListedUser]:
        """Every user, by name."""

        async def rows(db: AsyncSession) -> list[ListedUser]:
            found = await members.list_users(db)
            return [ListedUser(user, await members.projects_of(db, user.user_id)) for user in found]

        return await self._store.read(rows)

    async def create_user(self, who: Principal, name: str) -> UserRecord:
        """Add a user, who is nothing in any project yet. Raises `AlreadyExists`."""
        now = self._clock()
        return await self._store.write(lambda db: members.create_user(db, name, who.project_id, now, by=who.key_id))

    async def delete_user(self, who: Principal, user_id: str, *, force: bool = False) -> None:
        """End a user, and every key that the user has. Raises as `set_member`, for each of the user's projects."""
        now = self._clock()

        async def rows(db: AsyncSession) -> None:
            user = await members.get_user(db, user_id)
            if user is None:
                raise _no_user(user_id)
            for member in await members.projects_of(db, user_id):
                async with keeping_a_key(db, member.project_id, now, force=force):
                    await members.remove_member(db, member.project_id, user_id, now, by=who.key_id)
            await members.delete_user(db, user_id, who.project_id, now, by=who.key_id)

        await self._store.write(rows)


async def _listed(db: AsyncSession, project_id: str) -> ListedProject:
    found = await projects.list_project(db, project_id)
    if found is None:
        raise NotFound(f"there is no project {project_id[:200]!r}", field="project_id")
    return found


def _no_user(user_id: str) -> NotFound:
    return NotFound(f"there is no user {user_id[:200]!r}", field="user_id")
