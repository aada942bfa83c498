"""Users, and what they are in projects. Not responsible for keys (`keys.py`) nor for who may change what."""

from __future__ import annotations

import secrets
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import AlreadyExists
from schemas.roles import Role
from store.events import add_event
from store.holding import held_alone
from store.keys import revoke_key
from store.records import MemberRecord, UserRecord
from store.tables import ApiKey, Membership, User


async def create_user(db: AsyncSession, name: str, project_id: str, now: datetime, *, by: str | None) -> UserRecord:
    """Add a user. The line of the audit log goes to `project_id`, the operator's.

    Raises:
        AlreadyExists: a user has this name, or had it: names in the audit log stay clear.
    """
    known = await db.scalar(select(User).where(User.name == name))
    if known is not None:
        gone = "" if known.deleted_at is None else ", who was deleted"
        raise AlreadyExists(f"there is a user {name!r} already{gone}", field="name", hint="choose another name")
    row = User(user_id=secrets.token_hex(16), name=name, created_at=now)
    db.add(row)
    await db.flush()
    await add_event(db, project_id, "user_created", now, {"user_id": row.user_id, "name": name, "key_id": by})
    return _user(row)


async def list_users(db: AsyncSession) -> list[UserRecord]:
    """Every user who was not deleted, by name."""
    return [_user(row) for row in await db.scalars(select(User).where(User.deleted_at.is_(None)).order_by(User.name))]


async def get_user(db: AsyncSession, user_id: str) -> UserRecord | None:
    """The user, unless there is none or it was deleted."""
    row = await db.scalar(held_alone(db, select(User).where(User.user_id == user_id)))
    return None if row is None or row.deleted_at is not None else _user(row)


async def delete_user(db: AsyncSession, user_id: str, project_id: str, now: datetime, *, by: str | None) -> bool:
    """End a user: memberships and keys too. False if there is none. The line of the audit log goes to `project_id`."""
    user = await get_user(db, user_id)
    if user is None:
        return False
    for member in await projects_of(db, user_id):
        await remove_member(db, member.project_id, user_id, now, by=by)
    row = await db.get_one(User, user_id)
    row.deleted_at = now
    await db.flush()
    await add_event(db, project_id, "user_deleted", now, {"user_id": user_id, "name": user.name, "key_id": by})
    return True


async def list_members(db: AsyncSession, project_id: str) -> list[MemberRecord]:
    """Who belongs to a project, by name."""
    found = select(Membership, User).join(User, User.user_id == Membership.user_id)
    rows = await db.execute(found.where(Membership.project_id == project_id).order_by(User.name))
    return [_member(member, user) for member, user in rows]


async def projects_of(db: AsyncSession, user_id: str) -> list[MemberRecord]:
    """What a user is in which project."""
    found = select(Membership, User).join(User, User.user_id == Membership.user_id)
    rows = await db.execute(found.where(Membership.user_id == user_id).order_by(Membership.project_id))
    return [_member(member, user) for member, user in rows]


async def get_member(db: AsyncSession, project_id: str, user_id: str) -> MemberRecord | None:
    """What a user is in a project; None if the user does not belong to it. Within a write that stays so."""
    found = select(Membership).where(Membership.project_id == project_id, Membership.user_id == user_id)
    row = await db.scalar(held_alone(db, found))
    return None if row is None else _member(row, await db.get_one(User, user_id))


async def set_member(
    db: AsyncSession, project_id: str, user_id: str, role: Role, now: datetime, *, by: str | None
) -> MemberRecord:
    """Make an existing user this in a project. The user's keys there can do no more than that from now on."""
    found = select(Membership).where(Membership.project_id == project_id, Membership.user_id == user_id)
    row = await db.scalar(held_alone(db, found))
    user = await db.get_one(User, user_id)
    about = {"user_id": user_id, "name": user.name, "role": role, "key_id": by}
    if row is None:
        row = Membership(user_id=user_id, project_id=project_id, role=role, created_at=now)
        db.add(row)
        await db.flush()
        await add_event(db, project_id, "member_added", now, about)
    elif row.role != role:
        before, row.role = row.role, role
        await db.flush()
        await add_event(db, project_id, "member_changed", now, {**about, "role_before": before})
    return _member(row, user)


async def remove_member(db: AsyncSession, project_id: str, user_id: str, now: datetime, *, by: str | None) -> bool:
    """Take a user out of a project, and revoke the user's keys there. False if the user was not in it."""
    member = await get_member(db, project_id, user_id)
    if member is None:
        return False
    theirs = select(ApiKey.key_id).where(ApiKey.project_id == project_id, ApiKey.user_id == user_id)
    for key_id in list(await db.scalars(theirs.where(ApiKey.revoked_at.is_(None)))):
        await revoke_key(db, project_id, key_id, now, by=by)
    await db.delete(await db.get_one(Membership, (user_id, project_id)))
    await db.flush()
    about = {"user_id": user_id, "name": member.user.name, "role": member.role, "key_id": by}
    await add_event(db, project_id, "member_removed", now, about)
    return True


def _user(row: User) -> UserRecord:
    return UserRecord(row.user_id, row.name, row.created_at)


def _member(row: Membership, user: User) -> MemberRecord:
    return MemberRecord(_user(user), row.project_id, row.role, row.created_at)
