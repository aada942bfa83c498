"""What was found whole is not read through again for each part that is fetched; damage is found all the same."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import app.services.verified as verified
from app.services.verified import AGAIN_SECONDS, VerifiedFiles
from engines.checkpoint_files import MANIFEST_FILE, WEIGHTS_FILE, folder_problems
from tests.support.api import Api

CONFIG = "adapter_config.json"
SIZE = 50 * 2**20
RANGES = 1000


def _write(folder: Path, **files: bytes) -> None:
    """Files of a checkpoint by their names without a suffix, with a manifest."""
    folder.mkdir(exist_ok=True)
    named = {{"config": CONFIG, "weights": WEIGHTS_FILE}[short]: data for short, data in files.items()}
    for name, data in named.items():
        (folder / name).write_bytes(data)
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in named.items()}
    (folder / MANIFEST_FILE).write_text(json.dumps({"format_version": 1, "sha256": sums}))


class Looks:
    """Looks for real, and counts; `clock` is set by hand."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.now = 0.0
        self.free = threading.Event()
        self.free.set()
        self.files = VerifiedFiles(check=self._check, clock=lambda: self.now)

    def _check(self, folder: Path, names: Collection[str]) -> list[str]:
        self.names += names
        assert self.free.wait(10)
        return folder_problems(folder, names)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two files."""
    _write(tmp_path / "whole", config=b"{}", weights=b"w" * 1000)
    return tmp_path / "whole"


async def test_a_file_is_read_through_once_until_its_time_is_over(folder: Path) -> None:
    looks = Looks()
    for _ in range(5):
        assert await looks.files.problems(folder, [CONFIG, WEIGHTS_FILE]) == []
    assert looks.names == [CONFIG, WEIGHTS_FILE]
    looks.now = AGAIN_SECONDS - 1
    assert await looks.files.problems(folder, [WEIGHTS_FILE]) == []
    assert len(looks.names) == 2
    looks.now = AGAIN_SECONDS
    assert await looks.files.problems(folder, [WEIGHTS_FILE]) == []
    assert looks.names[2:] == [WEIGHTS_FILE]


@pytest.mark.parametrize("kept_time", [False, True], ids=["written to", "and its time set back"])
async def test_a_file_that_is_written_to_is_read_again_at_once(folder: Path, kept_time: bool) -> None:
    looks = Looks()
    assert await looks.files.problems(folder, [WEIGHTS_FILE]) == []
    before = (folder / WEIGHTS_FILE).stat()
    await asyncio.sleep(0.02)  # beyond the grain of a file system's time
    (folder / WEIGHTS_FILE).write_bytes(b"w" * 999 + b"x")
    if kept_time:
        os.utime(folder / WEIGHTS_FILE, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert await looks.files.problems(folder, [WEIGHTS_FILE]) == [f"{WEIGHTS_FILE} does not match its checksum"]


async def test_a_manifest_that_changes_counts_as_another_version(folder: Path) -> None:
    looks = Looks()
    assert await looks.files.problems(folder, [CONFIG]) == []
    (folder / MANIFEST_FILE).write_text("{")
    assert await looks.files.problems(folder, [CONFIG]) == [f"{MANIFEST_FILE} is not readable"]


async def test_damage_that_leaves_no_other_trace_is_found_when_the_time_is_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "_version", lambda *paths: (1,))  # as of a disk that lost a bit by itself
    looks = Looks()
    assert await looks.files.problems(folder, [WEIGHTS_FILE]) == []
    (folder / WEIGHTS_FILE).write_bytes(b"w" * 999 + b"x")
    assert await looks.files.problems(folder, [WEIGHTS_FILE]) == []
    looks.now = AGAIN_SECONDS
    assert await looks.files.problems(folder, [WEIGHTS_FILE]) == [f"{WEIGHTS_FILE} does not match its checksum"]


async def test_what_is_damaged_or_gone_is_looked_at_each_time(folder: Path) -> None:
    looks = Looks()
    (folder / WEIGHTS_FILE).write_bytes(b"short")
    for _ in range(2):
        assert await looks.files.problems(folder, [WEIGHTS_FILE]) == [f"{WEIGHTS_FILE} does not match its checksum"]
    (folder / WEIGHTS_FILE).unlink()
    assert await looks.files.problems(folder, [WEIGHTS_FILE]) == [f"{WEIGHTS_FILE} is missing"]
    _write(folder, config=b"{}", weights=b"back from a backup")
    assert await looks.files.problems(folder, [WEIGHTS_FILE]) == []


async def test_requests_at_the_same_time_share_one_look_even_if_the_first_goes_away(folder: Path) -> None:
    looks = Looks()
    looks.free.clear()
    waiting = [asyncio.create_task(looks.files.problems(folder, [WEIGHTS_FILE])) for _ in range(20)]
    while not looks.names:  # noqa: ASYNC110 (a thread notes it)
        await asyncio.sleep(0.001)
    waiting[0].cancel()
    await asyncio.sleep(0)
    looks.free.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert found[1:] == [[]] * 19
    assert looks.names == [WEIGHTS_FILE]


async def test_what_is_remembered_is_bounded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "MOST_FILES", 2)
    looks = Looks()
    _write(tmp_path / "more", config=b"{}", weights=b"w")
    order = [(folder, CONFIG), (folder, WEIGHTS_FILE), (folder, CONFIG), (tmp_path / "more", CONFIG)]
    for where, name in order:
        assert await looks.files.problems(where, [name]) == []
    assert len(looks.names) == 3
    assert await looks.files.problems(folder, [CONFIG]) == []  # asked for lately
    assert len(looks.names) == 3
    assert await looks.files.problems(folder, [WEIGHTS_FILE]) == []  # forgotten
    assert len(looks.names) == 4


def _read() -> int:
    """Bytes that this process has read from anything so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


@pytest.mark.slow
async def test_a_thousand_parts_of_a_large_file_cost_one_reading_and_damage_is_still_found(api: Api) -> None:
    model = await api.model()
    await api.do("save_weights_external", model_id=model, path="large")
    route = f"training_runs/{model}/checkpoints/external_weights/large/external_weights_urls"
    parts = urlsplit((await api.client.get(route)).json()["urls"][WEIGHTS_FILE])
    address = f"http://localhost{parts.path}?{parts.query}"
    [folder] = (api.edge.settings.data_dir / "checkpoints").iterdir()
    data = os.urandom(SIZE)
    _write(folder, config=(folder / CONFIG).read_bytes(), weights=data)
    async with api.edge.without_key() as client:
        before = _read()
        for number in range(RANGES):
            first = number * (SIZE // RANGES)
            answer = await client.get(address, headers={"Range": f"bytes={first}-{first + 99}"})
            assert (answer.status_code, answer.content) == (206, data[first : first + 100])
        assert SIZE < _read() - before < 1.5 * SIZE
        with (folder / WEIGHTS_FILE).open("r+b") as file:
            file.seek(SIZE // 2)
            file.write(bytes([data[SIZE // 2] ^ 1]))
        answer = await client.get(address, headers={"Range": "bytes=0-99"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "damaged_checkpoint")
