"""Base models on a Ray cluster: this process keeps the HTTP edge and the log, and speaks to one deployment for each.

Not responsible for the cluster itself or for the deployments (`workers/ray`). Ray is imported only when it is used.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from app.groups import worker_spec
from app.services.core import Lost, RuntimePlaces
from app.services.service_settings import runtime_options
from app.settings import Settings
from engines.machine import compute_threads
from workers.ray.cluster import LOCAL, Cluster
from workers.ray.sampler_options import SamplerOptions
from workers.recovery import History
from workers.remote import RemoteRuntime
from workers.runtime_protocol import Runtime
from workers.spec import WorkerSpec
from workers.split import SplitRuntime


async def connect(address: str) -> tuple[Cluster, Callable[[], Awaitable[None]]]:
    """The cluster at `address`, or one of this machine's own if that is "local"; and what leaves it.

    Raises `Unavailable`.
    """
    cluster = await asyncio.to_thread(Cluster.connect, address)

    async def leave() -> None:
        await asyncio.to_thread(cluster.close)

    return cluster, leave


def shares_cluster(settings: Settings) -> bool:
    """Whether other servers may use the cluster that this one computes on, and the deployments there."""
    return settings.ray not in (None, LOCAL)


def on_cluster(settings: Settings) -> RuntimePlaces:
    """Makes runtimes on the cluster that this process is connected to: each in one place, or, with the setting
    `samplers`, with samplers beside it."""
    from workers.ray.sampler_fleet import SamplerFleet, samplers_name

    def make(name: str, source: str | None, history: History, on_models_lost: Lost) -> Runtime:
        worker = worker_spec(settings, name, source)
        if shares_cluster(settings):
            # The same for every server of these settings, or each would replace the deployment of the one before.
            worker = replace(worker, scratch="")
        if settings.samplers is None:
            return _remote(settings, worker, history, on_models_lost, replaces=(samplers_name(name),))
        options = sampler_options(settings)
        if settings.ray == LOCAL:  # all processes share the cores of this machine
            processes = settings.ranks + options.max_replicas
            worker = replace(worker, threads=compute_threads(settings.threads, processes, os.environ))
        # The trainer draws no samples, so it needs no sampler of another program.
        training = _remote(settings, replace(worker, sampler="torch"), history, on_models_lost)
        return SplitRuntime(training, SamplerFleet(worker, options))

    return make


def sampler_options(settings: Settings) -> SamplerOptions:
    """How many samplers a base model has, as the settings say."""
    least, most = settings.sampler_counts
    return SamplerOptions(
        min_replicas=least,
        max_replicas=most,
        upscale_delay=settings.samplers_up_delay,
        downscale_delay=settings.samplers_down_delay,
        look_back=min(10.0, max(2.0, settings.samplers_up_delay)),
        start_timeout=settings.worker_start_timeout,
        turn_timeout=settings.turn_timeout or None,
        decode_slice=settings.decode_slice,
        restart_limit=settings.restart_limit,
    )


def _remote(
    settings: Settings, worker: WorkerSpec, history: History, on_models_lost: Lost, *, replaces: Sequence[str] = ()
) -> RemoteRuntime:
    from workers.ray.deployment import ReplicaSpec
    from workers.ray.link import RayLink

    spec = ReplicaSpec(
        worker=worker,
        options=runtime_options(settings),
        start_timeout=settings.worker_start_timeout,
        log_level=settings.log_level,
    )
    link = RayLink(spec, replaces=replaces)
    return RemoteRuntime(worker.model, link, history=history, on_models_lost=on_models_lost)
