"""A worker group of child processes of the server, one per rank.

Responsible for their life (start, readiness, death, stop) and for carrying calls. Not responsible for restarting them:
the runtime decides about that. Imports no torch: only the children do.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from engines.ranks import Place
from schemas.base_model_info import BaseModelInfo
from schemas.errors import EngineFailure, TinsmithError, Unavailable, WorkerDied
from workers.dispatch import RankAnswer, merge
from workers.environment import worker_environment
from workers.interpreter import ready_interpreter
from workers.messages import (
    PICKLE_PROTOCOL,
    Answer,
    Call,
    Ping,
    Progress,
    Ready,
    Reply,
    Request,
    Start,
    StartFailed,
    Stop,
)
from workers.rank_process import RankProcess
from workers.spec import WorkerSpec

_log = logging.getLogger("tinsmith.workers")


@dataclass(slots=True)
class _Pending:
    """A call that some ranks have not answered yet."""

    future: asyncio.Future[Any]
    ranks: int
    answers: dict[int, RankAnswer] = field(default_factory=dict)


@dataclass(slots=True)
class _Incarnation:
    """The ranks between one start and their end, so that late news of old ranks cannot touch new ones."""

    loop: asyncio.AbstractEventLoop
    sender: ThreadPoolExecutor
    """One thread: it keeps the calls in order and may block on a full pipe, which the event loop may not."""
    ready: list[asyncio.Future[BaseModelInfo]]
    ranks: list[RankProcess] = field(default_factory=list)
    pending: dict[int, _Pending] = field(default_factory=dict)
    over: bool = False


class LocalWorkerGroup:
    """Implements `workers.group.WorkerGroup` on child processes.

    Args:
        spec: what each rank loads.
        start_timeout: seconds from spawning until every rank has loaded the base model.
        stop_grace: seconds that a rank gets to finish its running call when the group is stopped.
    """

    def __init__(self, spec: WorkerSpec, *, start_timeout: float = 900.0, stop_grace: float = 5.0) -> None:
        self._spec = spec
        self._start_timeout = start_timeout
        self._stop_grace = stop_grace
        self._callbacks: list[Callable[[TinsmithError], None]] = []
        self._call_ids = itertools.count()
        self._current: _Incarnation | None = None
        self._progress: str | None = None
        self._python: str | None = None
        """The interpreter of the ranks, once it has been asked whether it can run them."""

    @property
    def progress(self) -> str | None:
        """What rank 0 is loading, while `start` runs."""
        return self._progress

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [rank.pid for rank in self._current.ranks] if self._current else []

    def on_death(self, callback: Callable[[TinsmithError], None]) -> None:
        """See `WorkerGroup.on_death`."""
        self._callbacks.append(callback)

    async def start(self) -> BaseModelInfo:
        """Spawn the ranks and wait until all have loaded; raises `Unavailable` or the rank's own error."""
        if self._current is not None:
            raise EngineFailure("the worker group is running already")
        loop = asyncio.get_running_loop()
        sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker-calls")
        life = _Incarnation(loop, sender, [loop.create_future() for _ in range(self._spec.ranks)])
        self._current = life
        self._progress = "starting the worker process"
        try:
            async with asyncio.timeout(self._start_timeout):
                await loop.run_in_executor(sender, self._spawn, life)
                infos = await asyncio.gather(*life.ready)
        except TimeoutError:
            doing = self._progress
            await self.stop()
            raise Unavailable(
                f"base model {self._spec.model!r} did not load within {self._start_timeout:g} s (at the end: {doing})"
            ) from None
        except BaseException:
            await self.stop()
            raise
        finally:
            self._progress = None
        return infos[0]

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `WorkerGroup.call`."""
        call_id = next(self._call_ids)
        return await self._exchange(call_id, Call(call_id, method, args, kwargs))

    async def ping(self, timeout: float) -> bool:  # noqa: ASYNC109 (the protocol's name)
        """See `WorkerGroup.ping`."""
        call_id = next(self._call_ids)
        try:
            async with asyncio.timeout(timeout):
                await self._exchange(call_id, Ping(call_id))
        except (TimeoutError, TinsmithError):
            return False
        return True

    async def stop(self) -> None:
        """End all ranks: a message, then `stop_grace` seconds, then kill. Pending calls raise `WorkerDied`."""
        life, self._current = self._current, None
        if life is None:
            return
        life.over = True
        life.sender.submit(_send_to_all, life.ranks, Stop())
        self._fail_pending(life, WorkerDied("the worker was stopped"))
        await asyncio.gather(*(asyncio.to_thread(rank.wait_stopped, self._stop_grace) for rank in life.ranks))
        life.sender.shutdown(wait=False)

    # -- sending -------------------------------------------------------------------------------------------------
    def _spawn(self, life: _Incarnation) -> None:
        """In the sender thread: starting an interpreter takes tens of milliseconds."""
        if self._python is None:
            self._python = ready_interpreter(self._spec)
        env = worker_environment(self._spec, os.environ)
        # Rank 0 inherits the socket at which the others meet it, so that nobody can take its port meanwhile.
        with socket.create_server(("127.0.0.1", 0)) as meeting:
            for rank in range(self._spec.ranks):
                process = RankProcess(
                    Start(self._placed(rank, meeting), rank),
                    env,
                    on_reply=lambda process, reply: self._post(life, self._take_reply, process, reply),
                    on_end=lambda process, reason: self._post(life, self._take_end, process, reason),
                    inherited=(meeting.fileno(),) if rank == 0 and self._spec.ranks > 1 else (),
                    python=self._python,
                )
                life.ranks.append(process)
                if life.over:
                    # Stopped while spawning: `stop` may have looked at the list before this rank was on it.
                    process.kill()
                    return

    def _placed(self, rank: int, meeting: socket.socket) -> WorkerSpec:
        """What a rank is to load; one alone has nobody to meet."""
        spec = self._spec
        if spec.ranks == 1:
            return spec
        address, port = meeting.getsockname()
        return replace(
            spec,
            place=Place(
                rank=rank,
                ranks=spec.ranks,
                address=address,
                port=port,
                listen_fd=meeting.fileno() if rank == 0 else None,
                local_rank=rank,
                local_ranks=spec.ranks,
                timeout=spec.rank_timeout,
            ),
        )

    async def _exchange(self, call_id: int, request: Request) -> Any:
        life = self._current
        if life is None or life.over:
            raise WorkerDied("the worker is not running")
        pending = _Pending(life.loop.create_future(), len(life.ranks))
        life.pending[call_id] = pending
        try:
            sent = life.loop.run_in_executor(life.sender, _send_to_all, life.ranks, request)
            # Whichever comes first: a rank that dies while the pipe is full fails the call, not the send.
            await asyncio.wait({sent, pending.future}, return_when=asyncio.FIRST_COMPLETED)
            if sent.done() and sent.exception() is not None:
                _log.error("a call cannot be sent", exc_info=sent.exception())
                raise EngineFailure("the call cannot be sent to the worker")
            return await pending.future
        finally:
            life.pending.pop(call_id, None)

    # -- receiving (event loop) ----------------------------------------------------------------------------------
    def _post(self, life: _Incarnation, handler: Callable[..., None], *args: Any) -> None:
        """From a reader thread into the event loop; after the loop has closed there is nobody left to tell."""
        with suppress(RuntimeError):
            life.loop.call_soon_threadsafe(handler, life, *args)

    def _take_reply(self, life: _Incarnation, process: RankProcess, reply: Reply) -> None:
        ready = life.ready[process.rank]
        if isinstance(reply, Answer):
            self._take_answer(life, process, reply)
        elif isinstance(reply, Progress):
            if process.rank == 0 and not ready.done():
                self._progress = reply.text
        elif not ready.done():
            if isinstance(reply, StartFailed):
                ready.set_exception(reply.error)
            elif isinstance(reply, Ready):
                ready.set_result(reply.info)

    def _take_answer(self, life: _Incarnation, process: RankProcess, answer: Answer) -> None:
        pending = life.pending.get(answer.call_id)
        if pending is None or pending.future.done():
            return
        pending.answers[process.rank] = RankAnswer(answer.value, answer.error)
        if len(pending.answers) < pending.ranks:
            return
        try:
            pending.future.set_result(merge([pending.answers[rank] for rank in range(pending.ranks)]))
        except TinsmithError as error:
            pending.future.set_exception(error)

    def _take_end(self, life: _Incarnation, process: RankProcess, reason: str) -> None:
        if life.over:
            return
        _log.error("rank %d of base model %s ended: %s", process.rank, self._spec.model, reason)
        ready = life.ready[process.rank]
        if not all(future.done() and future.exception() is None for future in life.ready):
            if not ready.done():
                ready.set_exception(
                    Unavailable(f"the worker process of base model {self._spec.model!r} ended while loading: {reason}")
                )
            return
        life.over = True
        for rank in life.ranks:
            rank.kill()
        error = WorkerDied(f"a worker process of base model {self._spec.model!r} ended unexpectedly: {reason}")
        for callback in self._callbacks:
            callback(error)
        self._fail_pending(life, error)

    def _fail_pending(self, life: _Incarnation, error: TinsmithError) -> None:
        for pending in life.pending.values():
            if not pending.future.done():
                pending.future.set_exception(error)


def _send_to_all(ranks: list[RankProcess], request: Request) -> None:
    data = pickle.dumps(request, PICKLE_PROTOCOL)
    for rank in ranks:
        rank.write(data)
