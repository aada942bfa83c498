"""Checkpoints in an object storage: complete or not there, checked when read, bounded on the disk.

Against a real S3 server; the reference is what that server holds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from pathlib import Path

import pytest

from schemas.errors import EngineFailure, NotFound, Unavailable
from store.artifact_place import open_artifacts, record_place, recorded_place
from store.artifacts import FolderArtifacts
from store.object_artifacts import ObjectArtifacts
from store.object_storage import ObjectStorage, StorageAddress
from tests.support.object_server import BUCKET, SECRET, ObjectServer, credentials_file, object_server
from tests.support.server import free_port

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": os.urandom(9 << 20), "tinsmith.json": b"m"}
"""One needs several requests."""
SIZE = sum(map(len, FILES.values()))
SMALL = {**FILES, "adapter_model.safetensors": os.urandom(1000)}


def open_objects(
    data_dir: Path, server: ObjectServer, *, prefix: str | None = None, timeout: float = 3.0, **options: object
) -> ObjectArtifacts:
    """A store of checkpoints below a prefix, by default one of its own."""
    data_dir.mkdir(parents=True, exist_ok=True)
    address = StorageAddress(BUCKET, prefix or data_dir.parent.name + data_dir.name, server.endpoint, None, timeout)
    settings: dict[str, object] = {"cache_bytes": 1 << 30, **options}
    return ObjectArtifacts(data_dir, address.url, ObjectStorage(address), **settings)  # type: ignore[arg-type]


def write(artifacts: ObjectArtifacts, files: dict[str, bytes] = FILES) -> str:
    """What a worker leaves: a whole folder under a new name."""
    _, name = artifacts.new_folder()
    artifacts.path(name).mkdir()
    for file, content in files.items():
        (artifacts.path(name) / file).write_bytes(content)
    return name


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


pytestmark = pytest.mark.usefixtures("aws")


async def test_another_machine_reads_what_one_has_published(tmp_path: Path, objects: ObjectServer) -> None:
    first, second = (open_objects(tmp_path / name, objects, prefix="machines") for name in "ab")
    name = write(first)
    with pytest.raises(NotFound):  # it is not published
        await second.fetch(name)
    await first.publish(name)
    await first.publish(name)
    assert await second.size(name) == SIZE
    places = await asyncio.gather(*(second.fetch(name) for _ in range(5)))  # one download
    assert set(places) == {second.path(name)}
    assert contents(places[0]) == FILES
    assert await second.size(name) == SIZE
    assert [path.name for path in (tmp_path / "b" / "checkpoints").iterdir()] == [name]
    assert objects.keys("machines") == sorted(
        [f"checkpoints/{name}/{file}" for file in FILES] + [f"complete/{name}.json"]
    )


async def test_files_that_were_altered_are_not_read(tmp_path: Path, objects: ObjectServer) -> None:
    first, second = (open_objects(tmp_path / name, objects, prefix="altered") for name in "ab")
    name = write(first, SMALL)
    await first.publish(name)
    whole = SMALL["adapter_model.safetensors"]
    key = f"checkpoints/{name}/adapter_model.safetensors"
    for wrong in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-1], b""):
        objects.write("altered", key, wrong)
        with pytest.raises(EngineFailure) as refused:
            await second.fetch(name)
        assert refused.value.code == "damaged_checkpoint"
        assert list((tmp_path / "b" / "checkpoints").iterdir()) == []
    objects.write("altered", key, whole)
    listed = json.loads(objects.read("altered", f"complete/{name}.json"))
    for bad in (b"", b"{}", b"[]", json.dumps({"files": {"../evil": listed["files"]["tinsmith.json"]}}).encode()):
        objects.write("altered", f"complete/{name}.json", bad)
        with pytest.raises(EngineFailure) as refused:
            await second.fetch(name)
        assert refused.value.code == "damaged_checkpoint"
    objects.write("altered", f"complete/{name}.json", json.dumps(listed).encode())
    assert contents(await second.fetch(name)) == SMALL


async def test_a_copy_outlives_its_source(tmp_path: Path, objects: ObjectServer) -> None:
    artifacts = open_objects(tmp_path / "a", objects, prefix="copies")
    await artifacts.sweep_incomplete([])
    source, (_, target) = write(artifacts), artifacts.new_folder()
    await artifacts.publish(source)
    await artifacts.copy(source, target)
    await artifacts.delete(source)
    await artifacts.collect()
    assert not any(source in key for key in objects.keys("copies"))
    assert contents(await artifacts.fetch(target)) == FILES
    with pytest.raises(NotFound):
        await artifacts.copy(source, artifacts.new_folder()[1])


async def test_copies_on_the_disk_stay_within_their_bound(tmp_path: Path, objects: ObjectServer) -> None:
    now = 1000.0
    small = {"a": b"x" * 1000}
    artifacts = open_objects(tmp_path / "a", objects, prefix="bound", cache_bytes=2500, recent=10.0, clock=lambda: now)
    names = [write(artifacts, small) for _ in range(4)]
    unpublished = write(artifacts, small)
    for name in names:
        await artifacts.publish(name)
    root = tmp_path / "a" / "checkpoints"
    assert len(list(root.iterdir())) == 5, "all were used a moment ago"
    now += 60
    release = artifacts.hold(names[0])
    await artifacts.fetch(names[1])  # used now
    again = write(artifacts, small)
    await artifacts.publish(again)
    assert {path.name for path in root.iterdir()} == {names[0], names[1], again, unpublished}
    now += 60
    release()
    release()
    await artifacts.fetch(names[2])
    assert {path.name for path in root.iterdir()} == {again, names[2], unpublished}
    assert contents(await artifacts.fetch(names[0])) == small, "what gave way is fetched again"


async def test_a_start_removes_what_no_row_names_and_uploads_what_was_on_the_disk(
    tmp_path: Path, objects: ObjectServer
) -> None:
    before = FolderArtifacts(tmp_path)
    old = before.new_folder()[1]
    before.path(old).mkdir()
    (before.path(old) / "a").write_bytes(b"from before there was a storage")
    artifacts = open_objects(tmp_path, objects, prefix="start")
    cut_off, stray = before.new_folder()[1], before.new_folder()[1]
    objects.write("start", f"checkpoints/{cut_off}/adapter_model.safetensors", b"half")
    objects.write("start", f"checkpoints/{stray}/a", b"whole, but its row was never written")
    objects.write("start", f"complete/{stray}.json", b"{}")
    objects.write("start", "checkpoints/notes/of-the-operator", b"not ours")
    before.path(cut_off).mkdir()  # this server was writing it
    assert await artifacts.sweep_incomplete([old]) == [cut_off]
    assert f"complete/{stray}.json" in objects.keys("start"), "another server may be about to write its row"
    old_enough = open_objects(tmp_path, objects, prefix="start", stray_seconds=-60.0)
    assert await old_enough.sweep_incomplete([old]) == [stray]
    assert objects.keys("start") == sorted(
        [f"checkpoints/{old}/a", f"complete/{old}.json", "checkpoints/notes/of-the-operator", "owner.json"]
    )
    assert recorded_place(tmp_path) == f"s3://{BUCKET}/start"


async def test_only_the_owner_removes(tmp_path: Path, objects: ObjectServer, caplog: pytest.LogCaptureFixture) -> None:
    original, restored = (open_objects(tmp_path / name, objects, prefix="owner") for name in "ab")
    await original.sweep_incomplete([])
    name = write(original)
    await original.publish(name)
    with caplog.at_level(logging.WARNING):
        assert await restored.sweep_incomplete([]) == [], "an older copy of the database does not know this checkpoint"
    assert "another data folder owns" in caplog.text
    await restored.fetch(name)
    await restored.delete(name)
    await restored.collect()
    assert contents(await restored.fetch(name)) == FILES
    again = open_objects(tmp_path / "a", objects, prefix="owner")
    assert await again.sweep_incomplete([]) == [name]
    assert objects.keys("owner") == ["owner.json"]


async def test_a_storage_that_is_down_or_hangs_is_told_in_time(tmp_path: Path) -> None:
    with object_server() as server:
        first, second = (open_objects(tmp_path / name, server, prefix="down", timeout=10.0) for name in "ab")
        hasty, other = (open_objects(tmp_path / name, server, prefix="down", timeout=0.5) for name in "ab")
        await first.sweep_incomplete([])
        kept, late = write(first, SMALL), write(first, SMALL)
        await first.publish(kept)
        server.hang()
        began = time.monotonic()
        with pytest.raises(Unavailable, match="does not answer in time"):
            await other.fetch(kept)
        with pytest.raises(EngineFailure, match="does not answer in time") as refused:
            await hasty.publish(late)
        assert refused.value.code == "checkpoint_not_written"
        await first.delete(kept)  # does not wait for the storage
        assert not first.path(kept).exists()
        assert time.monotonic() - began < 8
        server.go_on()
        async with asyncio.timeout(20):
            while any(kept in key for key in server.keys("down")):
                await first.collect()
        await first.publish(late)
        assert contents(await second.fetch(late)) == SMALL
        server.stop()
        with pytest.raises(Unavailable, match="cannot be reached"):
            await hasty.fetch(kept)
        with pytest.raises(Unavailable, match="cannot be reached") as refused_start:
            await open_objects(tmp_path / "c", server, prefix="down", timeout=0.5).sweep_incomplete([])
        assert SECRET not in refused_start.value.message


async def test_a_server_that_must_end_waits_for_no_storage(tmp_path: Path, objects: ObjectServer) -> None:
    artifacts = open_objects(tmp_path / "a", ObjectServer(free_port()), prefix="end", timeout=30.0)
    name = write(artifacts)
    publishing = asyncio.create_task(artifacts.publish(name))
    async with asyncio.timeout(20):
        while artifacts.doing(name) != "uploading to the object storage: file 1 of 3":  # noqa: ASYNC110 (until it tries)
            await asyncio.sleep(0.01)
    artifacts.give_up()
    began = time.monotonic()
    with pytest.raises(Unavailable, match="shutting down"):
        await publishing
    assert time.monotonic() - began < 10, "it would have tried for 30 s"


async def test_credentials_come_from_the_usual_file_too(
    tmp_path: Path, objects: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials_file(tmp_path)))
    monkeypatch.setenv("AWS_PROFILE", "tinsmith")
    artifacts = open_objects(tmp_path / "a", objects, prefix="file")
    name = write(artifacts)
    await artifacts.publish(name)
    monkeypatch.delenv("AWS_PROFILE")
    assert f"complete/{name}.json" in objects.keys("file")


def test_a_data_folder_opens_with_its_own_storage_only(tmp_path: Path) -> None:
    def opened(url: str | None) -> object:
        return open_artifacts(tmp_path, url, endpoint=None, region=None, timeout=1.0, cache_bytes=1)

    assert isinstance(opened(None), FolderArtifacts)
    record_place(tmp_path, "s3://one/prefix")
    assert isinstance(opened("s3://one/prefix"), ObjectArtifacts)
    for other in (None, "s3://one/other"):
        with pytest.raises(Unavailable, match="s3://one/prefix"):
            opened(other)
