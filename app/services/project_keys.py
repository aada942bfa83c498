"""Keys of projects: made, rotated, revoked, by whoever may give what they give.

A key can make, replace and end only keys that can do no more than itself, and last no longer. Not responsible for who
may ask at all (`app/permissions.py`), nor for how keys are kept (`store/keys.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from app.permissions import held
from app.principal import Principal
from schemas.errors import Forbidden, InvalidRequest, NotFound
from schemas.roles import ROLES, Permission, Role
from store import keys
from store.database import Store
from store.dev_key import DEV_KEY_NAME, DEV_PROJECT
from store.holding import in_turn
from store.members import get_member
from store.records import KeyRecord, ProjectRecord


@dataclass(frozen=True, slots=True)
class NewKey:
    """What somebody wants a key to be.

    `scopes` None = not narrowed; `lifetime` None = until it is revoked, or until the end of the key that makes it.
    """

    name: str
    role: Role
    scopes: tuple[Permission, ...] | None
    user_id: str | None
    lifetime: timedelta | None


class ProjectKeys:
    """Keys of all projects; every method is told whose, and who asks. `clock` is the time, aware UTC."""

    def __init__(self, store: Store, clock: Callable[[], datetime]) -> None:
        self._store = store
        self._clock = clock

    async def listed(self, project_id: str) -> list[KeyRecord]:
        """All keys of a project, those that are over included, oldest first. Raises `NotFound`: no such project."""

        async def rows(db: AsyncSession) -> list[KeyRecord]:
            await require_project(db, project_id)
            return await keys.list_keys(db, project_id)

        return await self._store.read(rows)

    async def create(self, who: Principal, project_id: str, wanted: NewKey) -> tuple[KeyRecord, str]:
        """Make a key; returns it and its text, which cannot be had again.

        Raises:
            NotFound: there is no such project, or no such member in it.
            InvalidRequest: the project is archived; a scope is not of the role; the role is more than that of the user;
                it would outlive the key that makes it.
            Forbidden: it could do something that the key that makes it cannot.
        """
        now = self._clock()
        ends = who.ends if wanted.lifetime is None else now + wanted.lifetime

        async def rows(db: AsyncSession) -> tuple[KeyRecord, str]:
            await _require_open(db, project_id, wanted.name, field="name")
            _check_scopes(wanted)
            _require_no_more(who, wanted.role, wanted.scopes, field="role")
            _require_no_longer(who, ends)
            if wanted.user_id is not None:
                await _check_member(db, project_id, wanted.user_id, wanted.role)
            key_id, plaintext = await keys.create_key(
                db,
                project_id,
                wanted.name,
                role=wanted.role,
                scopes=wanted.scopes,
                user_id=wanted.user_id,
                expires_at=ends,
                now=now,
                by=who.key_id,
            )
            return await _require_key(db, project_id, key_id), plaintext

        return await self._store.write(rows)

    async def rotate(
        self, who: Principal, project_id: str, key_id: str, overlap: timedelta, lifetime: timedelta | None
    ) -> tuple[KeyRecord, str]:
        """Make a key with the rights of another one, which ends after `overlap`; returns the new one and its text.

        Without `lifetime` it lasts as long as the old one would have.

        Raises:
            NotFound: the project has no such key.
            InvalidRequest: the key is over, was rotated before, or is the development key; or the new one would outlive
                the key that asks.
            Forbidden: the key can do something that the key that asks cannot.
        """
        now = self._clock()

        async def rows(db: AsyncSession) -> tuple[KeyRecord, str]:
            old = await _require_key(db, project_id, key_id)
            await _require_open(db, project_id, old.name, field="key_id")
            _require_no_more(who, old.role, old.scopes, field="key_id")
            if await keys.valid_key(db, key_id, now=now) is None:
                raise InvalidRequest(
                    "the key is over; there is nothing to rotate", field="key_id", hint="make a new one"
                )
            if old.replaced_by is not None:
                raise InvalidRequest(
                    f"the key was rotated before: {old.replaced_by} took its place",
                    field="key_id",
                    hint="rotate that one, if nobody has it",
                )
            ends = old.expires_at if lifetime is None else now + lifetime
            _require_no_longer(who, ends)
            made = await keys.rotate_key(
                db, project_id, key_id, until=now + overlap, expires_at=ends, now=now, by=who.key_id
            )
            if made is None:
                raise no_key(key_id)
            return await _require_key(db, project_id, made[0]), made[1]

        return await self._store.write(rows)

    async def revoke(self, who: Principal, project_id: str, key_id: str, *, force: bool = False) -> None:
        """End a key at once; ending it again changes nothing.

        Raises:
            NotFound: the project has no such key.
            Forbidden: the key can do something that the key that asks cannot.
            InvalidRequest: nobody could manage the project's keys, or the server, without it, and `force` is not given.
        """
        now = self._clock()

        async def rows(db: AsyncSession) -> None:
            key = await _require_key(db, project_id, key_id)
            if key_id != who.key_id:
                _require_no_more(who, key.role, key.scopes, field="key_id")
            async with keeping_a_key(db, project_id, now, force=force):
                await keys.revoke_key(db, project_id, key_id, now, by=who.key_id)

        await self._store.write(rows)


@asynccontextmanager
async def keeping_a_key(db: AsyncSession, project_id: str, now: datetime, *, force: bool) -> AsyncIterator[None]:
    """What happens inside must leave a key that may manage the project's keys, and one that may manage the server, if
    there were such; else it is undone. With `force` only the server's is asked for.

    Raises:
        InvalidRequest: it does not.
    """
    await in_turn(db, "keys")
    project, server = await _holders(db, now, "keys", project_id), await _holders(db, now, "admin", None)
    yield
    if server and not await _holders(db, now, "admin", None):
        raise InvalidRequest(
            "this would end the last key of role admin: nobody could administer the server any more",
            hint="make another one first",
            code="last_key",
        )
    if project and not force and not await _holders(db, now, "keys", project_id):
        raise InvalidRequest(
            "this would end the last key that may manage the keys of its project",
            hint="make another one of role owner first, or repeat it with force",
            code="last_key",
        )


async def require_project(db: AsyncSession, project_id: str) -> ProjectRecord:
    """The project. Raises `NotFound` if there is none."""
    project = await keys.get_project(db, project_id)
    if project is None:
        raise NotFound(f"there is no project {project_id[:200]!r}", field="project_id")
    return project


def no_key(key_id: str) -> NotFound:
    """A project has no such key: it does not exist, or is another project's."""
    return NotFound(f"there is no key {key_id[:200]!r}", field="key_id")


async def _holders(db: AsyncSession, now: datetime, permission: Permission, project_id: str | None) -> bool:
    found = await keys.lasting_keys(db, now, project_id=project_id)
    return any(permission in held(key.role, key.scopes) for key in found)


async def _require_open(db: AsyncSession, project_id: str, name: str, *, field: str) -> None:
    project = await require_project(db, project_id)
    if project.archived_at is not None:
        raise InvalidRequest(f"the project {project.name!r} is archived; nobody gets in", field="project_id")
    if name == DEV_KEY_NAME and project.name == DEV_PROJECT:
        raise InvalidRequest(
            f"{name!r} is the development key here, which the server itself looks after",
            field=field,
            hint="choose another name; for a new development key, delete the file dev_key of the data folder and start "
            "the server again",
        )


async def _require_key(db: AsyncSession, project_id: str, key_id: str) -> KeyRecord:
    key = await keys.get_key(db, project_id, key_id)
    if key is None:
        raise no_key(key_id)
    return key


def _check_scopes(wanted: NewKey) -> None:
    allowed = held(wanted.role)
    beyond = [scope for scope in wanted.scopes or () if scope not in allowed]
    if beyond:
        raise InvalidRequest(
            f"the role {wanted.role} does not have the permission {beyond[0]}; it has {', '.join(sorted(allowed))}",
            field="scopes",
        )


async def _check_member(db: AsyncSession, project_id: str, user_id: str, role: Role) -> None:
    member = await get_member(db, project_id, user_id)
    if member is None:
        raise NotFound(f"there is no member {user_id[:200]!r} in this project", field="user_id")
    if not _at_most(role, member.role):
        raise InvalidRequest(f"the user is {member.role} in this project; a key can be no more", field="role")


def _require_no_more(who: Principal, role: str, scopes: tuple[str, ...] | None, *, field: str) -> None:
    beyond = held(role, scopes) - who.permissions
    if beyond or not _at_most(role, who.role):
        what = f"has the permission {min(beyond)}" if beyond else f"has the role {role}"
        raise Forbidden(f"that key {what}, which your own has not", field=field, hint="ask with a key that has it")


def _require_no_longer(who: Principal, ends: datetime | None) -> None:
    if who.ends is not None and (ends is None or ends > who.ends):
        raise InvalidRequest(
            f"your own key ends at {who.ends.isoformat(timespec='seconds')}; a key that it makes cannot outlive it",
            field="expires_in",
        )


def _at_most(role: str, most: str) -> bool:
    return role in ROLES and most in ROLES and ROLES.index(role) <= ROLES.index(most)
