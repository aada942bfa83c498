"""The Ray Serve deployment of one base model: its single replica has the runtime and the worker group.

Training state lives in exactly one place, so there is one replica and nothing that scales it. Not responsible for the
edge's side (`workers/ray/link.py`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from schemas.errors import TinsmithError
from workers.group import WorkerGroup
from workers.ray.group import RayWorkerGroup
from workers.recovery import History
from workers.remote.server import RuntimeServer
from workers.runtime import ModelRuntime
from workers.runtime_options import RuntimeOptions
from workers.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica makes: the base model, and how it is run. `start_timeout`: seconds to load it."""

    worker: WorkerSpec
    options: RuntimeOptions
    start_timeout: float
    log_level: str = "info"


def make_group(spec: ReplicaSpec) -> WorkerGroup:
    """The worker group of a replica, not started."""
    return RayWorkerGroup(spec.worker, start_timeout=spec.start_timeout)


def actor_options() -> dict[str, float]:
    """What Ray sets aside for a replica: nothing. It schedules; the ranks of its group have places of their own."""
    return {"num_cpus": 0.0, "num_gpus": 0.0}


class RuntimeReplica:
    """What runs in the replica's process. Serve calls all of it in one event loop."""

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Serve awaits it
        logging.getLogger("tinsmith").setLevel(spec.log_level.upper())
        self._spec = spec

        def make_runtime(history: History, on_models_lost: Callable[[Sequence[str]], Awaitable[None]]) -> ModelRuntime:
            group = make_group(spec)
            return spec.options.make(spec.worker.model, group, history=history, on_models_lost=on_models_lost)

        self._server = RuntimeServer(make_runtime)
        await self._server.start()

    async def spec(self) -> ReplicaSpec:
        """What this replica was made for."""
        return self._spec

    async def edges(self) -> int:
        """How many edges use it."""
        return self._server.edges

    async def send(self, frame: bytes) -> bool:
        """See `RuntimeServer.receive`."""
        return self._server.receive(frame)

    async def events(self, hello: bytes) -> AsyncIterator[bytes]:
        """See `RuntimeServer.events`."""
        async for data in self._server.events(hello):
            yield data

    async def check_health(self) -> None:
        """Raises when the runtime has given up: Serve then replaces the replica, on another machine if need be."""
        failure = self._server.runtime.failure
        if failure is not None:
            raise _unhealthy(failure)

    async def __del__(self) -> None:
        """Serve awaits this before it ends the process."""
        await self._server.stop()


def _unhealthy(failure: TinsmithError) -> RuntimeError:
    return RuntimeError(f"the runtime has failed: {failure.message}")
