"""An edge and the server of a runtime in one process, with a link between them that can break, and a server that can
be lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from schemas.errors import TinsmithError
from tests.workers.harness import Client, until_state
from workers.group import WorkerGroup
from workers.recovery import History
from workers.remote import LinkBroken, RemoteRuntime, RuntimeServer
from workers.runtime import ModelRuntime


class Cluster:
    """Where the server of a runtime lives; `replace` loses it and everything that it knew."""

    def __init__(self, make_server: Callable[[], RuntimeServer]) -> None:
        self._make_server = make_server
        self.server: RuntimeServer | None = None
        self.servers = 0
        self.gone: TinsmithError | None = None
        self.changed = asyncio.Event()
        self._lost: list[RuntimeServer] = []

    async def begin(self) -> RuntimeServer:
        """A server that knows nothing."""
        self.server = self._make_server()
        self.servers += 1
        await self.server.start()
        return self.server

    def lose(self) -> None:
        """The server's process is killed: nothing of it is heard again."""
        assert self.server is not None
        self._lost.append(self.server)
        self.server = None
        self.break_links()

    def break_links(self) -> None:
        """Every stream ends, whatever it was about to tell."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def end(self) -> None:
        """End what runs."""
        for server in [*self._lost, *([] if self.server is None else [self.server])]:
            await server.stop()


class QueueLink:
    """Implements `Link` in one process. Of `drop_answers` frames the server had, the edge hears nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.drop_answers = 0
        self.refuse_sends = 0
        self.sent = 0

    async def open(self) -> None:
        """There is a server already."""

    async def events(self, hello: bytes) -> AsyncIterator[bytes]:
        server, changed = self._cluster.server, self._cluster.changed
        if server is None:
            await asyncio.sleep(0)
            raise LinkBroken("no server")
        stream = server.events(hello)
        broken = asyncio.ensure_future(changed.wait())
        try:
            while True:
                following = asyncio.ensure_future(anext(stream))
                await asyncio.wait({following, broken}, return_when=asyncio.FIRST_COMPLETED)
                if broken.done():
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
                    raise LinkBroken("the server was lost")
                try:
                    yield following.result()
                except StopAsyncIteration:
                    raise LinkBroken("the stream ended") from None
        finally:
            broken.cancel()

    async def send(self, frame: bytes) -> bool:
        await asyncio.sleep(0)
        server = self._cluster.server
        self.sent += 1
        if server is None or self.refuse_sends:
            self.refuse_sends = max(0, self.refuse_sends - 1)
            raise LinkBroken("no server")
        known = server.receive(frame)
        if self.drop_answers:
            self.drop_answers -= 1
            raise LinkBroken("the answer was lost")
        return known

    async def lost(self) -> TinsmithError | None:
        return self._cluster.gone

    async def close(self) -> None:
        """The cluster ends its server itself."""


def server_on(make_group: Callable[[], WorkerGroup], **options: Any) -> Callable[[], RuntimeServer]:
    """Makes servers of the toy model; `silence` is the server's, all else the runtime's."""
    server_options = {key: options.pop(key) for key in ("silence",) if key in options}

    def make() -> RuntimeServer:
        def make_runtime(history: History, on_models_lost: Any) -> ModelRuntime:
            return ModelRuntime(
                "toy", make_group(), on_models_lost=on_models_lost, history=history, restart_pause=0.01, **options
            )

        return RuntimeServer(make_runtime, **server_options)

    return make


@asynccontextmanager
async def remotely(
    make_group: Callable[[], WorkerGroup], *, history: History | None = None, **options: Any
) -> AsyncIterator[tuple[Cluster, QueueLink, RemoteRuntime, Client, list[str]]]:
    """A cluster with one server, and an edge that is attached to it."""
    lost: list[str] = []

    async def on_models_lost(models: Sequence[str]) -> None:
        lost.extend(models)

    cluster = Cluster(server_on(make_group, **options))
    link = QueueLink(cluster)
    runtime = RemoteRuntime("toy", link, history=history, on_models_lost=on_models_lost, heartbeat=0.05)
    client = Client(runtime)
    await cluster.begin()
    await runtime.start()
    try:
        await until_state(runtime, "ready")
        yield cluster, link, runtime, client, lost
    finally:
        await runtime.stop(0.0)
        await cluster.end()
    assert all(count == 1 for count in client.answers.values()), "a ticket was answered twice"


@asynccontextmanager
async def running(
    group: WorkerGroup, *, wait: bool = True, grace: float = 0.0, **options: Any
) -> AsyncIterator[tuple[RemoteRuntime, Client, list[str]]]:
    """As `tests.workers.harness.running`, with the runtime on the other side of a link."""
    lost: list[str] = []
    history = options.pop("history", None)

    async def on_models_lost(models: Sequence[str]) -> None:
        lost.extend(models)

    def make_runtime(far: History, tell_lost: Any) -> ModelRuntime:
        known = far if history is not None else None
        return ModelRuntime("toy", group, on_models_lost=tell_lost, history=known, restart_pause=0.01, **options)

    cluster = Cluster(lambda: RuntimeServer(make_runtime))
    runtime = RemoteRuntime("toy", QueueLink(cluster), history=history, on_models_lost=on_models_lost)
    client = Client(runtime)
    await cluster.begin()
    await runtime.start()
    try:
        if wait:
            await until_state(runtime, "ready")
        yield runtime, client, lost
    finally:
        await runtime.stop(grace)
        await cluster.end()
    assert all(count == 1 for count in client.answers.values()), "a ticket was answered twice"
