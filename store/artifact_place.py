"""Which place holds the checkpoints of a data folder: chosen once at start-up, and remembered in the folder.

Checkpoints that a row names must stay reachable, so a data folder whose checkpoints are in an object storage opens with
that storage only. Not responsible for the places themselves.
"""

from __future__ import annotations

from pathlib import Path

from schemas.errors import Unavailable
from store.artifacts import ArtifactStore, FolderArtifacts
from store.files import read_private, replace_private

PLACE_FILE = "artifacts_url"
"""In the data folder: where its checkpoints are; absent if they are in the folder itself."""


def recorded_place(data_dir: Path) -> str | None:
    """The object storage that has a data folder's checkpoints, as `s3://bucket/prefix`; None: the folder itself."""
    text = read_private(data_dir / PLACE_FILE)
    return None if text is None else text.decode("utf-8", "replace").strip()


def record_place(data_dir: Path, url: str) -> None:
    """Remember where the checkpoints are from now on."""
    replace_private(data_dir / PLACE_FILE, f"{url}\n".encode())


def open_artifacts(
    data_dir: Path, url: str | None, *, endpoint: str | None, region: str | None, timeout: float, cache_bytes: int
) -> ArtifactStore:
    """The place of the checkpoints of a data folder, which exists. Nothing is asked of an object storage yet.

    Args:
        url: `s3://bucket/prefix`, or None for the data folder.
        endpoint, region, timeout: see `StorageAddress`.
        cache_bytes: what copies on this machine may take.

    Raises:
        Unavailable: the checkpoints of this folder are elsewhere, or the library for object storage is not installed.
    """
    recorded = recorded_place(data_dir)
    if recorded is not None and recorded != url:
        raise Unavailable(
            f"the checkpoints of this data folder are in {recorded}, not in {url or 'the folder itself'}",
            hint=f"start with --artifacts-url {recorded}; after copying the objects elsewhere, remove {PLACE_FILE}",
            code="artifacts_elsewhere",
        )
    if url is None:
        return FolderArtifacts(data_dir)
    try:
        from store.object_artifacts import ObjectArtifacts
        from store.object_storage import ObjectStorage, StorageAddress
    except ImportError as error:
        raise Unavailable(
            "artifacts_url needs a library that is not installed", hint="install tinsmith with its extra s3"
        ) from error
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    address = StorageAddress(bucket, prefix, endpoint, region, timeout)
    return ObjectArtifacts(data_dir, address.url, ObjectStorage(address), cache_bytes=cache_bytes)
