"""Saved adapters in memory: read from their folders beside the work, shared by requests, the least used go first.

Not responsible for the format of the folders (`peft_format`).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

from engines.lockstep import Lockstep
from engines.lora import AdapterWeights
from schemas.errors import EngineFailure, TinsmithError

_log = logging.getLogger(__name__)


class AdapterCache:
    """Keeps up to `capacity` adapters. One that is in use is never dropped, even if that exceeds the capacity.

    A checkpoint folder never changes, so its path is key enough. Folders are read one at a time by a thread of its own,
    so that a running batch does not wait for the disk; with `lockstep` at once, on all ranks or on none.
    """

    def __init__(self, load: Callable[[Path], AdapterWeights], capacity: int, lockstep: Lockstep | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1")
        self._load = load
        self._capacity = capacity
        self._loaded: OrderedDict[str, AdapterWeights] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._reading: dict[str, Future[AdapterWeights]] = {}
        self._lockstep = lockstep
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")

    @property
    def loaded(self) -> tuple[str, ...]:
        """Folders in memory, least recently used first."""
        return tuple(self._loaded)

    def ask(self, folder: str) -> bool:
        """Begin to read a folder, unless it is here; whether `acquire` would return at once."""
        if folder in self._loaded:
            return True
        if folder not in self._reading:
            if self._lockstep is None:
                self._reading[folder] = self._reader.submit(self._read, folder)
            else:
                together = self._lockstep.together
                self._reading[folder] = self._reader.submit(together, lambda: self._read(folder), lambda: None)
                wait_for([self._reading[folder]])
        return self._reading[folder].done()

    def wait(self, seconds: float) -> None:
        """Wait until one more folder was read, if any is being read."""
        unfinished = [future for future in self._reading.values() if not future.done()]
        wait_for(unfinished, timeout=seconds, return_when=FIRST_COMPLETED)

    def forget(self, folder: str) -> None:
        """Nobody will `acquire` what was asked for: what is read, or why it could not be, is not kept."""
        future = self._reading.pop(folder, None)
        if future is not None:
            future.cancel()

    def acquire(self, folder: str) -> AdapterWeights:
        """The adapter of a folder; pair each call with `release`. Raises a `TinsmithError` that names no path."""
        if not self.ask(folder) or folder not in self._loaded:
            weights = self._reading[folder].exception() or self._reading[folder].result()
            del self._reading[folder]
            if isinstance(weights, BaseException):
                raise weights
            self._make_room()
            self._loaded[folder] = weights
        self._loaded.move_to_end(folder)
        self._users[folder] += 1
        return self._loaded[folder]

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
