"""Base models on a Ray cluster: this process keeps the HTTP edge and the log, and speaks to one deployment for each.

Not responsible for the cluster itself or for the deployments (`workers/ray`). Ray is imported only when it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from app.groups import worker_spec
from app.services import Lost, RuntimePlaces, runtime_options
from app.settings import Settings
from workers.ray.cluster import Cluster
from workers.recovery import History
from workers.remote import RemoteRuntime
from workers.runtime_protocol import Runtime


async def connect(address: str) -> tuple[Cluster, Callable[[], Awaitable[None]]]:
    """The cluster at `address`, or one of this machine's own if that is "local"; and what leaves it.

    Raises `Unavailable`.
    """
    cluster = await asyncio.to_thread(Cluster.connect, address)

    async def leave() -> None:
        await asyncio.to_thread(cluster.close)

    return cluster, leave


def on_cluster(settings: Settings) -> RuntimePlaces:
    """Makes runtimes on the cluster that this process is connected to."""
    from workers.ray.deployment import ReplicaSpec
    from workers.ray.link import RayLink

    def make(name: str, source: str | None, history: History, on_models_lost: Lost) -> Runtime:
        spec = ReplicaSpec(
            # The same for every server of these settings, or each would replace the deployment of the one before.
            worker=replace(worker_spec(settings, name, source), scratch=""),
            options=runtime_options(settings),
            start_timeout=settings.worker_start_timeout,
            log_level=settings.log_level,
        )
        return RemoteRuntime(name, RayLink(spec), history=history, on_models_lost=on_models_lost)

    return make
