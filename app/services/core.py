"""What every operation goes through, from its acceptance to its outcome, and how these parts are put together.

Responsible for what is kept, for operations and those who wait for them, for base models and training runs. Not
responsible for what the operations mean: that is built on top of it (`app/services/__init__.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import cached_property

from app.services.base_models import BaseModels
from app.services.completions import Completions
from app.services.folders import Folders
from app.services.futures import Futures
from app.services.history import ModelHistory
from app.services.leases import Leases
from app.services.observing import Observer
from app.services.operations import Operations
from app.services.run_metrics import RunMetrics
from app.services.runs import Runs
from app.services.service_settings import ServiceSettings, runtime_options
from app.services.tenant_limits import TenantLimits
from store.added_models import read_added
from store.artifact_place import open_artifacts
from store.artifacts import ArtifactStore
from store.bodies import Bodies
from store.database import Store
from store.files import make_private_folder
from store.snapshot_files import SnapshotFiles
from store.under_way import UnderWayFile
from workers.group import WorkerGroup
from workers.recovery import History
from workers.runtime_protocol import Runtime
from workers.under_way import Mark, UnderWay

GroupFactory = Callable[[str, str | None], WorkerGroup]
"""(served name, source) -> a group that is not started. source None = the built-in default model."""
Lost = Callable[[Sequence[str]], Awaitable[None]]
RuntimePlaces = Callable[[str, str | None, History, Lost], Runtime]
"""(served name, source, log and snapshots, whom to tell which models are lost) -> a runtime that is not started."""


def utc_now() -> datetime:
    """The time, aware UTC."""
    return datetime.now(UTC)


class Core:
    """The lower half of `Services`: each part is built once, with what it needs.

    Args:
        store: open.
        group_factory: makes the worker group of one base model.
        places: makes the runtime of one base model, if it is not in this process; then there are no groups here.
        observers: who measures operations.
        alone: no other server may use the database: the places are shared with whoever else computes there.
        clock: the time, aware UTC.
        new_id: makes request ids of at least 128 random bits.
        draw_seed: makes seeds, 0 to 2^63 - 1, for adapters whose client gave none.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        store: Store,
        group_factory: GroupFactory,
        *,
        places: RuntimePlaces | None = None,
        alone: bool = False,
        observers: Sequence[Observer] = (),
        clock: Callable[[], datetime] = utc_now,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.settings = settings
        self.store = store
        self.started = clock()
        self._group_factory = group_factory
        self._places = places
        self._alone = alone
        self._observers = observers
        self._clock = clock
        self._new_id = new_id
        self._draw_seed = draw_seed
        for name in dir(type(self)):
            if isinstance(getattr(type(self), name), cached_property):
                getattr(self, name)  # what cannot be built is told now, not at the first request

    # -- what is kept -------------------------------------------------------------------------------------------------
    @cached_property
    def bodies(self) -> Bodies:
        return Bodies(self.settings.data_dir)

    @cached_property
    def artifacts(self) -> ArtifactStore:
        return open_artifacts(
            self.settings.data_dir,
            self.settings.artifacts_url,
            endpoint=self.settings.artifacts_endpoint,
            region=self.settings.artifacts_region,
            timeout=self.settings.artifacts_timeout,
            cache_bytes=self.settings.artifacts_cache_bytes,
        )

    @cached_property
    def marked(self) -> UnderWayFile:
        make_private_folder(self.settings.scratch_dir)
        return UnderWayFile(self.settings.scratch_dir)

    @cached_property
    def under_way(self) -> UnderWay:
        def mark(now: Mark, durable: bool) -> None:
            self.marked.write(now.running, now.again, durable)

        return UnderWay(mark)

    @cached_property
    def leases(self) -> Leases | None:
        """Of a server that shares its database with others."""
        return None if self.store.shared is None else Leases(self.store, secrets.token_hex(8))

    # -- operations and their outcomes --------------------------------------------------------------------------------
    @cached_property
    def limits(self) -> TenantLimits:
        return TenantLimits(self.store, self.settings.default_limits, self._clock)

    @cached_property
    def operations(self) -> Operations:
        return Operations(
            self.store,
            self.bodies,
            folders=Folders(self.artifacts),
            new_id=self._new_id,
            clock=self._clock,
            wake=self._wake,
            limits=self.limits,
            leases=self.leases,
            observers=self._observers,
        )

    def _wake(self, request_id: str, scope: str | None) -> None:
        """Tell those who wait for an operation that it has an outcome."""
        self.futures.wake(request_id)
        self.completions.wake(scope)
        self.run_metrics.wake(scope)

    @cached_property
    def futures(self) -> Futures:
        return Futures(self.store, self.bodies, cancel=self.operations.cancel, clock=self._clock)

    @cached_property
    def completions(self) -> Completions:
        return Completions(self.store, self.bodies, self._clock)

    @cached_property
    def run_metrics(self) -> RunMetrics:
        return RunMetrics(self.store)

    @cached_property
    def history(self) -> ModelHistory:
        snapshots = SnapshotFiles(self.settings.data_dir)
        return ModelHistory(self.store, self.bodies, snapshots, self.operations, self._clock, self.leases)

    # -- base models and training runs --------------------------------------------------------------------------------
    @cached_property
    def runs(self) -> Runs:
        return Runs(self.store, self.models, self.operations, self._clock, self.leases)

    @cached_property
    def models(self) -> BaseModels:
        sources, tokenizers = dict(self.settings.base_models), dict(self.settings.tokenizers)
        for added in read_added(self.settings.data_dir):
            sources.setdefault(added.name, added.source)
            if added.tokenizer_id is not None:
                tokenizers.setdefault(added.name, added.tokenizer_id)
        return BaseModels(sources, tokenizers, self.settings.data_dir, self._make_runtime, self._models_lost)

    async def _models_lost(self, model_ids: Sequence[str]) -> None:
        await self.runs.mark_lost(model_ids)

    def _make_runtime(self, name: str, source: str | None, on_models_lost: Lost) -> Runtime:
        if self._places is not None:
            return self._places(name, source, self.history, on_models_lost)
        return runtime_options(self.settings).make(
            name,
            self._group_factory(name, source),
            history=self.history,
            on_models_lost=on_models_lost,
            under_way=self.under_way,
        )
