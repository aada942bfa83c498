"""The services behind the resource routes, and how they are put together.

Responsible for building every service once, with what it needs passed in, and for starting and stopping them in the
right order. Not responsible for HTTP (`app/routes`) or for reading settings (`app/settings.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from workers.group import WorkerGroup

if TYPE_CHECKING:
    from app.services.base_models import BaseModels
    from app.services.checkpoints import Checkpoints
    from app.services.futures import Futures
    from app.services.housekeeping import Housekeeping
    from app.services.operations import Operations
    from app.services.sampling import Sampling
    from app.services.training import Training
    from store.database import Store

GroupFactory = Callable[[str, str | None], WorkerGroup]
"""(served name, source) -> a group that is not started. source None = the built-in default model."""


class ServiceSettings(Protocol):
    """What the services read of the settings (units: seconds unless the name says otherwise)."""

    @property
    def data_dir(self) -> Path: ...
    @property
    def base_models(self) -> dict[str, str | None]:
        """Served name -> source (a local folder, a hub id, or None for the built-in default)."""
        ...

    @property
    def tokenizers(self) -> dict[str, str]:
        """Served name -> what get_info reports as tokenizer_id, for names that should not be derived."""
        ...

    @property
    def max_rank(self) -> int: ...
    @property
    def max_adapters(self) -> int: ...
    @property
    def max_sample_rows(self) -> int: ...
    @property
    def gap_timeout(self) -> float: ...
    @property
    def poll_hold(self) -> float: ...
    @property
    def session_timeout(self) -> float: ...
    @property
    def keep_delivered(self) -> float: ...
    @property
    def keep_undelivered(self) -> float: ...
    @property
    def sweep_interval(self) -> float: ...


@dataclass(frozen=True)
class Services:
    """Everything the routes need. One per process; lives as `app.state.services`."""

    settings: ServiceSettings
    store: Store
    models: BaseModels
    operations: Operations
    futures: Futures
    training: Training
    sampling: Sampling
    checkpoints: Checkpoints
    housekeeping: Housekeeping

    async def start(self) -> None:
        """Recover from an earlier process, then start the runtimes (in the background) and the sweeper."""
        await self.housekeeping.recover()
        await self.models.start()
        await self.housekeeping.start()

    async def stop(self, grace: float) -> None:
        """Stop sweeping, drain the runtimes within `grace` seconds, end the worker groups. The store stays open."""
        await self.housekeeping.stop()
        self.futures.wake_all()
        await self.models.stop(grace)

    async def close_session(self, session_id: str) -> None:
        """A session is finished or expired: free its adapters and cancel its samples (the caller updated its row)."""
        await self.training.close_session(session_id)
