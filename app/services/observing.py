"""Who watches operations go by, for metrics and traces. Not responsible for what becomes of them."""

from __future__ import annotations

from typing import Protocol

from workers.tickets import TurnNote


class Observer(Protocol):
    """Told of each operation where it is on its way. Called in the event loop; must return at once and not raise."""

    def accepted(self, request_id: str, kind: str, base_model: str, began: float) -> None:
        """It is in the log. `began`: when its acceptance began, seconds since 1970."""
        ...

    def queued(self, request_id: str, kind: str, base_model: str) -> None:
        """A runtime has it: new, or left over from an earlier process."""
        ...

    def started(self, request_id: str) -> None:
        """It begins to run; more than once if it had to begin again."""
        ...

    def turn(self, request_id: str, note: TurnNote) -> None:
        """A turn has ended that computed a part of it (in this process only)."""
        ...

    def computed(self, request_id: str) -> None:
        """It has an outcome, which is now made durable."""
        ...

    def settled(self, request_id: str, code: str | None) -> None:
        """Its outcome is durable. `code`: of its failure; None for a success."""
        ...

    def dropped(self, request_id: str) -> None:
        """Another server settles it."""
        ...
