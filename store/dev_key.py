"""The key of a fresh installation: random, in a file that only the server's user can read.

Not responsible for telling the user where it is.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from schemas.roles import Role
from store.database import Store
from store.files import read_private, replace_private
from store.keys import authenticate, create_key, ensure_project, list_keys, revoke_key, set_key_role

DEV_KEY_FILE = "dev_key"
DEV_KEY_NAME = "dev"
DEV_KEY_ROLE: Role = "admin"
DEV_PROJECT = "default"


async def ensure_dev_key(store: Store, data_dir: Path) -> str:
    """The key in `data_dir/dev_key` (mode 0600), or a new one if the file or its row is gone.

    A new one takes the place of the old: dev keys whose file was lost stop working.
    """
    path = data_dir / DEV_KEY_FILE
    kept = await asyncio.to_thread(read_private, path)
    if kept is not None:
        plaintext = kept.decode("ascii", "replace").strip()
        known = await store.read(lambda db: authenticate(db, plaintext))
        if known is not None:
            if known.role != DEV_KEY_ROLE:  # made by a version that had no roles
                await store.write(lambda db: set_key_role(db, known.key_id, DEV_KEY_ROLE, datetime.now(UTC)))
            return plaintext
    plaintext = await store.write(_renew)
    await asyncio.to_thread(replace_private, path, f"{plaintext}\n".encode("ascii"))
    return plaintext


async def _renew(db: AsyncSession) -> str:
    now = datetime.now(UTC)
    project_id = await ensure_project(db, DEV_PROJECT, now=now)
    for key in await list_keys(db, project_id):
        if key.name == DEV_KEY_NAME:
            await revoke_key(db, project_id, key.key_id, now)
    return (await create_key(db, project_id, DEV_KEY_NAME, role=DEV_KEY_ROLE, now=now))[1]
