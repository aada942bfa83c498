"""Models whose next operation found no room among the adapters in the worker's memory.

Pure. Not responsible for who has the room (`engines/torch_engine/adapter_pool.py`).
"""

from __future__ import annotations

from collections import Counter

PATIENCE = 3
"""How often an operation may find no room before nothing else begins until it has run: an adapter that needs the room
of several others would never get it while others take each place that becomes free."""


class Parked:
    """A parked model is not tried again until something has ended."""

    def __init__(self) -> None:
        self._parked: set[str] = set()
        self._refusals: Counter[str] = Counter()

    def add(self, model_id: str) -> None:
        """Its next operation found no room."""
        self._parked.add(model_id)
        self._refusals[model_id] += 1

    def freed(self) -> None:
        """Something has ended: there may be room."""
        self._parked.clear()

    def passed(self, model_id: str) -> None:
        """The operation has found room, or is not going to run."""
        self._parked.discard(model_id)
        del self._refusals[model_id]

    def clear(self) -> None:
        """The worker begins anew."""
        self._parked.clear()
        self._refusals.clear()

    def blocks(self, model_id: str) -> bool:
        """Whether no operation of the model may begin now."""
        if model_id in self._parked:
            return True
        return self._refusals[model_id] < PATIENCE and any(count >= PATIENCE for count in self._refusals.values())
