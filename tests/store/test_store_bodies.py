"""Body files, and what a burst of them does to heartbeats."""

from __future__ import annotations

import asyncio
import errno
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from schemas.errors import NotFound, NotNow, TinsmithError, Unavailable
from store.bodies import INLINE_LIMIT, Bodies
from store.database import Store
from store.operations import append
from store.records import BodyRef
from store.sessions import get_session, touch_sessions
from tests.store.conftest import only_sqlite
from tests.store.factories import NOW, Make


@pytest.fixture
def bodies(tmp_path: Path) -> Bodies:
    return Bodies(tmp_path)


@pytest.mark.parametrize("size", [0, 1, INLINE_LIMIT, INLINE_LIMIT + 1, 1_000_000])
async def test_round_trip(bodies: Bodies, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    body = await bodies.put("r", "request", data)
    assert isinstance(body, BodyRef) == (size > INLINE_LIMIT)
    assert await bodies.get(body) == data
    assert len(list((tmp_path / "bodies").iterdir())) == (size > INLINE_LIMIT)
    await bodies.delete([body, body])
    assert list((tmp_path / "bodies").iterdir()) == []


async def test_files_are_private_and_never_overwritten(bodies: Bodies, tmp_path: Path) -> None:
    data = b"x" * (INLINE_LIMIT + 1)
    refs = await asyncio.gather(*(bodies.put("../..\x00/r", "result", data) for _ in range(10)))
    files = list((tmp_path / "bodies").iterdir())
    assert len(set(refs)) == len(files) == 10
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert (tmp_path / "bodies").stat().st_mode & 0o777 == 0o700


async def test_file_and_folder_are_synced_before_put_returns(
    bodies: Bodies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    real = os.fsync

    def spy(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    ref = await bodies.put("r", "request", b"x" * 100_000)
    assert isinstance(ref, BodyRef)
    assert synced[0] == (str(tmp_path / "bodies" / ref.name), 100_000)
    assert synced[1][0] == str(tmp_path / "bodies")


async def test_failing_disk_is_unavailable_and_leaves_no_file(
    bodies: Bodies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unavailable) as refused:
        await bodies.put("r", "request", b"x" * 100_000)
    assert str(tmp_path) not in refused.value.message
    assert list((tmp_path / "bodies").iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"y" * 100_000, b"x" * 99_999, b"x" * 100_001])
async def test_damaged_file_is_an_error_and_not_other_data(bodies: Bodies, tmp_path: Path, damage: bytes) -> None:
    ref = await bodies.put("r", "request", b"x" * 100_000)
    assert isinstance(ref, BodyRef)
    (tmp_path / "bodies" / ref.name).write_bytes(damage)
    with pytest.raises(TinsmithError, match="damaged"):
        await bodies.get(ref)


async def test_a_file_that_cannot_be_read_now_is_not_gone(
    bodies: Bodies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await bodies.put("r", "request", b"x" * 100_000)
    assert isinstance(ref, BodyRef)
    left, opened = [3], os.open

    def without_descriptors(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(ref.name) and left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", without_descriptors)
    with pytest.raises(NotNow, match="Too many open files") as refused:
        await bodies.get(ref)
    assert refused.value.code == "storage_unavailable"
    assert str(tmp_path) not in refused.value.message
    assert await bodies.get_patiently(ref) == b"x" * 100_000
    assert left == [0]


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "r.request.zz", "", "."])
async def test_only_generated_names_are_followed(bodies: Bodies, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_bytes(b"s")
    for use in (bodies.get(BodyRef(name, 1, "")), bodies.delete([BodyRef(name, 1, "")])):
        with pytest.raises(NotFound):
            await use
    assert (tmp_path / "secret").exists()


async def test_planted_link_is_not_followed(bodies: Bodies, tmp_path: Path) -> None:
    ref = await bodies.put("r", "request", b"x" * 100_000)
    assert isinstance(ref, BodyRef)
    path = tmp_path / "bodies" / ref.name
    secret = tmp_path / "secret"
    path.rename(secret)
    path.symlink_to(secret)
    with pytest.raises(NotFound):
        await bodies.get(ref)


def test_root_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "bodies").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        Bodies(tmp_path)


@only_sqlite
async def test_heartbeats_stay_fast_while_large_bodies_pour_in(
    store: Store, data_dir: Path, project: str, make: Make
) -> None:
    """100 requests of 3 MB, all at once, and a heartbeat every 10 ms meanwhile.

    Fast is what has no more before it than the transaction that is under way: how long one takes is the disk's affair.
    """
    bodies = Bodies(data_dir)
    session = await make.session()
    data = os.urandom(3_000_000)
    commits: list[int] = []
    store.on_commit = lambda writes, seconds: commits.append(writes)
    waited: list[int] = []
    """Transactions until each heartbeat was durable, its own among them."""

    async def request(n: int) -> None:
        new = make.new(f"r{n}", seq_id=n, body=await bodies.put(f"r{n}", "request", data))
        await store.write(lambda db: append(db, new))

    async def beat() -> None:
        async def touch(db: AsyncSession) -> None:
            await touch_sessions(db, {session: NOW + timedelta(seconds=len(waited) + 1)})

        while not burst.done():
            before = len(commits)
            await store.write(touch)
            waited.append(len(commits) - before)
            await asyncio.sleep(0.01)

    burst = asyncio.gather(*(request(n) for n in range(100)))
    await asyncio.gather(burst, beat())
    record = await store.read(lambda db: get_session(db, project, session))
    assert record is not None
    assert record.last_seen_at == NOW + timedelta(seconds=len(waited))
    assert len(waited) >= 5
    assert sorted(waited)[int(0.95 * len(waited))] <= 4, waited  # 2, and some more where the machine stands still
