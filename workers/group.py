"""The seam between scheduling and execution: a group of worker ranks that are called together.

The runtime and the scheduler do not know which implementation they are on: child processes (`workers/local.py`),
or, on a cluster, actors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from schemas.base_model_info import BaseModelInfo
from schemas.errors import TinsmithError


class WorkerGroup(Protocol):
    """All ranks of one base model. Calls are dispatched to every rank (`ONE_TO_ALL`) in the order they are made."""

    @property
    def progress(self) -> str | None:
        """One short phrase about what is being loaded while `start` runs; None when there is nothing to tell."""
        ...

    async def start(self) -> BaseModelInfo:
        """Spawn the ranks and load the base model; bounded in time. Raises `Unavailable` with the reason."""
        ...

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `method` on every rank; returns rank 0's value.

        Raises what the method raised (a `TinsmithError`), or `WorkerDied` if a rank ended meanwhile.
        """
        ...

    async def ping(self, timeout: float) -> bool:  # noqa: ASYNC109 (a plain number crosses to any transport)
        """Whether every rank's process lives and (when idle) answers within `timeout` seconds."""
        ...

    async def stop(self) -> None:
        """End all ranks; idempotent. Pending calls raise `WorkerDied`."""
        ...

    def on_death(self, callback: Callable[[TinsmithError], None]) -> None:
        """Register what to call (in the event loop) each time the group is lost because a rank died unasked.

        Called once for each loss, before the pending calls fail. `stop` and `start` then bring the group back.
        """
        ...
