"""Copies on this machine's disk of checkpoint folders that are in an object storage: those not in use make room.

Responsible for which copies there are, how long each was not used, and for what leaves. Not responsible for getting
them (`store/object_artifacts.py`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

_log = logging.getLogger(__name__)


class LocalCopies:
    """Folders that are here and in the storage.

    Args:
        path: where a folder is on the disk.
        most_bytes: what copies may take together. Those that are held, or were used within `recent` seconds, stay.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        path: Callable[[str], Path],
        *,
        held: Callable[[str], bool],
        most_bytes: int,
        recent: float,
        clock: Callable[[], float],
    ) -> None:
        self._path = path
        self._held = held
        self._most_bytes = most_bytes
        self._recent = recent
        self._clock = clock
        self._copies: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Bytes, and when last used; the one used longest ago first."""

    def __contains__(self, folder_name: str) -> bool:
        return folder_name in self._copies

    def use(self, folder_name: str) -> None:
        """Somebody is about to read a copy that is here."""
        size, _ = self._copies.pop(folder_name)
        self._copies[folder_name] = (size, self._clock())

    async def add(self, folder_name: str, size: int) -> None:
        """A folder of so many bytes is here, too, and just used."""
        self._copies[folder_name] = (size, self._clock())
        await self.make_room(0)

    def forget(self, folder_name: str) -> None:
        """A folder is not here any more, or not in the storage."""
        self._copies.pop(folder_name, None)

    async def found(self, sizes: Mapping[str, int]) -> None:
        """At a start: the folders that are here, the oldest first, with their bytes. None was used lately."""
        used = self._clock() - self._recent
        self._copies = OrderedDict((name, (size, used)) for name, size in sizes.items())
        await self.make_room(0)

    async def make_room(self, wanted: int) -> None:
        """Remove copies, the longest unused first, until `wanted` more bytes fit, as far as nobody needs them."""
        total, before = sum(size for size, _ in self._copies.values()) + wanted, self._clock() - self._recent
        gone = []
        for name, (size, used) in list(self._copies.items()):
            if total <= self._most_bytes:
                break
            if self._held(name) or used > before:
                continue
            path = self._path(name)
            aside = path.with_name(f".{name}.{secrets.token_hex(8)}.tmp")
            del self._copies[name]
            total -= size
            try:
                path.rename(aside)  # at once: whoever looks next finds it whole or not at all
            except OSError as error:
                _log.warning("a copy of a checkpoint cannot be removed (%s)", error.strerror)
                continue
            gone.append(aside)
        for aside in gone:
            await asyncio.to_thread(shutil.rmtree, aside, True)
