"""API keys: what lets in, what does not, and what a thief of the database has."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from schemas.errors import NotFound
from store.database import Store
from store.dev_key import ensure_dev_key
from store.keys import (
    authenticate,
    create_key,
    ensure_project,
    get_project,
    list_keys,
    revoke_key,
    touch_keys,
)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


async def test_key_lets_into_its_project(store: Store, project: str, other_project: str, now: datetime) -> None:
    key_id, plaintext = await store.write(lambda db: create_key(db, project, "laptop", now=now))
    assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", plaintext), (
        "the SDK accepts no other prefix; 43 characters = 256 bits"
    )
    record = await store.read(lambda db: authenticate(db, plaintext))
    assert record is not None
    assert (record.key_id, record.project_id, record.name, record.prefix) == (key_id, project, "laptop", plaintext[:12])
    assert await store.read(lambda db: list_keys(db, project)) == [record]
    assert await store.read(lambda db: list_keys(db, other_project)) == []


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "wrong", ["", "tml-", "x", "tml-" + "A" * 43, "tml-dev", "é" * 47, "\ud800", "tml-" + "A" * 10**6]
)
async def test_other_texts_do_not(store: Store, project: str, wrong: str) -> None:
    await store.write(lambda db: create_key(db, project, "k"))
    assert await store.read(lambda db: authenticate(db, wrong)) is None


async def test_every_character_counts(store: Store, project: str) -> None:
    _, plaintext = await store.write(lambda db: create_key(db, project, "k"))
    for place in range(len(plaintext)):
        other = "A" if plaintext[place] != "A" else "B"
        changed = plaintext[:place] + other + plaintext[place + 1 :]
        assert await store.read(lambda db, k=changed: authenticate(db, k)) is None, place
    for changed in (plaintext + "A", plaintext[:-1], plaintext + "\n", " " + plaintext, plaintext.upper()):
        assert await store.read(lambda db, k=changed: authenticate(db, k)) is None


async def test_unknown_prefix_costs_the_same_comparison(
    store: Store, project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, plaintext = await store.write(lambda db: create_key(db, project, "k"))
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    for attempt in (plaintext, plaintext[:-1] + "_", "tml-" + "A" * 43, "nonsense"):
        await store.read(lambda db, k=attempt: authenticate(db, k))
    assert compared == [(32, 32)] * 4


async def test_two_keys_with_the_same_prefix(store: Store, project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tails = iter(["AAAAAAAA" + "x" * 35, "AAAAAAAA" + "y" * 35])
    monkeypatch.setattr(secrets, "token_urlsafe", lambda size: next(tails))
    made = [await store.write(lambda db: create_key(db, project, "k")) for _ in range(2)]
    for key_id, plaintext in made:
        record = await store.read(lambda db, k=plaintext: authenticate(db, k))
        assert record is not None
        assert record.key_id == key_id


async def test_revoked_and_expired_keys(store: Store, project: str, other_project: str, now: datetime) -> None:
    hour = timedelta(hours=1)
    key_id, revoked = await store.write(lambda db: create_key(db, project, "r"))
    _, expiring = await store.write(lambda db: create_key(db, project, "e", expires_at=now))
    assert not await store.write(lambda db: revoke_key(db, other_project, key_id, now))
    assert await store.read(lambda db: authenticate(db, revoked)) is not None
    assert await store.write(lambda db: revoke_key(db, project, key_id, now))
    assert await store.write(lambda db: revoke_key(db, project, key_id, now + hour))
    assert await store.read(lambda db: authenticate(db, revoked)) is None
    assert [key.revoked_at for key in await store.read(lambda db: list_keys(db, project)) if key.name == "r"] == [now]
    assert await store.read(lambda db: authenticate(db, expiring, now=now - hour)) is not None
    assert await store.read(lambda db: authenticate(db, expiring, now=now)) is None


async def test_last_use_only_moves_forward(store: Store, project: str, now: datetime) -> None:
    key_id, plaintext = await store.write(lambda db: create_key(db, project, "k"))
    for used in (now, now - timedelta(hours=1)):
        await store.write(lambda db, t=used: touch_keys(db, {key_id: t}))
    record = await store.read(lambda db: authenticate(db, plaintext))
    assert record is not None
    assert record.last_used_at == now


async def test_projects(store: Store, project: str) -> None:
    assert await store.write(lambda db: ensure_project(db, "mine")) == project
    record = await store.read(lambda db: get_project(db, project))
    assert record is not None
    assert record.name == "mine"
    with pytest.raises(NotFound):
        await store.write(lambda db: create_key(db, "nobody", "k"))


async def test_keys_are_neither_in_the_files_nor_in_the_log(data_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = await Store.open(data_dir)
    project = await store.write(lambda db: ensure_project(db, "mine"))
    _, plaintext = await store.write(lambda db: create_key(db, project, "k"))
    assert await store.read(lambda db: authenticate(db, plaintext)) is not None
    written = _contents(data_dir)
    await store.close()
    written |= {f"{name} after close": content for name, content in _contents(data_dir).items()}
    assert plaintext[:12].encode() in written["tinsmith.db-wal"], "the prefix is visible, so the search does see rows"
    for name, content in written.items():
        assert plaintext.encode() not in content, name
        assert plaintext[12:].encode() not in content, name
    assert plaintext[12:] not in caplog.text


async def test_database_without_its_pepper_lets_nobody_in(data_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = await Store.open(data_dir)
    project = await store.write(lambda db: ensure_project(db, "mine"))
    _, plaintext = await store.write(lambda db: create_key(db, project, "k"))
    await store.close()
    assert _mode(data_dir / "pepper") == 0o600
    assert "pepper" not in caplog.text
    (data_dir / "pepper").unlink()
    store = await Store.open(data_dir)
    assert await store.read(lambda db: authenticate(db, plaintext)) is None
    assert "pepper is missing" in caplog.text
    await store.close()


async def test_dev_key_is_private_and_stays(store: Store, data_dir: Path) -> None:
    plaintext = await ensure_dev_key(store, data_dir)
    path = data_dir / "dev_key"
    assert path.read_text() == f"{plaintext}\n"
    assert _mode(path) == 0o600
    path.chmod(0o644)
    assert await ensure_dev_key(store, data_dir) == plaintext
    assert _mode(path) == 0o600
    assert [name for name in _contents(data_dir) if "dev_key" in name] == ["dev_key"]


@pytest.mark.parametrize("loss", ["file", "row", "garbage"])
async def test_dev_key_is_made_anew_when_its_file_or_row_is_gone(
    store: Store, data_dir: Path, now: datetime, loss: str
) -> None:
    old = await ensure_dev_key(store, data_dir)
    record = await store.read(lambda db: authenticate(db, old))
    assert record is not None
    if loss == "file":
        (data_dir / "dev_key").unlink()
    elif loss == "garbage":
        (data_dir / "dev_key").write_bytes(b"\xff\x00")
    else:
        await store.write(lambda db: revoke_key(db, record.project_id, record.key_id, now))
    new = await ensure_dev_key(store, data_dir)
    assert new != old
    assert await store.read(lambda db: authenticate(db, old)) is None
    fresh = await store.read(lambda db: authenticate(db, new))
    assert fresh is not None
    assert fresh.project_id == record.project_id
    assert (_mode(data_dir / "dev_key"), (data_dir / "dev_key").read_text()) == (0o600, f"{new}\n")


async def test_dev_keys_of_two_installations_differ(tmp_path: Path) -> None:
    made = set()
    for name in ("a", "b"):
        store = await Store.open(tmp_path / name)
        made.add(await ensure_dev_key(store, tmp_path / name))
        await store.close()
    assert len(made) == 2


async def test_dev_key_file_that_is_a_link_is_not_followed(store: Store, data_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("something")
    (data_dir / "dev_key").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        await ensure_dev_key(store, data_dir)
    assert target.read_text() == "something"
