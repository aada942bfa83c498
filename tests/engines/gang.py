"""Worker processes of an FSDP model for tests that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from schemas.errors import TinsmithError
from schemas.operations import BaseModelInfo
from workers.local import LocalWorkerGroup
from workers.spec import WorkerSpec

SECONDS = 90.0


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
    found = WorkerSpec(
        "tiny", str(folder), str(data_dir), engine="fsdp", dtype="float32", device="cpu", threads=1, ranks=ranks, **spec
    )
    started = Gang(found)
    try:
        yield started
    finally:
        started.close()
