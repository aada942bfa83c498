"""Files that leave the server: which there are, where to fetch them, and who bears a signed address may have one.

Responsible for the way from a checkpoint to addresses and back to files. Not responsible for signatures
(`signed_urls.py`), for writing the export (engines) or for the form of archives (`archives.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from app.services.age_encryption import SUFFIX
from app.services.checkpoints import Checkpoints
from app.services.paths import CheckpointPath
from app.services.signed_urls import SignedUrls
from app.services.verified import VerifiedFiles
from engines.checkpoint_files import checksums
from schemas.errors import EngineFailure, InvalidRequest, NotFound
from store.artifacts import ArtifactStore
from store.records import CheckpointRecord

logger = logging.getLogger(__name__)

EXPORTED_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What a PEFT adapter is made of. Other files of a checkpoint folder are the server's own."""

ARCHIVE = "archive.tar"
"""The name under which all files of one checkpoint are fetched at once. No file has it."""


@dataclass(frozen=True, slots=True)
class Download:
    """What a signed address leads to: one file, or the files of an archive by their names in it."""

    files: Mapping[str, Path]
    is_archive: bool
    written: datetime
    release: Callable[[], None]
    """To be called when all files are open, or are not wanted any more: until then they stay."""


@dataclass(frozen=True, slots=True)
class OfferedFile:
    """A file that its owner may fetch: `address` is path and query below the root of the API."""

    name: str
    address: str
    size_bytes: int
    sha256: str | None


class Exports:
    """Hands out adapters, file by file or as an archive."""

    def __init__(self, checkpoints: Checkpoints, signed: SignedUrls, artifacts: ArtifactStore) -> None:
        self._checkpoints = checkpoints
        self._signed = signed
        self._artifacts = artifacts
        self._verified = VerifiedFiles()

    async def addresses(self, project_id: str, path: CheckpointPath) -> tuple[Mapping[str, str], datetime]:
        """File name -> address (path and query below the root of the API), and when the addresses end.

        Raises:
            InvalidRequest: the checkpoint is not an export.
            NotFound: no such checkpoint in this project.
        """
        record = await self._checkpoints.find(project_id, path, field="checkpoint_id")
        if record.kind != "external":
            raise InvalidRequest(
                f"checkpoint_id: {path.checkpoint_id!r} is not an export",
                field="checkpoint_id",
                hint="make one with save_weights_external; its id is external_weights/{name}",
            )
        expires = self._signed.expiry()
        return {name: self._signed.sign(record.checkpoint_id, name, expires) for name in files_of(record)}, expires

    async def files(self, project_id: str, path: CheckpointPath) -> tuple[Sequence[OfferedFile], datetime]:
        """The files of a checkpoint of any kind, each with its address, and when the addresses end.

        Raises:
            NotFound: no such checkpoint in this project, or its files are gone.
            Unavailable: the files cannot be had now.
        """
        record = await self._checkpoints.find(project_id, path, field="checkpoint_id")
        expires = self._signed.expiry()
        with ExitStack() as held:
            held.callback(self._artifacts.hold(record.folder))
            folder = await self._artifacts.fetch(record.folder)
            sums = {} if record.encrypted else await asyncio.to_thread(checksums, folder)
            try:
                sizes = {name: (folder / name).stat().st_size for name in files_of(record)}
            except FileNotFoundError:
                raise NotFound("these files are gone from the server's disk") from None
        offered = [
            OfferedFile(name, self._signed.sign(record.checkpoint_id, name, expires), size, sums.get(name))
            for name, size in sizes.items()
        ]
        return offered, expires

    async def archive_address(self, project_id: str, path: CheckpointPath) -> tuple[str, datetime]:
        """The address of a tar of the adapter's files, for checkpoints of every kind. Raises `NotFound`."""
        record = await self._checkpoints.find(project_id, path, field="checkpoint_id")
        expires = self._signed.expiry()
        return self._signed.sign(record.checkpoint_id, ARCHIVE, expires), expires

    async def download(self, checkpoint_id: str, name: str, expires: int, signature: str) -> Download:
        """What is behind a signed address; files must have their checksums, which `verified.py` compares before.

        Raises:
            NotFound: any other address, or the files are deleted.
            Unavailable: the files cannot be had now.
            EngineFailure: the files are damaged.
        """
        self._signed.check(checkpoint_id, name, expires, signature)
        record = await self._checkpoints.by_id(checkpoint_id)
        if record is None or name not in (*files_of(record), ARCHIVE):
            raise NotFound("these files were deleted")
        release = self._artifacts.hold(record.folder)
        try:
            files = await self._checked(record, files_of(record) if name == ARCHIVE else (name,))
        except BaseException:
            release()
            raise
        return Download(files, name == ARCHIVE, record.created_at, release)

    async def _checked(self, record: CheckpointRecord, names: Sequence[str]) -> Mapping[str, Path]:
        """The places of files that are whole. Raises as `download`."""
        checkpoint_id, folder = record.checkpoint_id, await self._artifacts.fetch(record.folder)
        files = {each: folder / each for each in names}
        if not all(path.is_file() for path in files.values()):
            raise NotFound("these files are gone from the server's disk")
        # What is encrypted carries a seal of its own, which only its recipient can check.
        problems = [] if record.encrypted else await self._verified.problems(folder, names)
        if problems and await self._checkpoints.by_id(checkpoint_id) is None:
            raise NotFound("these files were deleted")
        if problems:
            logger.error("checkpoint %s is damaged: %s", checkpoint_id, "; ".join(problems))
            raise EngineFailure(
                f"the checkpoint is damaged on the server's disk: {problems[0]}",
                hint="save it again, or ask the operator to restore it from a backup",
                code="damaged_checkpoint",
            )
        return files


def files_of(record: CheckpointRecord) -> Sequence[str]:
    """The files of a checkpoint that may leave the server. An encrypted one has no plain files."""
    return tuple(f"{name}{SUFFIX}" for name in EXPORTED_FILES) if record.encrypted else EXPORTED_FILES
