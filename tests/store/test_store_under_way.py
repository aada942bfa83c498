"""What a killed server leaves behind about what it was executing, and how its deaths are counted."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from schemas.errors import EngineFailure
from store import operations as log
from store.database import Store
from store.records import NewOperation
from store.under_way import FILE, UnderWayFile

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def left(folder: Path) -> tuple[list[str], list[str]]:
    """What the next server finds."""
    file = UnderWayFile(folder)
    try:
        return file.take()
    finally:
        file.close()


@pytest.mark.parametrize("durable", [False, True])
def test_the_last_mark_is_found_once(tmp_path: Path, durable: bool) -> None:
    file = UnderWayFile(tmp_path)
    file.write(["a" * 32, "b"], ["c"], durable)
    file.write(["b"], ["c", "d"], durable)
    file.close()
    assert left(tmp_path) == (["b"], ["c", "d"])
    assert left(tmp_path) == ([], [])
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_shorter_mark_that_was_not_cut_yet_does_not_name_the_rest_of_the_longer_one(tmp_path: Path) -> None:
    file = UnderWayFile(tmp_path)
    file.write(["a", "b", "c"], [], False)
    os.pwrite(os.open(tmp_path / FILE, os.O_WRONLY), b"running d\nend\n", 0)
    file.close()
    assert left(tmp_path) == (["d"], [])


@pytest.mark.parametrize(
    "content", [b"running a\nrunn", b"\0" * 4096, b"\xff\xfe\n", b"", b"running a b\nfoo c\nend\n"]
)
def test_a_torn_mark_names_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert left(tmp_path) == ([], [])


def test_a_disk_that_takes_no_mark_is_told_once_and_holds_nobody_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = UnderWayFile(tmp_path)
    full = os.open("/dev/full", os.O_RDWR)
    kept = os.dup(file._descriptor)
    os.dup2(full, file._descriptor)
    with caplog.at_level(logging.WARNING):
        file.write(["a"], [], False)
        file.write(["b"], [], False)
    assert caplog.text.count("No space left on device") == 1
    os.dup2(kept, file._descriptor)
    file.write(["c"], [], False)
    for descriptor in (full, kept):
        os.close(descriptor)
    file.close()
    assert left(tmp_path) == (["c"], [])


async def test_only_what_was_cut_off_is_counted_and_an_outcome_ends_the_row(store: Store, project: str) -> None:
    async def fill(db: object) -> None:
        for number, name in enumerate(("cut", "done", "idle")):
            new = NewOperation(name, project, "forward", "model:m", number, "digest", b"body", NOW)
            await log.append(db, new)  # type: ignore[arg-type]
        await log.finish(db, "done", b"", "x", NOW)  # type: ignore[arg-type]

    async def deaths(name: str) -> int:
        found = await store.read(lambda db: log.get_operation(db, project, name))
        assert found is not None
        return found.deaths

    await store.write(fill)
    for _ in range(2):
        assert await store.write(lambda db: log.count_deaths(db, ["cut", "done", "unknown"], [])) == 1
    assert [await deaths(name) for name in ("cut", "done", "idle")] == [2, 0, 0]
    assert await store.write(lambda db: log.count_deaths(db, [], ["done", "idle"])) == 1
    assert [await deaths(name) for name in ("cut", "done", "idle")] == [2, 1, 0]
    await store.write(lambda db: log.fail(db, "cut", EngineFailure("x"), NOW))
    assert await deaths("cut") == 0
