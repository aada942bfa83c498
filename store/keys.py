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
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import NotFound
from store.events import add_event
from store.files import read_private, replace_private
from store.records import KeyRecord, ProjectRecord
from store.tables import ApiKey, Project

PEPPER = "pepper"
"""Where `Store` leaves the pepper in `AsyncSession.info`."""

_log = logging.getLogger(__name__)
_KEY = re.compile(r"tml-[A-Za-z0-9_-]{43}")
_PREFIX_LENGTH = 12
_NOBODY = bytes(32)


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


async def ensure_project(db: AsyncSession, name: str, *, now: datetime | None = None) -> str:
    """The id of the project of this name, which is made if there is none."""
    known = await db.scalar(select(Project.project_id).where(Project.name == name))
    if known is not None:
        return known
    row = Project(project_id=secrets.token_hex(16), name=name, created_at=now or datetime.now(UTC))
    db.add(row)
    await db.flush()
    await add_event(db, row.project_id, "project_created", row.created_at, {"name": name})
    return row.project_id


async def get_project(db: AsyncSession, project_id: str) -> ProjectRecord | None:
    """The project of this id."""
    row = await db.get(Project, project_id)
    return None if row is None else ProjectRecord(row.project_id, row.name, row.created_at)


async def create_key(
    db: AsyncSession, project_id: str, name: str, *, expires_at: datetime | None = None, now: datetime | None = None
) -> tuple[str, str]:
    """Make a key. Returns (key_id, plaintext); the plaintext cannot be had again.

    Raises:
        NotFound: there is no such project.
    """
    if await db.get(Project, project_id) is None:
        raise NotFound(f"there is no project {project_id!r}", field="project_id")
    plaintext = f"tml-{secrets.token_urlsafe(32)}"
    row = ApiKey(
        key_id=secrets.token_hex(16),
        project_id=project_id,
        name=name,
        prefix=plaintext[:_PREFIX_LENGTH],
        digest=_digest(db, plaintext),
        created_at=now or datetime.now(UTC),
        expires_at=expires_at,
    )
    db.add(row)
    await db.flush()
    expires = None if expires_at is None else expires_at.isoformat()
    details = {"created_key_id": row.key_id, "name": name, "expires_at": expires}
    await add_event(db, project_id, "key_created", row.created_at, details)
    return row.key_id, plaintext


async def authenticate(db: AsyncSession, plaintext: str, *, now: datetime | None = None) -> KeyRecord | None:
    """The valid key that this is, or None. Reads only.

    Every answer costs one look-up, one HMAC and one comparison, so that its time does not tell a known prefix from an
    unknown one.
    """
    shaped = plaintext if _KEY.fullmatch(plaintext) else ""
    candidates = list(await db.scalars(select(ApiKey).where(ApiKey.prefix == shaped[:_PREFIX_LENGTH])))
    digest = _digest(db, shaped)
    found: ApiKey | None = None
    for row in candidates:
        if hmac.compare_digest(row.digest, digest):
            found = row
    if not candidates:
        hmac.compare_digest(_NOBODY, digest)
    return None if found is None else _valid(found, now or datetime.now(UTC))


async def valid_key(db: AsyncSession, key_id: str, *, now: datetime | None = None) -> KeyRecord | None:
    """The key of this id if it still lets its holder in, else None."""
    row = await db.get(ApiKey, key_id)
    return None if row is None else _valid(row, now or datetime.now(UTC))


async def list_keys(db: AsyncSession, project_id: str) -> list[KeyRecord]:
    """All keys of a project, revoked and expired ones included, oldest first."""
    rows = await db.scalars(select(ApiKey).where(ApiKey.project_id == project_id).order_by(ApiKey.created_at))
    return [_record(row) for row in rows]


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


def _digest(db: AsyncSession, plaintext: str) -> bytes:
    return hmac.digest(db.info[PEPPER], plaintext.encode("ascii"), "sha256")


def _valid(row: ApiKey, now: datetime) -> KeyRecord | None:
    if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= now):
        return None
    return _record(row)


def _record(row: ApiKey) -> KeyRecord:
    return KeyRecord(
        key_id=row.key_id,
        project_id=row.project_id,
        name=row.name,
        prefix=row.prefix,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
    )
