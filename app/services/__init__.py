"""The services behind the resource routes, and how they are put together.

Responsible for building every service once, with what it needs passed in, and for starting and stopping them in the
right order. Not responsible for HTTP (`app/routes`) or for reading settings (`app/settings`).
"""

from __future__ import annotations

import asyncio
from functools import cached_property, partial

from app.services.access import AccessTokens
from app.services.audit import Audit
from app.services.catalog import Catalog
from app.services.checkpoints import Checkpoints
from app.services.copies import Copies
from app.services.core import Core
from app.services.custom_losses import CustomLosses
from app.services.doors.anthropic import AnthropicDoor
from app.services.doors.models import DoorModels
from app.services.doors.openai import OpenAIDoor
from app.services.doors.runs import DoorRun
from app.services.exports import Exports
from app.services.housekeeping import Housekeeping
from app.services.imports import Imports
from app.services.key_uses import KeyUses
from app.services.limit_report import LimitReport
from app.services.loads import Loads
from app.services.ownership import Ownership
from app.services.project_keys import ProjectKeys
from app.services.queue import Queue
from app.services.recovery import Recovery
from app.services.samplers import Samplers
from app.services.sampling import Sampling
from app.services.saves import Saves
from app.services.signed_urls import SignedUrls, load_secret
from app.services.stability import Stability
from app.services.tenancy import Tenancy
from app.services.tokens import Tokens
from app.services.traces import Traces
from app.services.training import Training
from app.services.usage import Usage
from engines.registry import capabilities
from store.notices import Notices

DEPLOY_ALLOWANCE = 180.0
"""Seconds that the way to a base model may take before its worker begins to load it, on a cluster."""


class Services(Core):
    """Everything the routes need: each service is built once, with what it needs. Lives as `app.state.services`.

    Nothing runs before `start`. The arguments are those of `Core`.
    """

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
        await self.recovery.stop()
        await self.under_way.end()
        self.marked.close()
        await self.operations.stopping()
        self.run_metrics.close()
        over = asyncio.get_running_loop().call_later(grace, self.artifacts.give_up)
        if self.ownership is not None:
            self.ownership.leaving()
        await self.models.stop(grace)
        over.cancel()
        await self.operations.settling.retry_unsettled()
        if self.ownership is not None:
            await self.ownership.stop()
        # Polls are held until here: a client whose polls return at once asks hundreds of times a second.
        self.futures.wake_all()
        self.completions.close()
        await self.artifacts.close()

    # -- training -----------------------------------------------------------------------------------------------------
    @cached_property
    def catalog(self) -> Catalog:
        return Catalog(
            self.store,
            self.models,
            self.runs,
            self.settings.data_dir,
            on_served=self.recovery.serve,
            start_timeout=self.settings.worker_start_timeout + DEPLOY_ALLOWANCE,
            grace=self.settings.shutdown_grace,
        )

    @cached_property
    def queue(self) -> Queue:
        return Queue(self.store, self.operations, self._clock)

    @cached_property
    def custom_losses(self) -> CustomLosses:
        most = self.settings.max_custom_loss_mib << 20
        return CustomLosses(self.store, max_bytes=most, new_id=self._new_id, clock=self._clock)

    @cached_property
    def training(self) -> Training:
        return Training(
            store=self.store,
            models=self.models,
            operations=self.operations,
            runs=self.runs,
            stability=self.stability,
            custom_losses=self.custom_losses,
            metrics=self.run_metrics,
            capabilities=capabilities(self.settings.engine),
            max_rank=self.settings.max_rank,
            max_request_tokens=self.settings.max_request_tokens,
            draw_seed=self._draw_seed,
        )

    # -- checkpoints --------------------------------------------------------------------------------------------------
    @cached_property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.store, self.artifacts, self._clock)

    @cached_property
    def saves(self) -> Saves:
        return Saves(operations=self.operations, runs=self.runs, checkpoints=self.checkpoints, clock=self._clock)

    @cached_property
    def loads(self) -> Loads:
        return Loads(
            store=self.store,
            models=self.models,
            operations=self.operations,
            runs=self.runs,
            checkpoints=self.checkpoints,
            access=self.access,
            capabilities=capabilities(self.settings.engine),
        )

    @cached_property
    def signed_urls(self) -> SignedUrls:
        return SignedUrls(load_secret(self.settings.data_dir / "url_secret"), self._clock)

    @cached_property
    def exports(self) -> Exports:
        return Exports(self.checkpoints, self.signed_urls, self.artifacts)

    @cached_property
    def copies(self) -> Copies:
        return Copies(
            self.store,
            self.checkpoints,
            access=self.access,
            limits=self.limits,
            new_id=self._new_id,
            clock=self._clock,
        )

    @cached_property
    def imports(self) -> Imports:
        return Imports(
            self.store,
            self.models,
            self.checkpoints,
            self.artifacts,
            limits=self.limits,
            max_rank=self.settings.max_rank,
            new_id=self._new_id,
            clock=self._clock,
        )

    # -- samples ------------------------------------------------------------------------------------------------------
    @cached_property
    def stability(self) -> Stability:
        return Stability(self.store, self.settings.stability_retention, self._clock)

    @cached_property
    def samplers(self) -> Samplers:
        return Samplers(self.store, self.models, self.checkpoints, self._clock)

    @cached_property
    def sampling(self) -> Sampling:
        return Sampling(
            store=self.store,
            bodies=self.bodies,
            models=self.models,
            operations=self.operations,
            checkpoints=self.checkpoints,
            samplers=self.samplers,
            stability=self.stability,
            max_sample_tokens=self.settings.max_sample_tokens,
            max_waiting_samples=self.settings.max_waiting_samples,
            limits=self.limits,
        )

    @cached_property
    def door_models(self) -> DoorModels:
        return DoorModels(self.models, self.sampling, self.checkpoints)

    @cached_property
    def openai(self) -> OpenAIDoor:
        return OpenAIDoor(self.door_models, self._door_run)

    @cached_property
    def anthropic(self) -> AnthropicDoor:
        return AnthropicDoor(self.door_models, self._door_run)

    def _door_run(self, project_id: str) -> DoorRun:
        return DoorRun(self.sampling, self.futures, self.operations.cancel, project_id)

    # -- projects and their people ------------------------------------------------------------------------------------
    @cached_property
    def tenancy(self) -> Tenancy:
        return Tenancy(self.store, self.runs, self._clock)

    @cached_property
    def project_keys(self) -> ProjectKeys:
        return ProjectKeys(self.store, self._clock)

    @cached_property
    def key_uses(self) -> KeyUses:
        return KeyUses(self._clock)

    @cached_property
    def access(self) -> AccessTokens:
        return AccessTokens(self.store, self.key_uses.note)

    @cached_property
    def tokens(self) -> Tokens:
        secret = load_secret(self.settings.data_dir / "token_secret")
        return Tokens(secret, self.settings.token_lifetime, self._clock)

    @cached_property
    def limit_report(self) -> LimitReport:
        return LimitReport(self.store, self.limits, self.settings.max_rank, self._clock)

    @cached_property
    def usage(self) -> Usage:
        return Usage(self.store, self._clock)

    @cached_property
    def audit(self) -> Audit:
        return Audit(self.store, self._clock)

    @cached_property
    def traces(self) -> Traces:
        return Traces(self.store, self.signed_urls, self.housekeeping.write_activity, self._clock)

    # -- upkeep -------------------------------------------------------------------------------------------------------
    @cached_property
    def housekeeping(self) -> Housekeeping:
        async def sweeps() -> bool:
            return self.ownership is not None and await self.ownership.sweeps()

        return Housekeeping(
            store=self.store,
            bodies=self.bodies,
            operations=self.operations,
            futures=self.futures,
            runs=self.runs,
            saved=self.checkpoints,
            artifacts=self.artifacts,
            stability=self.stability,
            history=self.history,
            key_uses=self.key_uses,
            interval=self.settings.sweep_interval,
            session_timeout=self.settings.session_timeout,
            keep_delivered=self.settings.keep_delivered,
            keep_undelivered=self.settings.keep_undelivered,
            keep_lines=self.settings.log_retention,
            clock=self._clock,
            sweeps=None if self.leases is None else sweeps,
            more=(self.run_metrics.thin,),
        )

    @cached_property
    def recovery(self) -> Recovery:
        return Recovery(
            store=self.store,
            bodies=self.bodies,
            artifacts=self.artifacts,
            models=self.models,
            operations=self.operations,
            runs=self.runs,
            training=self.training,
            saves=self.saves,
            loads=self.loads,
            sampling=self.sampling,
            history=self.history,
            under_way=self.marked,
        )

    @cached_property
    def ownership(self) -> Ownership | None:
        """Of a server that shares its database with others."""
        if self.leases is None or self.store.shared is None:
            return None
        return Ownership(
            store=self.store,
            leases=self.leases,
            seconds=self.settings.edge_lease,
            alone=self._alone,
            make_notices=partial(Notices, self.store.shared),
            bodies=self.bodies,
            artifacts=self.artifacts,
            models=self.models,
            operations=self.operations,
            runs=self.runs,
            recovery=self.recovery,
            futures=self.futures,
            completions=self.completions,
        )
