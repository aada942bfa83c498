"""How ranks that must take the same decisions at the same time stay together; one process alone has it easy.

Whatever a rank decides by its own clock, threads, disk or memory goes through here first. Not responsible for
gradients or weights (`engines/fsdp/group.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Lockstep(Protocol):
    """Every rank calls the same methods in the same order."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""

    def first(self, values: Sequence[int]) -> list[int]:
        """Rank 0's values; every rank gives as many."""

    def together(self, action: Callable[[], T], undo: Callable[[], object] | None = None) -> T:
        """Do something on every rank or on none: an error of one (`TinsmithError`) is raised on all.

        A rank that succeeded where another failed calls `undo`; without one the ranks would differ, and end.
        """

    def broken(self, error: Exception) -> None:
        """Called with a failure that other ranks may not have had: returns only where there are none."""


class Alone:
    """One process."""

    def any(self, flag: bool) -> bool:
        """Its own flag."""
        return flag

    def first(self, values: Sequence[int]) -> list[int]:
        """Its own values."""
        return list(values)

    def together(self, action: Callable[[], T], undo: Callable[[], object] | None = None) -> T:
        """Do it."""
        return action()

    def broken(self, error: Exception) -> None:
        """Nobody else has to know."""
