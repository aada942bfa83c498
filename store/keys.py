"""Projects and API keys. A key is shown once; what is kept lets nobody in.

`tml-` + 256 random bits (the SDK insists on the prefix), kept as HMAC-SHA256 under a pepper that is a file beside the
database, so that a copy of the database alone cannot even test guesses. A slow hash would buy nothing for random keys
and would be a way to overload the server. Not responsible for HTTP headers nor for who may make keys.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Row, and_, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import NotFound
from schemas.roles import Role, lesser
from store.events import add_event
from store.files import read_private, replace_private
from store.holding import held_alone
from store.records import KeyRecord, ProjectRecord
from store.tables import ApiKey, Membership, Project

PEPPER = "pepper"
"""Where `Store` leaves the pepper in `AsyncSession.info`."""

_log = logging.getLogger(__name__)
_KEY = re.compile(r"tml-[A-Za-z0-9_-]{43}")
_PREFIX_LENGTH = 12
_NOBODY = bytes(32)

Found = tuple[ApiKey, datetime | None, str | None]
"""A key, since when its project is archived, and what its user is there."""
_KEYS = (
    select(ApiKey, Project.archived_at, Membership.role)
    .join(Project, Project.project_id == ApiKey.project_id)
    .outerjoin(Membership, and_(Membership.user_id == ApiKey.user_id, Membership.project_id == ApiKey.project_id))
)


def load_pepper(data_dir: Path, *, expected: bool) -> bytes:
    """The 32 bytes of `data_dir/pepper`, made if missing. `expected`: keys were made before, so its loss is logged."""
    path = data_dir / "pepper"
    pepper = read_private(path)
    if pepper is not None and len(pepper) == 32:
        return pepper
    if expected:
        _log.warning("the file with the key pepper is missing or damaged: API keys made before do not work any more")
    pepper = secrets.token_bytes(32)
    replace_private(path, pepper)
    return pepper


async def ensure_project(db: AsyncSession, name: str, *, now: datetime | None = None, by: str | None = None) -> str:
    """The id of the project of this name, which is made if there is none. `by`: the key that asked, for the log."""
    known = await db.scalar(select(Project.project_id).where(Project.name == name))
    if known is not None:
        return known
    row = Project(project_id=secrets.token_hex(16), name=name, created_at=now or datetime.now(UTC))
    db.add(row)
    await db.flush()
    await add_event(db, row.project_id, "project_created", row.created_at, {"name": name, "key_id": by})
    return row.project_id


async def get_project(db: AsyncSession, project_id: str) -> ProjectRecord | None:
    """The project of this id."""
    row = await db.get(Project, project_id)
    return None if row is None else ProjectRecord(row.project_id, row.name, row.created_at, row.archived_at)


async def create_key(
    db: AsyncSession,
    project_id: str,
    name: str,
    *,
    role: Role = "member",
    scopes: Sequence[str] | None = None,
    user_id: str | None = None,
    expires_at: datetime | None = None,
    now: datetime | None = None,
    by: str | None = None,
) -> tuple[str, str]:
    """Make a key. Returns (key_id, plaintext); the plaintext cannot be had again.

    Args:
        scopes: permissions that it is narrowed to; None = all of its role.
        user_id: whose it is, a member of the project; None = a program's.
        by: id of the key that asked for it, for the audit log.

    Raises:
        NotFound: there is no such project.
    """
    if await db.get(Project, project_id) is None:
        raise NotFound(f"there is no project {project_id!r}", field="project_id")
    row, plaintext = _new_row(db, project_id, name, now or datetime.now(UTC))
    row.role, row.scopes, row.user_id, row.expires_at = role, _listed(scopes), user_id, expires_at
    db.add(row)
    await db.flush()
    details = {**_about(row), "created_key_id": row.key_id, "expires_at": _time(expires_at), "key_id": by}
    await add_event(db, project_id, "key_created", row.created_at, details)
    return row.key_id, plaintext


async def rotate_key(
    db: AsyncSession,
    project_id: str,
    key_id: str,
    *,
    until: datetime,
    expires_at: datetime | None,
    now: datetime,
    by: str | None = None,
) -> tuple[str, str] | None:
    """Make a key with the rights of another one, which ends `until` then, or sooner if it would have anyway.

    Returns (key_id, plaintext) of the new one; None if the project has no such key.
    """
    old = await db.scalar(held_alone(db, select(ApiKey).where(ApiKey.key_id == key_id)))
    if old is None or old.project_id != project_id:
        return None
    row, plaintext = _new_row(db, project_id, old.name, now)
    row.role, row.scopes, row.user_id, row.expires_at = old.role, old.scopes, old.user_id, expires_at
    db.add(row)
    old.replaced_by = row.key_id
    old.expires_at = until if old.expires_at is None else min(until, old.expires_at)
    await db.flush()
    details = {
        **_about(row),
        "rotated_key_id": key_id,
        "created_key_id": row.key_id,
        "old_key_expires_at": _time(old.expires_at),
        "expires_at": _time(expires_at),
        "key_id": by,
    }
    await add_event(db, project_id, "key_rotated", now, details)
    return row.key_id, plaintext


async def set_key_role(db: AsyncSession, key_id: str, role: Role, now: datetime) -> None:
    """Change what a key may do. For the server's own purposes: people make another key."""
    row = await db.get(ApiKey, key_id)
    if row is not None and row.role != role:
        row.role = role
        await db.flush()
        await add_event(db, row.project_id, "key_changed", now, {**_about(row), "changed_key_id": key_id})


async def authenticate(db: AsyncSession, plaintext: str, *, now: datetime | None = None) -> KeyRecord | None:
    """The valid key that this is, or None. Reads only.

    Every answer costs one look-up, one HMAC and one comparison, so that its time does not tell a known prefix from an
    unknown one.
    """
    shaped = plaintext if _KEY.fullmatch(plaintext) else ""
    candidates = [_found(row) for row in await db.execute(_KEYS.where(ApiKey.prefix == shaped[:_PREFIX_LENGTH]))]
    digest = _digest(db, shaped)
    found: Found | None = None
    for candidate in candidates:
        if hmac.compare_digest(candidate[0].digest, digest):
            found = candidate
    if not candidates:
        hmac.compare_digest(_NOBODY, digest)
    return None if found is None else _valid(found, now or datetime.now(UTC))


async def valid_key(db: AsyncSession, key_id: str, *, now: datetime | None = None) -> KeyRecord | None:
    """The key of this id if it still lets its holder in, else None."""
    row = (await db.execute(_KEYS.where(ApiKey.key_id == key_id))).one_or_none()
    return None if row is None else _valid(_found(row), now or datetime.now(UTC))


async def get_key(db: AsyncSession, project_id: str, key_id: str) -> KeyRecord | None:
    """The key, valid or not; None if it does not exist or belongs to another project."""
    row = (await db.execute(_KEYS.where(ApiKey.key_id == key_id, ApiKey.project_id == project_id))).one_or_none()
    return None if row is None else _record(_found(row))


async def list_keys(db: AsyncSession, project_id: str) -> list[KeyRecord]:
    """All keys of a project, revoked and expired ones included, oldest first."""
    mine = _KEYS.where(ApiKey.project_id == project_id).order_by(ApiKey.created_at, ApiKey.key_id)
    return [_record(_found(row)) for row in await db.execute(mine)]


async def lasting_keys(db: AsyncSession, now: datetime, *, project_id: str | None = None) -> list[KeyRecord]:
    """The valid keys of a project (None = of all projects) that no other one is taking the place of."""
    wanted = _KEYS.where(ApiKey.revoked_at.is_(None), ApiKey.replaced_by.is_(None))
    if project_id is not None:
        wanted = wanted.where(ApiKey.project_id == project_id)
    found = [_valid(_found(row), now) for row in await db.execute(wanted)]
    return [key for key in found if key is not None]


async def revoke_key(db: AsyncSession, project_id: str, key_id: str, now: datetime, *, by: str | None = None) -> bool:
    """End a key at once. False if the project has no such key; revoking again changes nothing.

    `by` is the id of the key that asked for it, for the audit log.
    """
    row = await db.get(ApiKey, key_id)
    if row is None or row.project_id != project_id:
        return False
    if row.revoked_at is None:
        row.revoked_at = now
        await db.flush()
        await add_event(db, project_id, "key_revoked", now, {"revoked_key_id": key_id, "name": row.name, "key_id": by})
    return True


async def touch_keys(db: AsyncSession, last_used: Mapping[str, datetime]) -> None:
    """Note when keys (by id) were last used. The caller collects uses and writes them now and then."""
    for key_id, used in last_used.items():
        older = or_(ApiKey.last_used_at.is_(None), ApiKey.last_used_at < used)
        await db.execute(update(ApiKey).where(ApiKey.key_id == key_id, older).values(last_used_at=used))


def _found(row: Row[ApiKey, datetime | None, str]) -> Found:
    key, archived_at, role_of_user = row
    return key, archived_at, role_of_user


def _new_row(db: AsyncSession, project_id: str, name: str, now: datetime) -> tuple[ApiKey, str]:
    plaintext = f"tml-{secrets.token_urlsafe(32)}"
    row = ApiKey(
        key_id=secrets.token_hex(16),
        project_id=project_id,
        name=name,
        prefix=plaintext[:_PREFIX_LENGTH],
        digest=_digest(db, plaintext),
        created_at=now,
    )
    return row, plaintext


def _about(row: ApiKey) -> dict[str, Any]:
    return {"name": row.name, "role": row.role, "scopes": row.scopes, "user_id": row.user_id}


def _listed(scopes: Sequence[str] | None) -> list[str] | None:
    return None if scopes is None else list(scopes)


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _digest(db: AsyncSession, plaintext: str) -> bytes:
    return hmac.digest(db.info[PEPPER], plaintext.encode("ascii"), "sha256")


def _valid(found: Found, now: datetime) -> KeyRecord | None:
    row, _, _ = found
    ended = row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now)
    return None if ended or _shut_out(found) else _record(found)


def _shut_out(found: Found) -> bool:
    row, archived_at, role_of_user = found
    return archived_at is not None or (row.user_id is not None and role_of_user is None)


def _record(found: Found) -> KeyRecord:
    row, _, role_of_user = found
    return KeyRecord(
        key_id=row.key_id,
        project_id=row.project_id,
        name=row.name,
        prefix=row.prefix,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        role=row.role if role_of_user is None else lesser(row.role, role_of_user),
        scopes=None if row.scopes is None else tuple(row.scopes),
        user_id=row.user_id,
        replaced_by=row.replaced_by,
        shut_out=_shut_out(found),
    )
