"""A worker group without a process: the same worker class in one thread of the test process.

It keeps the group's contract (calls in order, only registered methods, errors of the tree or `EngineFailure`), and
`die()` plays the death of the process: pending calls fail, the worker's state is gone, `start()` builds a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from schemas.base_model_info import BaseModelInfo
from schemas.errors import TinsmithError, WorkerDied
from schemas.operations import MicroBatch
from workers.build import Progress, resolve_builder
from workers.dispatch import invoke
from workers.faults import to_tinsmith_error
from workers.spec import WorkerSpec


class InlineWorkerGroup:
    """`build` makes a worker that has `.info`, in the group's thread, at every start."""

    def __init__(self, build: Callable[[Progress], Any]) -> None:
        self._build = build
        self._executor: ThreadPoolExecutor | None = None
        self._worker: Any = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._callbacks: list[Callable[[TinsmithError], None]] = []
        self.progress: str | None = None
        self.calls: list[str] = []
        """Names of the methods called so far, for tests. A turn counts as the primitives of what it opens and steps."""
        self.turns: list[MicroBatch] = []

    @classmethod
    def from_spec(cls, spec: WorkerSpec) -> InlineWorkerGroup:
        """The group that runs what a child process of this spec would run."""
        return cls(lambda progress: resolve_builder(spec)(spec, progress))

    @property
    def worker(self) -> Any:
        """The live worker, for tests that look inside."""
        return self._worker

    async def start(self) -> BaseModelInfo:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inline-worker")
        self._worker = await self._run(self._build, self._note_progress)
        info: BaseModelInfo = self._worker.info
        return info

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._worker is None:
            raise WorkerDied("the worker is not running")
        if method == "run_micro_batch":
            self._note_turn(*args)
        else:
            self.calls.append(method)
        return await self._run(invoke, self._worker, method, args, kwargs)

    async def ping(self, timeout: float) -> bool:  # noqa: ASYNC109 (the protocol's name)
        if self._worker is None:
            return False
        try:
            await asyncio.wait_for(self._run(lambda: None), timeout)
        except (TimeoutError, TinsmithError):
            return False
        return True

    async def stop(self) -> None:
        self._end("the worker was stopped")

    def on_death(self, callback: Callable[[TinsmithError], None]) -> None:
        self._callbacks.append(callback)

    def die(self) -> None:
        """Lose the worker as if its process had been killed."""
        error = self._end("the worker process ended")
        for callback in self._callbacks:
            callback(error)

    def _note_turn(self, micro: MicroBatch) -> None:
        self.turns.append(micro)
        self.calls += ["forward_backward" if batch.backward else "infer_batch" for batch in micro.opened.values()]
        self.calls += ["optimizer_step"] * len(micro.steps)

    def _note_progress(self, text: str) -> None:
        self.progress = text

    def _end(self, message: str) -> WorkerDied:
        error = WorkerDied(message)
        self._worker = None
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        for future in self._pending:
            if not future.done():
                future.set_exception(error)
        self._pending.clear()
        return error

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run in the group's thread; the returned future also fails at once when the worker "dies"."""
        if self._executor is None:
            raise WorkerDied("the worker is not running")
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        self._pending.add(outcome)

        def settle(value: Any, error: TinsmithError | None) -> None:
            self._pending.discard(outcome)
            if not outcome.done():
                if error is None:
                    outcome.set_result(value)
                else:
                    outcome.set_exception(error)

        def work() -> None:
            value, error = None, None
            try:
                value = function(*args)
            except Exception as raised:
                error = to_tinsmith_error(raised, getattr(function, "__name__", "call"))
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, value, error)

        self._executor.submit(work)
        return await outcome
