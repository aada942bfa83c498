"""Checkpoint folders: generated names only, links never followed, nothing half-written stays."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from schemas.errors import NotFound
from store.artifacts import ArtifactStore, FolderArtifacts
from tests.store.test_store_object_artifacts import open_objects
from tests.support.object_server import ObjectServer


@pytest.fixture(params=["folder", "objects"])
def artifacts(request: pytest.FixtureRequest, tmp_path: Path) -> ArtifactStore:
    """Both places of checkpoints, which must look the same from outside."""
    if request.param == "folder":
        return FolderArtifacts(tmp_path)
    request.getfixturevalue("aws")
    server: ObjectServer = request.getfixturevalue("objects")
    return open_objects(tmp_path, server)


def _fill(folder: Path, **files: bytes) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def test_generated_names_have_128_bits_and_no_order(artifacts: ArtifactStore, tmp_path: Path) -> None:
    pairs = [artifacts.new_folder() for _ in range(200)]
    names = [name for pair in pairs for name in pair]
    assert len(set(names)) == 400
    assert all(len(bytes.fromhex(name)) == 16 for name in names)
    assert names != sorted(names)
    assert artifacts.path(pairs[0][1]) == tmp_path / "checkpoints" / pairs[0][1]
    assert (tmp_path / "checkpoints").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "/etc", "a" * 31, "a" * 33, "A" * 32, "a" * 31 + "/", "a" * 32 + "\n"),
        *("../" + "a" * 32, "a" * 32 + "/..", "%2e%2e%2f" + "a" * 23, "..\\" + "a" * 29, "a" * 31 + "\0"),
        *("a" * 31 + "а", "٣" * 32),
    ],
)
async def test_other_names_are_refused(artifacts: ArtifactStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound) as refused:
        artifacts.path(name)
    assert str(tmp_path) not in refused.value.message
    for use in (artifacts.size(name), artifacts.delete(name)):
        with pytest.raises(NotFound):
            await use


async def test_size_and_delete(artifacts: ArtifactStore, tmp_path: Path) -> None:
    _, name = artifacts.new_folder()
    with pytest.raises(NotFound):
        await artifacts.size(name)
    folder = artifacts.path(name)
    _fill(folder, weights=b"x" * 1000, config=b"y" * 24)
    outside = tmp_path / "outside"
    _fill(outside, precious=b"z" * 5000)
    (folder / "link").symlink_to(outside / "precious")
    (folder / "folder_link").symlink_to(outside)
    assert await artifacts.size(name) == 1024
    _fill(tmp_path / "checkpoints" / f".{name}.0123.tmp", half=b"w")  # of a writer that was killed
    _fill(other := tmp_path / "checkpoints" / f".{artifacts.new_folder()[1]}.0123.tmp", half=b"w")
    await artifacts.delete(name)
    await artifacts.delete(name)
    assert not folder.exists()
    assert list((tmp_path / "checkpoints").iterdir()) == [other]
    assert (outside / "precious").read_bytes() == b"z" * 5000


async def test_planted_link_is_refused_and_swept_without_its_target(artifacts: ArtifactStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    _fill(outside, precious=b"z")
    _, name = artifacts.new_folder()
    link = tmp_path / "checkpoints" / name
    link.symlink_to(outside)
    for use in (artifacts.size(name), artifacts.delete(name)):
        with pytest.raises(NotFound):
            await use
    assert await artifacts.sweep_incomplete([]) == [name]
    assert not link.is_symlink()
    assert (outside / "precious").exists()


def test_root_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        FolderArtifacts(tmp_path)


async def test_sweep_keeps_what_rows_name_and_what_is_not_ours(
    artifacts: ArtifactStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoints"
    kept, orphan, half = (artifacts.new_folder()[1] for _ in range(3))
    temporary = [f"{half}.tmp", f".{half}.tmp-1234", f"{half}-partial"]
    for name in (kept, orphan, *temporary, "lost+found"):
        _fill(root / name, file=b"x")
    (root / f"{half}.part").write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        swept = await artifacts.sweep_incomplete({kept})
    assert sorted(swept) == sorted([orphan, *temporary, f"{half}.part"])
    assert sorted(path.name for path in root.iterdir()) == sorted([kept, "lost+found"])
    assert "lost+found" in caplog.text
    assert await artifacts.size(kept) == 1


@pytest.mark.parametrize("links", [True, False])
async def test_a_copy_outlives_its_source(data_dir: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def no_links(*_: object) -> None:
        raise OSError("links are not supported here")

    if not links:
        monkeypatch.setattr("store.artifacts.os.link", no_links)
    artifacts = FolderArtifacts(data_dir)
    (_, source), (_, target) = artifacts.new_folder(), artifacts.new_folder()
    artifacts.path(source).mkdir()
    (artifacts.path(source) / "a").write_bytes(b"content")
    (artifacts.path(source) / "link").symlink_to("/etc/hostname")
    await artifacts.copy(source, target)
    assert ((artifacts.path(source) / "a").stat().st_nlink == 2) == links
    await artifacts.delete(source)
    assert {path.name: path.read_bytes() for path in artifacts.path(target).iterdir()} == {"a": b"content"}
    with pytest.raises(NotFound):
        await artifacts.copy(source, artifacts.new_folder()[1])
    assert [path.name for path in (data_dir / "checkpoints").iterdir()] == [target]


async def test_what_is_held_is_there_until_the_last_hold_ends_though_it_was_deleted(artifacts: ArtifactStore) -> None:
    _, name = artifacts.new_folder()
    folder = artifacts.path(name)
    _fill(folder, weights=b"x" * 1000)
    await artifacts.publish(name)
    first, second = artifacts.hold(name), artifacts.hold(name)
    await artifacts.retire(name)
    first()
    first()
    await asyncio.sleep(0)
    assert (folder / "weights").stat().st_size == 1000
    second()
    await artifacts.close()
    assert not folder.exists()


async def test_what_an_attempt_left_goes_though_its_writer_holds_it_and_the_next_attempt_stays(
    artifacts: ArtifactStore,
) -> None:
    _, name = artifacts.new_folder()
    folder = artifacts.path(name)
    release = artifacts.hold(name)
    for content in (b"x", b"y"):
        await artifacts.delete(name)
        _fill(folder, weights=content)
    await artifacts.publish(name)
    release()
    await artifacts.close()
    assert (folder / "weights").read_bytes() == b"y"
