"""Roles, scopes, users and projects, in either database, and keys that two servers end at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from app.services.project_keys import keeping_a_key
from schemas.errors import AlreadyExists, InvalidRequest
from store.database import Store
from store.events import list_events
from store.keys import (
    authenticate,
    create_key,
    get_key,
    lasting_keys,
    list_keys,
    revoke_key,
    rotate_key,
    set_key_role,
    valid_key,
)
from store.members import (
    create_user,
    delete_user,
    get_member,
    list_members,
    list_users,
    projects_of,
    remove_member,
    set_member,
)
from store.projects import archive_project, create_project, list_project, list_projects
from tests.store.conftest import only_postgres
from tests.store.factories import Make

HOUR = timedelta(hours=1)


@pytest.fixture
async def another(store: Store, data_dir: Path, database_url: str | None) -> AsyncIterator[Store]:
    """Another server's store on the same database and folder."""
    opened = await Store.open(data_dir, database_url)
    yield opened
    await opened.close()


async def test_rights_are_kept_and_go_over_to_the_next_key(
    store: Store, project: str, other_project: str, now: datetime
) -> None:
    key_id, old = await store.write(
        lambda db: create_key(
            db, project, "k", role="owner", scopes=["read", "keys"], expires_at=now + 24 * HOUR, now=now
        )
    )
    found = await store.read(lambda db: authenticate(db, old, now=now))
    assert found is not None
    assert (found.role, found.scopes, found.user_id, found.replaced_by) == ("owner", ("read", "keys"), None, None)
    for wrong in (other_project, "nobody"):
        assert await store.read(lambda db, p=wrong: get_key(db, p, key_id)) is None
        assert (
            await store.write(lambda db, p=wrong: rotate_key(db, p, key_id, until=now, expires_at=None, now=now))
            is None
        )
    made = await store.write(
        lambda db: rotate_key(db, project, key_id, until=now + HOUR, expires_at=now + 48 * HOUR, now=now)
    )
    assert made is not None
    new = await store.read(lambda db: authenticate(db, made[1], now=now))
    assert new is not None
    assert (new.role, new.scopes, new.name, new.expires_at) == ("owner", ("read", "keys"), "k", now + 48 * HOUR)
    assert await store.read(lambda db: authenticate(db, old, now=now + HOUR - timedelta(seconds=1))) is not None
    assert await store.read(lambda db: authenticate(db, old, now=now + HOUR)) is None
    assert [key.key_id for key in await store.read(lambda db: lasting_keys(db, now, project_id=project))] == [made[0]]
    first = (await store.read(lambda db: list_keys(db, project)))[0]
    assert first.replaced_by == made[0] or first.key_id == made[0]
    await store.write(lambda db: set_key_role(db, made[0], "admin", now))
    changed = await store.read(lambda db: valid_key(db, made[0], now=now))
    assert changed is not None
    assert changed.role == "admin"


async def test_a_rotation_lets_no_key_last_longer(store: Store, project: str, now: datetime) -> None:
    soon = now + timedelta(minutes=1)
    key_id, _ = await store.write(lambda db: create_key(db, project, "k", expires_at=soon, now=now))
    await store.write(lambda db: rotate_key(db, project, key_id, until=now + HOUR, expires_at=soon, now=now))
    old = await store.read(lambda db: get_key(db, project, key_id))
    assert old is not None
    assert old.expires_at == soon


async def test_users_and_what_they_are(store: Store, project: str, other_project: str, now: datetime) -> None:
    user = await store.write(lambda db: create_user(db, "ada", project, now, by="k"))
    with pytest.raises(AlreadyExists):
        await store.write(lambda db: create_user(db, "ada", project, now, by="k"))
    for where in (project, other_project):
        await store.write(lambda db, p=where: set_member(db, p, user.user_id, "owner", now, by="k"))
    keys = [
        await store.write(lambda db, p=where: create_key(db, p, "k", role="owner", user_id=user.user_id, now=now))
        for where in (project, other_project)
    ]
    await store.write(lambda db: set_member(db, project, user.user_id, "member", now, by="k"))
    roles = [await store.read(lambda db, key=key: authenticate(db, key, now=now)) for _, key in keys]
    assert [key.role for key in roles if key is not None] == ["member", "owner"]
    assert [each.role for each in await store.read(lambda db: list_members(db, project))] == ["member"]
    assert not await store.write(lambda db: remove_member(db, project, "nobody", now, by="k"))
    assert await store.write(lambda db: remove_member(db, project, user.user_id, now, by="k"))
    assert await store.read(lambda db: get_member(db, project, user.user_id)) is None
    assert await store.read(lambda db: valid_key(db, keys[0][0], now=now)) is None
    assert await store.write(lambda db: delete_user(db, user.user_id, project, now, by="k"))
    assert not await store.write(lambda db: delete_user(db, user.user_id, project, now, by="k"))
    assert await store.read(lambda db: valid_key(db, keys[1][0], now=now)) is None
    assert await store.read(list_users) == []
    assert await store.read(lambda db: projects_of(db, user.user_id)) == []
    lines = await store.read(lambda db: list_events(db, project, now, now + HOUR))
    assert [line.event for line in lines] == [
        "user_created",
        "member_added",
        "key_created",
        "member_changed",
        "key_revoked",
        "member_removed",
        "user_deleted",
    ]


async def test_projects_are_counted_and_archived(store: Store, project: str, make: Make, now: datetime) -> None:
    made = await store.write(lambda db: create_project(db, "new", now, by="k"))
    with pytest.raises(AlreadyExists):
        await store.write(lambda db: create_project(db, "new", now, by="k"))
    _, key = await store.write(lambda db: create_key(db, made.project_id, "k", now=now))
    await store.write(lambda db: archive_project(db, made.project_id, now, by="k"))
    assert await store.read(lambda db: authenticate(db, key, now=now)) is None
    await store.write(lambda db: archive_project(db, made.project_id, now + HOUR, by="k"))
    found = await store.read(lambda db: list_project(db, made.project_id))
    assert found is not None
    assert (found.project.archived_at, found.live_runs) == (now, 0)
    assert [each.project.name for each in await store.read(list_projects)] == ["mine", "new"]
    assert await store.read(lambda db: list_project(db, "nobody")) is None


@only_postgres
async def test_two_servers_do_not_end_the_last_two_keys_together(
    store: Store, another: Store, project: str, now: datetime
) -> None:
    """Each sees the other's key and could think that one is left."""
    key_ids = [(await store.write(lambda db: create_key(db, project, "k", role="owner", now=now)))[0] for _ in range(2)]

    both = asyncio.Barrier(2)

    async def end(through: Store, key_id: str) -> str:
        async def rows(db: AsyncSession) -> None:
            async with keeping_a_key(db, project, now, force=False):
                await revoke_key(db, project, key_id, now)
            with suppress(TimeoutError, asyncio.BrokenBarrierError):  # neither commits before both have looked
                await asyncio.wait_for(both.wait(), 2.0)

        try:
            await through.write(rows)
        except InvalidRequest as error:
            return error.code
        return "ended"

    outcomes = await asyncio.gather(end(store, key_ids[0]), end(another, key_ids[1]))
    assert sorted(outcomes) == ["ended", "last_key"]
    assert len(await store.read(lambda db: lasting_keys(db, now, project_id=project))) == 1
