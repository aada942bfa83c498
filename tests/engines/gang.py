"""Worker processes of an FSDP model for tests that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.fsdp.engine import FsdpEngine
from engines.fsdp.loading import local_bytes
from schemas.base_model_info import BaseModelInfo
from schemas.errors import InvalidRequest, TinsmithError
from workers.build import Progress, build_worker
from workers.dispatch import Dispatch, register
from workers.local import LocalWorkerGroup
from workers.spec import WorkerSpec
from workers.tinker import TinkerActorRolloutRefWorker

SECONDS = 600.0


class Gang:
    """A started group with an event loop of its own."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.group = LocalWorkerGroup(spec, start_timeout=SECONDS, stop_grace=2)
        self.deaths: list[TinsmithError] = []
        self.group.on_death(self.deaths.append)
        self.info: BaseModelInfo = self._run(self.group.start())

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The answer of the ranks."""
        return self._run(self.group.call(method, *args, **kwargs))

    def begin(self, method: str, *args: Any) -> Any:
        """A call that is not waited for: a future of `concurrent.futures`."""
        return asyncio.run_coroutine_threadsafe(self.group.call(method, *args), self._loop)

    def close(self) -> None:
        """End the ranks and the loop."""
        self._run(self.group.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)


@contextmanager
def gang(folder: Path, data_dir: Path, ranks: int, **spec: Any) -> Iterator[Gang]:
    """So many ranks of engine fsdp on the CPU, one thread each, on the model of a folder."""
    options: dict[str, Any] = {"engine": "fsdp", "dtype": "float32", "device": "cpu", "threads": 1, "ranks": ranks}
    options |= {"builder": "tests.engines.gang:build"} | spec
    started = Gang(WorkerSpec("tiny", str(folder), str(data_dir), **options))
    try:
        yield started
    finally:
        started.close()


class Watched(TinkerActorRolloutRefWorker):
    """The worker of a server, and a look at what only the ranks themselves know."""

    @register(Dispatch.ONE_TO_ALL)
    def facts(self, adapter_id: str | None = None) -> list[dict[str, Any]]:
        """Of each rank: bytes read of the base model and kept of it, and the state of an adapter."""
        engine = self.actor.engine
        assert isinstance(engine, FsdpEngine)
        own: dict[str, Any] = {
            "read": engine.read_bytes,
            "kept": local_bytes(engine.model),
        }
        if adapter_id is not None:
            state = engine._pool.get(adapter_id)
            own["state"] = [vector.numpy().tobytes() for vector in (state.flat, *state.moments.values())]
            gradient = state.gradient.flat
            own["gradient"] = None if gradient is None else gradient.numpy()
        found: list[dict[str, Any]] = engine._ranks.gather(own)
        return found

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int, can_undo: bool) -> None:
        """Something that only one rank cannot do."""
        engine = self.actor.engine
        assert isinstance(engine, FsdpEngine)

        def act() -> None:
            if engine._ranks.rank == rank:
                raise InvalidRequest(f"rank {rank} cannot do it")

        engine._ranks.together(act, undo=(lambda: None) if can_undo else None)


def build(spec: WorkerSpec, progress: Progress) -> Watched:
    """As `workers.build.build_worker`."""
    worker = build_worker(spec, progress)
    return Watched(worker.actor.engine, worker.rollout, worker.info)
