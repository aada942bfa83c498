"""Who is served next, so that everybody gets the same amount of work: start-time fair queueing.

Pure: no clock and no tasks. Not responsible for what the keys are (projects, models) or what their work costs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Share:
    service: float
    charged: int
    """When it was served last, as a count of all charges: of equals, the one that waits longest comes first."""


class FairShare(Generic[K]):
    """Keys by the service that they have had. A key takes part from `enter` to `leave`.

    The key with the least service is next. A key that enters starts at the least service of those that are in, for
    time without work earns no credit; one that was ahead of the others stays so, for leaving and entering again
    forgives nothing.
    """

    def __init__(self) -> None:
        self._active: dict[K, _Share] = {}
        self._idle: dict[K, _Share] = {}
        """Keys that left with more service than those that stayed."""
        self._floor = 0.0
        self._charges = 0

    def __contains__(self, key: K) -> bool:
        return key in self._active

    def __len__(self) -> int:
        return len(self._active)

    def enter(self, key: K) -> None:
        """The key has work from now on."""
        if key in self._active:
            return
        self._settle()
        self._active[key] = self._idle.pop(key) if key in self._idle else _Share(self._floor, 0)

    def leave(self, key: K) -> None:
        """The key has no work for the time being."""
        self._settle()
        share = self._active.pop(key, None)
        if share is not None:
            self._idle[key] = share
            self._settle()

    def forget(self, key: K) -> None:
        """The key will not come back."""
        self.leave(key)
        self._idle.pop(key, None)

    def charge(self, key: K, amount: float) -> None:
        """Note service of a key that is in."""
        self._charges += 1
        share = self._active[key]
        share.service += amount
        share.charged = self._charges

    def order(self) -> list[K]:
        """The keys that are in, next first."""
        return sorted(self._active, key=lambda key: (self._active[key].service, self._active[key].charged))

    def ahead(self, key: K) -> float:
        """How much service the others get before this key is next, if they have that much work."""
        mine = self._active[key].service
        return sum(max(0.0, mine - share.service) for share in self._active.values())

    def _settle(self) -> None:
        """Raise the floor to the least service of those that are in (to the most of all, when a busy time has ended),
        and forget who would start there anyway."""
        if self._active:
            reached = min(share.service for share in self._active.values())
        else:
            reached = max((share.service for share in self._idle.values()), default=0.0)
        self._floor = max(self._floor, reached)
        self._idle = {key: share for key, share in self._idle.items() if share.service > self._floor}
