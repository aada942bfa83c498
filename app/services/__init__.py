"""The services behind the resource routes, and how they are put together.

Responsible for building every service once, with what it needs passed in, and for starting and stopping them in the
right order. Not responsible for HTTP (`app/routes`) or for reading settings (`app/settings.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from app.services.audit import Audit
from app.services.base_models import BaseModels
from app.services.catalog import Catalog
from app.services.checkpoints import Checkpoints
from app.services.completions import Completions
from app.services.copies import Copies
from app.services.custom_losses import CustomLosses
from app.services.doors.anthropic import AnthropicDoor
from app.services.doors.models import DoorModels
from app.services.doors.openai import OpenAIDoor
from app.services.doors.runs import DoorRun
from app.services.exports import Exports
from app.services.folders import Folders
from app.services.futures import Futures
from app.services.history import ModelHistory
from app.services.housekeeping import Housekeeping
from app.services.leases import Leases
from app.services.operations import Operations
from app.services.ownership import Ownership
from app.services.recovery import Recovery
from app.services.runs import Runs
from app.services.sampling import Sampling
from app.services.signed_urls import SignedUrls, load_secret
from app.services.stability import Stability
from app.services.tokens import Tokens
from app.services.traces import Traces
from app.services.training import Training
from app.services.usage import Usage
from app.services.weights import Weights
from engines.registry import capabilities
from store.added_models import read_added
from store.artifact_place import open_artifacts
from store.artifacts import ArtifactStore
from store.bodies import Bodies
from store.database import Store
from store.files import make_private_folder
from store.notices import Notices
from store.snapshot_files import SnapshotFiles
from store.under_way import UnderWayFile
from workers.group import WorkerGroup
from workers.recovery import History
from workers.runtime_options import RuntimeOptions
from workers.runtime_protocol import Runtime
from workers.snapshots import SnapshotPolicy
from workers.under_way import Mark, UnderWay

GroupFactory = Callable[[str, str | None], WorkerGroup]
"""(served name, source) -> a group that is not started. source None = the built-in default model."""
Lost = Callable[[Sequence[str]], Awaitable[None]]
RuntimePlaces = Callable[[str, str | None, History, Lost], Runtime]
"""(served name, source, log and snapshots, whom to tell which models are lost) -> a runtime that is not started."""
DEPLOY_ALLOWANCE = 180.0
"""Seconds that the way to a base model may take before its worker begins to load it, on a cluster."""


class ServiceSettings(Protocol):
    """What the services read of the settings (units: seconds unless the name says otherwise)."""

    @property
    def data_dir(self) -> Path: ...
    @property
    def scratch_dir(self) -> Path:
        """A folder of this server alone."""
        ...

    @property
    def base_models(self) -> dict[str, str | None]:
        """Served name -> source (a local folder, a hub id, or None for the built-in default)."""
        ...

    @property
    def tokenizers(self) -> dict[str, str]:
        """Served name -> what get_info reports as tokenizer_id, for names that should not be derived."""
        ...

    @property
    def artifacts_url(self) -> str | None: ...
    @property
    def artifacts_endpoint(self) -> str | None: ...
    @property
    def artifacts_region(self) -> str | None: ...
    @property
    def artifacts_timeout(self) -> float: ...
    @property
    def artifacts_cache_bytes(self) -> int: ...
    @property
    def engine(self) -> str: ...
    @property
    def max_rank(self) -> int: ...
    @property
    def max_adapters(self) -> int: ...
    @property
    def max_request_tokens(self) -> int: ...
    @property
    def max_sample_rows(self) -> int: ...
    @property
    def max_sample_tokens(self) -> int: ...
    @property
    def max_waiting_samples(self) -> int: ...
    @property
    def decode_slice(self) -> int: ...
    @property
    def turn_timeout(self) -> float:
        """0 = no limit."""
        ...

    @property
    def restart_limit(self) -> int: ...
    @property
    def death_limit(self) -> int: ...
    @property
    def snapshot_operations(self) -> int: ...
    @property
    def snapshot_seconds(self) -> float: ...
    @property
    def snapshot_mib(self) -> int: ...
    @property
    def snapshot_share(self) -> float:
        """Part of the time, 0 to 1."""
        ...

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
    def log_retention(self) -> float: ...
    @property
    def stability_retention(self) -> float: ...
    @property
    def sweep_interval(self) -> float: ...
    @property
    def edge_lease(self) -> float: ...
    @property
    def token_lifetime(self) -> float: ...
    @property
    def worker_start_timeout(self) -> float: ...
    @property
    def shutdown_grace(self) -> float: ...


@dataclass(frozen=True)
class Services:
    """Everything the routes need. One per process; lives as `app.state.services`."""

    settings: ServiceSettings
    store: Store
    artifacts: ArtifactStore
    models: BaseModels
    catalog: Catalog
    operations: Operations
    futures: Futures
    completions: Completions
    stability: Stability
    runs: Runs
    training: Training
    custom_losses: CustomLosses
    weights: Weights
    sampling: Sampling
    checkpoints: Checkpoints
    exports: Exports
    copies: Copies
    housekeeping: Housekeeping
    recovery: Recovery
    ownership: Ownership | None
    """Of a server that shares its database with others."""
    audit: Audit
    usage: Usage
    traces: Traces
    tokens: Tokens
    door_models: DoorModels
    openai: OpenAIDoor
    anthropic: AnthropicDoor
    under_way: UnderWay
    marked: UnderWayFile

    async def start(self) -> None:
        """Recover from an earlier process, then start the runtimes (in the background) and the sweeper."""
        if self.ownership is None:
            await self.recovery.run()
        else:
            await self.ownership.start()
        await self.models.start()
        await self.housekeeping.start()

    async def stop(self, grace: float) -> None:
        """Stop sweeping, drain the runtimes within `grace` seconds, end the worker groups. The store stays open."""
        await self.housekeeping.stop()
        await self.under_way.end()
        self.marked.close()
        self.operations.stopping()
        over = asyncio.get_running_loop().call_later(grace, self.artifacts.give_up)
        if self.ownership is not None:
            self.ownership.leaving()
        await self.models.stop(grace)
        over.cancel()
        await self.operations.retry_unsettled()
        if self.ownership is not None:
            await self.ownership.stop()
        # Polls are held until here: a client whose polls return at once asks hundreds of times a second.
        self.futures.wake_all()
        self.completions.close()
        await self.artifacts.close()


def utc_now() -> datetime:
    """The time, aware UTC."""
    return datetime.now(UTC)


def runtime_options(settings: ServiceSettings) -> RuntimeOptions:
    """How every runtime works."""
    return RuntimeOptions(
        gap_timeout=settings.gap_timeout,
        max_adapters=settings.max_adapters,
        max_sample_rows=settings.max_sample_rows,
        decode_slice=settings.decode_slice,
        turn_timeout=settings.turn_timeout or None,
        restart_limit=settings.restart_limit,
        death_limit=settings.death_limit,
        snapshots=SnapshotPolicy(
            operations=settings.snapshot_operations,
            seconds=settings.snapshot_seconds,
            size_bytes=settings.snapshot_mib << 20,
            share=settings.snapshot_share,
        ),
    )


def build_services(
    settings: ServiceSettings,
    store: Store,
    group_factory: GroupFactory,
    *,
    places: RuntimePlaces | None = None,
    alone: bool = False,
    clock: Callable[[], datetime] = utc_now,
    new_id: Callable[[], str] = lambda: secrets.token_hex(16),
    draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
) -> Services:
    """Put the services together on an open store. Nothing runs before `Services.start`.

    Args:
        group_factory: makes the worker group of one base model.
        places: makes the runtime of one base model, if it is not in this process; then there are no groups here.
        alone: no other server may use the database: the places are shared with whoever else computes there.
        clock: the time, aware UTC.
        new_id: makes request ids of at least 128 random bits.
        draw_seed: makes seeds, 0 to 2^63 - 1, for adapters whose client gave none.
    """
    bodies = Bodies(settings.data_dir)
    artifacts = open_artifacts(
        settings.data_dir,
        settings.artifacts_url,
        endpoint=settings.artifacts_endpoint,
        region=settings.artifacts_region,
        timeout=settings.artifacts_timeout,
        cache_bytes=settings.artifacts_cache_bytes,
    )
    completions = Completions(store, bodies, clock)
    futures = Futures(store, bodies, cancel=lambda request_id: operations.cancel(request_id), clock=clock)

    def wake(request_id: str, scope: str | None) -> None:
        futures.wake(request_id)
        completions.wake(scope)

    leases = None if store.shared is None else Leases(store, secrets.token_hex(8))
    operations = Operations(
        store,
        bodies,
        folders=Folders(artifacts),
        new_id=new_id,
        clock=clock,
        wake=wake,
        leases=leases,
    )

    history = ModelHistory(store, bodies, SnapshotFiles(settings.data_dir), operations, clock, leases)

    make_private_folder(settings.scratch_dir)
    marked = UnderWayFile(settings.scratch_dir)

    def mark(now: Mark, durable: bool) -> None:
        marked.write(now.running, now.again, durable)

    under_way = UnderWay(mark)

    async def models_lost(model_ids: Sequence[str]) -> None:
        await runs.mark_lost(model_ids)

    def make_runtime(name: str, source: str | None, on_models_lost: Lost) -> Runtime:
        if places is not None:
            return places(name, source, history, on_models_lost)
        group = group_factory(name, source)
        return runtime_options(settings).make(
            name, group, history=history, on_models_lost=on_models_lost, under_way=under_way
        )

    sources, tokenizers = dict(settings.base_models), dict(settings.tokenizers)
    for added in read_added(settings.data_dir):
        sources.setdefault(added.name, added.source)
        if added.tokenizer_id is not None:
            tokenizers.setdefault(added.name, added.tokenizer_id)
    models = BaseModels(sources, tokenizers, settings.data_dir, make_runtime, models_lost)
    runs = Runs(store, models, operations, clock, leases)
    checkpoints = Checkpoints(store, artifacts, clock)
    stability = Stability(store, settings.stability_retention, clock)
    custom_losses = CustomLosses(store, new_id=new_id, clock=clock)
    can = capabilities(settings.engine)
    training = Training(
        store=store,
        models=models,
        operations=operations,
        runs=runs,
        stability=stability,
        custom_losses=custom_losses,
        capabilities=can,
        max_rank=settings.max_rank,
        max_request_tokens=settings.max_request_tokens,
        draw_seed=draw_seed,
        clock=clock,
    )
    signed = SignedUrls(load_secret(settings.data_dir / "url_secret"), clock)
    weights = Weights(
        store=store,
        models=models,
        operations=operations,
        runs=runs,
        checkpoints=checkpoints,
        capabilities=can,
        clock=clock,
    )
    sampling = Sampling(
        store=store,
        bodies=bodies,
        models=models,
        operations=operations,
        checkpoints=checkpoints,
        stability=stability,
        max_sample_tokens=settings.max_sample_tokens,
        max_waiting_samples=settings.max_waiting_samples,
        clock=clock,
    )

    async def sweeps() -> bool:
        return ownership is not None and await ownership.sweeps()

    housekeeping = Housekeeping(
        store=store,
        bodies=bodies,
        operations=operations,
        futures=futures,
        runs=runs,
        saved=checkpoints,
        artifacts=artifacts,
        stability=stability,
        history=history,
        interval=settings.sweep_interval,
        session_timeout=settings.session_timeout,
        keep_delivered=settings.keep_delivered,
        keep_undelivered=settings.keep_undelivered,
        keep_lines=settings.log_retention,
        clock=clock,
        sweeps=None if leases is None else sweeps,
    )
    recovery = Recovery(
        store=store,
        bodies=bodies,
        artifacts=artifacts,
        models=models,
        operations=operations,
        runs=runs,
        training=training,
        weights=weights,
        sampling=sampling,
        history=history,
        under_way=marked,
    )
    ownership = None
    if leases is not None and store.shared is not None:
        ownership = Ownership(
            store=store,
            leases=leases,
            seconds=settings.edge_lease,
            alone=alone,
            make_notices=partial(Notices, store.shared),
            bodies=bodies,
            artifacts=artifacts,
            models=models,
            operations=operations,
            runs=runs,
            recovery=recovery,
            futures=futures,
            completions=completions,
        )
    door_models = DoorModels(models, sampling, checkpoints)

    def make_run(project_id: str) -> DoorRun:
        return DoorRun(sampling, futures, operations.cancel, project_id)

    return Services(
        settings=settings,
        store=store,
        artifacts=artifacts,
        models=models,
        catalog=Catalog(
            store,
            models,
            runs,
            settings.data_dir,
            start_timeout=settings.worker_start_timeout + DEPLOY_ALLOWANCE,
            grace=settings.shutdown_grace,
        ),
        operations=operations,
        futures=futures,
        completions=completions,
        stability=stability,
        runs=runs,
        training=training,
        custom_losses=custom_losses,
        weights=weights,
        sampling=sampling,
        checkpoints=checkpoints,
        exports=Exports(checkpoints, signed, artifacts),
        copies=Copies(store, checkpoints, new_id=new_id, clock=clock),
        housekeeping=housekeeping,
        recovery=recovery,
        ownership=ownership,
        audit=Audit(store, clock),
        usage=Usage(store, clock),
        traces=Traces(store, signed, housekeeping.write_activity, clock),
        tokens=Tokens(load_secret(settings.data_dir / "token_secret"), settings.token_lifetime, clock),
        door_models=door_models,
        openai=OpenAIDoor(door_models, make_run),
        anthropic=AnthropicDoor(door_models, make_run),
        under_way=under_way,
        marked=marked,
    )
