"""When keys were last used: noted on every request, written now and then. Not responsible for writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime


class KeyUses:
    """Collects uses of keys in memory. `clock` is the time, aware UTC."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._last: dict[str, datetime] = {}

    def note(self, key_id: str) -> None:
        """The key let somebody in just now."""
        self._last[key_id] = self._clock()

    def take(self) -> dict[str, datetime]:
        """Key id -> last use, of all keys that were used since the last call."""
        taken, self._last = self._last, {}
        return taken

    def give_back(self, taken: Mapping[str, datetime]) -> None:
        """What was taken could not be written; later uses stay."""
        self._last = {**taken, **self._last}
