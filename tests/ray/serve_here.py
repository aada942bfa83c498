"""Sampling replicas in this process: the deployment's own class over a toy worker, behind what a handle of Serve does.

Imported only where such a test runs: Serve takes seconds to import. No cluster is needed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from ray.serve.exceptions import RequestCancelledError

from schemas.errors import Unavailable
from tests.support.inline_group import InlineWorkerGroup
from tests.support.toy_worker import INFO, ToySampler
from tests.workers.harness import Client, until_state
from workers.build import Progress
from workers.ray.sampler_client import SamplerClient
from workers.ray.sampler_replica import Item, LastWords, SampleRequest, SamplerReplica
from workers.rollout import RolloutWorker
from workers.runtime import ModelRuntime

STEP_SECONDS = 0.005


class Replica(SamplerReplica):
    """A replica whose worker is a thread of this process."""

    async def __init__(self, rows: int = 4) -> None:  # type: ignore[misc]  # as in the class itself
        self.broken = False
        self.rows = rows
        self._group = InlineWorkerGroup(self._build)
        self._runtime = ModelRuntime(
            "toy", self._group, max_sample_rows=rows, restart_limit=1, restart_pause=0.0, on_models_lost=_nothing
        )
        self._replica = "here"
        self._telling: set[asyncio.Task[None]] = set()
        await self._runtime.start()
        await until_state(self._runtime, "ready")

    def lose_worker(self) -> None:
        """End the worker for good: it cannot be started again."""
        self.broken = True
        self._group.die()

    async def stop(self) -> None:
        await self._runtime.stop(0)

    def _build(self, progress: Progress) -> RolloutWorker:
        if self.broken:
            raise Unavailable("the toy shall not start")
        return RolloutWorker(ToySampler(STEP_SECONDS, self.rows), INFO)


async def make_replica(rows: int = 4) -> Replica:
    """One that has loaded. As Serve does it: the class's `__init__` is awaited."""
    replica = Replica.__new__(Replica)
    await replica.__init__(rows)  # type: ignore[misc]
    return replica


class Handle:
    """A deployment's handle. A request goes to the replica that is there, or waits until there is one with room."""

    def __init__(self) -> None:
        self.replica: Replica | None = None
        self.has_room: Callable[[SampleRequest], bool] = lambda request: True
        self.requests: list[SampleRequest] = []
        self.given_back = 0
        """How many requests have ended so."""

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, request: SampleRequest) -> Response:
        self.requests.append(request)
        return Response(self, request)


class Response:
    """Serve's stream of one request. Cancelling it ends the request on its replica, and raises for who reads."""

    def __init__(self, handle: Handle, request: SampleRequest) -> None:
        self._handle = handle
        self._items: asyncio.Queue[Item | None] = asyncio.Queue()
        self._cancelled = False
        self._task = asyncio.create_task(self._run(request))
        self._task.add_done_callback(lambda _: self._items.put_nowait(None))

    def cancel(self) -> None:
        self._cancelled = True
        self._task.cancel()

    async def __aiter__(self) -> AsyncIterator[Item]:
        while (item := await self._items.get()) is not None:
            yield item
        if self._cancelled:
            raise RequestCancelledError("request")
        self._task.result()

    async def _run(self, request: SampleRequest) -> None:
        while (replica := self._handle.replica) is None or not self._handle.has_room(request):  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # as Serve does, which asks its replicas again and again
        async for item in replica.sample(request):
            self._handle.given_back += type(item).__name__ == "GivenBack"
            self._items.put_nowait(item)


class LocalActor:
    """An actor's handle, without the actor's process."""

    def __init__(self, actor: object) -> None:
        for name, method in inspect.getmembers(actor, inspect.iscoroutinefunction):
            setattr(self, name, SimpleNamespace(remote=method))


class Clock:
    """Monotonic seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def sampling(
    *, patience: float, pause: float, rows: int = 4, clock: Callable[[], float] | None = None
) -> AsyncIterator[tuple[SamplerClient, Client, Handle]]:
    """A client of one replica, and what submits to it."""
    options: dict[str, Any] = {} if clock is None else {"clock": clock}
    samplers = SamplerClient("toy", ahead=rows + 4, patience=patience, pause=pause, **options)
    samplers._last_words = LocalActor(LastWords())
    handle = Handle()
    handle.replica = first = await make_replica(rows)
    samplers.connect(handle)
    client = Client(samplers)
    try:
        yield samplers, client, handle
    finally:
        await samplers.stop(0)
        for replica in {first, handle.replica} - {None}:
            await replica.stop()
    assert all(count == 1 for count in client.answers.values()), "a ticket was answered twice"


async def _nothing(lost: object) -> None:
    """There are no training runs."""
