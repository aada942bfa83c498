"""The sampling replicas of one base model, from their start to their end, and the samples that go to them.

Responsible for having the application on the cluster as long as the server needs it, and for saying how it is. Not
responsible for what the application is (`workers/ray/samplers.py`) or for the way of a sample (`SamplerClient`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from ray.serve.schema import ApplicationStatusOverview

from schemas.errors import EngineFailure, TinsmithError, Unavailable
from workers.ray.application import DEPLOY_SECONDS, ServeApplication, application_name, applications, words
from workers.ray.placement import shortage
from workers.ray.sampler_client import SamplerClient
from workers.ray.sampler_options import SamplerOptions
from workers.ray.samplers import (
    DEPLOYMENT,
    most_ongoing,
    replaced_within,
    rollout_spec,
    sampler_application,
    sampler_bundle,
)
from workers.runtime import Load, State
from workers.spec import WorkerSpec
from workers.throughput import Throughput
from workers.tickets import QueueState, Ticket

_log = logging.getLogger("tinsmith.ray")

WATCH_SECONDS = 5.0
_CLOSE_SECONDS = 90.0


def samplers_name(model: str) -> str:
    """The name of the application that samples from a base model."""
    return application_name(model, "samplers")


class SamplerFleet:
    """Implements `workers.split.Samplers` on Ray Serve. All methods are called from one event loop.

    Args:
        spec: of the base model as it is trained.
        options: how many replicas there are, and how they work.
    """

    def __init__(self, spec: WorkerSpec, options: SamplerOptions) -> None:
        self.name = spec.model
        self.state: State = "starting"
        self.failure: TinsmithError | None = None
        self.progress: str | None = "waiting for the sampling replicas to load"
        self._application = ServeApplication(
            samplers_name(spec.model),
            f"the samplers of base model {spec.model!r}",
            made_for=(rollout_spec(spec, options), options),
            make=lambda: sampler_application(spec, options),
            shortage=lambda: shortage(spec.model, options.min_replicas, sampler_bundle(spec, options), DEPLOY_SECONDS),
            patience=DEPLOY_SECONDS + options.start_timeout,
        )
        self._client = SamplerClient(spec.model, ahead=most_ongoing(spec), patience=replaced_within(options))
        self._began = time.monotonic()
        self._running: asyncio.Task[None] | None = None

    # -- life ------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Begin to start the replicas in the background; returns at once."""
        self._began = time.monotonic()
        self._running = asyncio.create_task(self._run(), name=f"samplers of {self.name}")

    async def stop(self, grace: float) -> None:
        """Refuse new samples, finish those that were taken within `grace` seconds, fail the rest; end the replicas, if
        no other server trains this base model on the cluster."""
        await self._client.stop(grace if self.state == "ready" else 0.0)
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.to_thread(self._leave)
        except Exception as error:
            _log.warning("the samplers of base model %s stay on the cluster: %s", self.name, words(error))

    async def probe(self, timeout: float) -> bool:  # noqa: ASYNC109 (a plain number crosses to any transport)
        """Whether there is a replica that runs. Those that are busy are not asked: samples may fill them."""
        if self.state != "ready":
            return False
        with suppress(Exception):  # the controller is being replaced: it counts as no answer
            async with asyncio.timeout(timeout):
                return _replicas(await asyncio.to_thread(self._application.overview)) > 0
        return False

    # -- work ------------------------------------------------------------------------------------------------------
    def submit(self, ticket: Ticket) -> None:
        """See `SamplerClient.submit`."""
        self._client.submit(ticket)

    def cancel(self, request_id: str) -> None:
        """See `SamplerClient.cancel`."""
        self._client.cancel(request_id)

    def waiting(self, request_id: str) -> QueueState:
        """See `SamplerClient.waiting`."""
        found = self._client.waiting(request_id)
        if found.reason is None or self.state != "starting":
            return found
        seconds = time.monotonic() - self._began
        return QueueState("paused_capacity", f"base model is loading ({seconds:.0f} s): {self.progress}")

    def samples_waiting(self, project_id: str) -> int:
        """See `SamplerClient.samples_waiting`."""
        return self._client.samples_waiting(project_id)

    def throughput(self) -> Throughput:
        """See `SamplerClient.throughput`."""
        return self._client.throughput()

    def load(self) -> Load:
        """See `SamplerClient.load`."""
        return self._client.load()

    # -- the application ---------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        try:
            self._client.connect(await asyncio.to_thread(self._application.find_or_deploy))
            self.state, self.progress = "ready", None
            while True:
                await asyncio.sleep(WATCH_SECONDS)
                await self._look()
        except TinsmithError as error:
            self._fail(error)
        except Exception:
            _log.exception("the samplers of base model %s cannot be deployed", self.name)
            self._fail(EngineFailure(f"the samplers of base model {self.name!r} cannot be deployed on Ray"))

    async def _look(self) -> None:
        """Make the application again if somebody deleted it."""
        try:
            if await asyncio.to_thread(self._application.overview) is None:
                _log.warning("the samplers of base model %s are gone and are made anew", self.name)
                self._client.connect(await asyncio.to_thread(self._application.find_or_deploy))
        except TinsmithError:
            raise
        except Exception as error:  # the controller is being replaced, or the cluster is gone: the next look shows it
            _log.warning("Ray Serve does not answer for the samplers of %s: %s", self.name, words(error))

    def _fail(self, error: TinsmithError) -> None:
        self.state, self.failure = "failed", error
        _log.error("%s", error.message)
        self._client.fail(Unavailable(error.message, hint=error.hint))

    def _leave(self) -> None:
        """Delete the application, unless the training of this base model is still there for another server."""
        there = applications()
        if application_name(self.name) not in there and self._application.name in there:
            self._application.delete()


def _replicas(overview: ApplicationStatusOverview | None) -> int:
    if overview is None or DEPLOYMENT not in overview.deployments:
        return 0
    return int(overview.deployments[DEPLOYMENT].replica_states.get("RUNNING", 0))
