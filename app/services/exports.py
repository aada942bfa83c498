"""Exported files: which there are, where to fetch them, and letting the bearer of a signed address have one.

Responsible for the way from an `external_weights` path to addresses and back to files. Not responsible for signatures
(`signed_urls.py`) or for writing the export (engines).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from app.services.checkpoints import Checkpoints
from app.services.paths import CheckpointPath
from app.services.signed_urls import SignedUrls
from schemas.errors import InvalidRequest, NotFound

EXPORTED_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What a PEFT adapter is made of. Other files of a checkpoint folder are the server's own."""


class Exports:
    """Hands out exported adapters, file by file. `folder_path` gives the place of a folder name on disk."""

    def __init__(self, checkpoints: Checkpoints, signed: SignedUrls, folder_path: Callable[[str], Path]) -> None:
        self._checkpoints = checkpoints
        self._signed = signed
        self._folder_path = folder_path

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
        return {name: self._signed.sign(record.checkpoint_id, name, expires) for name in EXPORTED_FILES}, expires

    async def file(self, checkpoint_id: str, name: str, expires: int, signature: str) -> Path:
        """The file behind a signed address. Raises `NotFound` for any other address, and once the export is deleted."""
        self._signed.check(checkpoint_id, name, expires, signature)
        folder = await self._checkpoints.folder_of(checkpoint_id)
        if folder is None or name not in EXPORTED_FILES:
            raise NotFound("this export was deleted")
        return self._folder_path(folder) / name
