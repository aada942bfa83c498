"""The checkpoint folders that operations read and write: here when they run, kept before they count as saved.

Responsible for the way between the names in the log and places on this machine's disk. Not responsible for where
folders are kept (`store/artifacts.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from schemas.errors import NotFound, Unavailable
from schemas.operations import LoadWeights, Operation, Sample, SaveWeights
from store.artifacts import ArtifactStore, keep_nothing

WAIT_SECONDS = 20.0
"""How long a request is held while the folder that it reads is fetched; then it is to be sent again."""


class Folders:
    """Checkpoint folders by the names that the log has for them."""

    def __init__(self, artifacts: ArtifactStore) -> None:
        self._artifacts = artifacts

    def hold(self, name: str | None) -> Callable[[], None]:
        """Keep a folder on this machine until what this returns is called. None: there is nothing to keep."""
        return keep_nothing if name is None else self._artifacts.hold(name)

    def held(self, name: str | None) -> AbstractContextManager[object]:
        """The same as a context."""
        stack = ExitStack()
        stack.callback(self.hold(name))
        return stack

    def doing(self, *names: str | None) -> str | None:
        """What is being done with one of these folders, for people; None: nothing that takes long."""
        return next((text for name in names if name is not None and (text := self._artifacts.doing(name))), None)

    async def bring(self, name: str) -> None:
        """Have a folder here before a request that reads it is accepted.

        Raises:
            Unavailable: it is not here within `WAIT_SECONDS`; the fetching goes on.
            NotFound, EngineFailure: as `ArtifactStore.fetch`.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._artifacts.fetch(name)
        except TimeoutError:
            doing = self._artifacts.doing(name) or "it will be here soon"
            raise Unavailable(f"the checkpoint is not here yet ({doing})", hint="send the request again") from None

    async def publish(self, name: str) -> None:
        """Keep a folder that was written. Raises `EngineFailure`."""
        await self._artifacts.publish(name)

    async def placed(self, operation: Operation) -> Operation:
        """An operation with the name of its folder turned into a path for workers; what it reads is there.

        Raises: as `ArtifactStore.fetch`; `NotFound` too if it was deleted since it was accepted.
        """
        if isinstance(operation, SaveWeights):
            return replace(operation, folder=str(self._artifacts.path(operation.folder)))
        if isinstance(operation, LoadWeights):
            return replace(operation, folder=str(await self._fetched(operation.folder)))
        if isinstance(operation, Sample) and operation.adapter_folder is not None:
            return replace(operation, adapter_folder=str(await self._fetched(operation.adapter_folder)))
        return operation

    async def _fetched(self, name: str) -> Path:
        folder = await self._artifacts.fetch(name)
        if not folder.is_dir():
            raise NotFound("the weights were deleted or replaced before they were read", code="weights_deleted")
        return folder
