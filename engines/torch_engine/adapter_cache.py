"""Saved adapters in memory: loaded from their folders on demand, shared by requests, the least recently used go first.

Not responsible for the format of the folders (`peft_format`).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

from engines.lora import AdapterWeights
from schemas.errors import EngineFailure, TinsmithError

_log = logging.getLogger(__name__)


class AdapterCache:
    """Keeps up to `capacity` adapters. One that is in use is never dropped, even if that exceeds the capacity.

    A checkpoint folder never changes, so its path is key enough.
    """

    def __init__(self, load: Callable[[Path], AdapterWeights], capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1")
        self._load = load
        self._capacity = capacity
        self._loaded: OrderedDict[str, AdapterWeights] = OrderedDict()
        self._users: Counter[str] = Counter()

    @property
    def loaded(self) -> tuple[str, ...]:
        """Folders in memory, least recently used first."""
        return tuple(self._loaded)

    def acquire(self, folder: str) -> AdapterWeights:
        """The adapter of a folder; pair each call with `release`. Raises a `TinsmithError` that names no path."""
        weights = self._loaded.get(folder)
        if weights is None:
            self._make_room()
            weights = self._loaded[folder] = self._read(folder)
        self._loaded.move_to_end(folder)
        self._users[folder] += 1
        return weights

    def release(self, folder: str) -> None:
        """End one use."""
        self._users[folder] -= 1
        if self._users[folder] <= 0:
            del self._users[folder]
        if len(self._loaded) > self._capacity:
            self._make_room(extra=0)

    def _make_room(self, extra: int = 1) -> None:
        for folder in [name for name in self._loaded if not self._users[name]]:
            if len(self._loaded) + extra <= self._capacity:
                return
            del self._loaded[folder]

    def _read(self, folder: str) -> AdapterWeights:
        try:
            return self._load(Path(folder))
        except TinsmithError:
            raise
        except Exception as error:
            _log.exception("adapter folder could not be loaded")
            raise EngineFailure(
                f"the adapter checkpoint cannot be read ({type(error).__name__})",
                hint="save the weights again and make a new sampler from them",
            ) from error
