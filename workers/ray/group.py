"""A worker group of Ray actors, one per rank, anywhere on the cluster that this process is connected to.

Responsible for their life (start, readiness, death, stop) and for carrying calls. Not responsible for restarting them:
the runtime decides about that, as it does for `workers/local.py`, from which it cannot tell this group.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ray.exceptions import RayActorError, RayError

from schemas.base_model_info import BaseModelInfo
from schemas.errors import EngineFailure, TinsmithError, Unavailable, WorkerDied
from workers.dispatch import RankAnswer, merge
from workers.messages import Call
from workers.ray.gang import Gang, GangOptions
from workers.spec import WorkerSpec

_log = logging.getLogger("tinsmith.workers")

_PROGRESS_SECONDS = 0.2
_LONGEST_END = 30.0
"""Seconds beyond the grace after which `stop` no longer waits for a cluster that does not answer."""


@dataclass(slots=True)
class _Life:
    """The ranks between one start and their end, so that late news of old ranks cannot touch new ones."""

    loop: asyncio.AbstractEventLoop
    gang: Gang
    sender: ThreadPoolExecutor
    """One thread: it keeps the calls in order, and it may block on the cluster, which the event loop may not."""
    pending: set[asyncio.Future[Any]] = field(default_factory=set)
    """What callers wait for, and what fails when a rank ends."""
    pids: list[int] = field(default_factory=list)
    loaded: bool = False
    over: bool = False


class RayWorkerGroup:
    """Implements `workers.group.WorkerGroup` on Ray actors.

    Args:
        spec: what each rank loads. `data_dir`, and the folders of calls, are on a file system that all nodes share.
        start_timeout: seconds from asking for a place until every rank has loaded the base model.
        stop_grace: seconds that a rank gets to finish its running call when the group is stopped.
        options: how the ranks are placed.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        start_timeout: float = 900.0,
        stop_grace: float = 5.0,
        options: GangOptions | None = None,
    ) -> None:
        self._spec = spec
        self._start_timeout = start_timeout
        self._stop_grace = stop_grace
        self._options = options or GangOptions()
        self._callbacks: list[Callable[[TinsmithError], None]] = []
        self._call_ids = itertools.count()
        self._current: _Life | None = None
        self._progress: str | None = None

    @property
    def progress(self) -> str | None:
        """What rank 0 is loading, while `start` runs."""
        return self._progress

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, on their nodes."""
        return self._current.pids if self._current is not None else []

    def on_death(self, callback: Callable[[TinsmithError], None]) -> None:
        """See `WorkerGroup.on_death`."""
        self._callbacks.append(callback)

    # -- life ------------------------------------------------------------------------------------------------------
    async def start(self) -> BaseModelInfo:
        """Place the ranks and wait until all have loaded; raises `Unavailable` or the rank's own error."""
        if self._current is not None:
            raise EngineFailure("the worker group is running already")
        loop = asyncio.get_running_loop()
        sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ray-calls")
        life = self._current = _Life(loop, Gang(self._spec, self._options), sender)
        try:
            async with asyncio.timeout(self._start_timeout):
                infos = await self._come_up(life)
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

    async def _come_up(self, life: _Life) -> list[BaseModelInfo]:
        self._progress = "looking for a place on the cluster"
        await life.loop.run_in_executor(life.sender, life.gang.create)
        self._progress = "starting the worker process"
        sites = await self._ranks(life, life.gang.sites)
        life.pids = [site.pid for site in sites]
        reports = asyncio.create_task(self._follow_progress(life))
        try:
            found = await self._ranks(life, partial(life.gang.load, sites))
        finally:
            reports.cancel()
        for info in found:
            if isinstance(info, TinsmithError):
                raise info
        life.loaded = True
        for rank, end in enumerate(await life.loop.run_in_executor(life.sender, life.gang.lives)):
            end.add_done_callback(partial(self._post, life, self._take_end, rank))
        return found

    async def _follow_progress(self, life: _Life) -> None:
        with suppress(RayError):  # of the end of rank 0 its loading tells
            while True:
                asked = await life.loop.run_in_executor(life.sender, life.gang.progress)
                # Shielded, for Ray cannot answer a future that was cancelled.
                self._progress = await asyncio.shield(asyncio.wrap_future(asked)) or self._progress
                await asyncio.sleep(_PROGRESS_SECONDS)

    async def stop(self) -> None:
        """End all ranks: they get `stop_grace` seconds to finish a call. Pending calls raise `WorkerDied`."""
        life, self._current = self._current, None
        if life is None:
            return
        grace = 0.0 if life.over or not life.loaded else self._stop_grace
        life.over = True
        life.gang.give_up()
        self._fail_pending(life, WorkerDied("the worker was stopped"))
        ended = life.loop.run_in_executor(life.sender, life.gang.end, grace)
        done, _ = await asyncio.wait({ended}, timeout=grace + _LONGEST_END)
        if not done:
            _log.error("the cluster does not answer: ranks of base model %s may still run", self._spec.model)
        elif ended.exception() is not None:
            _log.error("ranks of base model %s may still run", self._spec.model, exc_info=ended.exception())
        life.sender.shutdown(wait=False)

    # -- calls -----------------------------------------------------------------------------------------------------
    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `WorkerGroup.call`."""
        life = self._living()
        call = Call(next(self._call_ids), method, args, kwargs)
        answers = await self._ranks(life, partial(life.gang.send, self._for_ranks(call)))
        return merge([RankAnswer(answer.value, answer.error) for answer in answers])

    async def ping(self, timeout: float) -> bool:  # noqa: ASYNC109 (the protocol's name)
        """See `WorkerGroup.ping`."""
        try:
            life = self._living()
            async with asyncio.timeout(timeout):
                await self._ranks(life, life.gang.ping)
        except (TimeoutError, TinsmithError):
            return False
        return True

    def _living(self) -> _Life:
        if self._current is None or self._current.over:
            raise WorkerDied("the worker is not running")
        return self._current

    def _for_ranks(self, call: Call) -> list[Call]:
        """The call as each rank gets it."""
        return [call] * self._spec.ranks

    async def _ranks(self, life: _Life, send: Callable[[], list[Future[Any]]]) -> list[Any]:
        """Ask every rank something, through the sender's thread, and wait for all answers or the end of a rank."""
        outcome: asyncio.Future[list[Any]] = life.loop.create_future()
        life.pending.add(outcome)
        sent = life.loop.run_in_executor(life.sender, send)
        sent.add_done_callback(partial(self._take_sent, life, outcome))
        try:
            return await outcome
        finally:
            life.pending.discard(outcome)

    # -- answers (event loop) --------------------------------------------------------------------------------------
    def _take_sent(
        self, life: _Life, outcome: asyncio.Future[list[Any]], sent: asyncio.Future[list[Future[Any]]]
    ) -> None:
        error = sent.exception()
        if error is None:
            answers: list[Any] = [None] * len(sent.result())
            missing = set(range(len(answers)))
            for rank, answer in enumerate(sent.result()):
                answer.add_done_callback(partial(self._post, life, self._take_answer, rank, outcome, answers, missing))
        elif not outcome.done():
            _log.error("a call cannot be sent", exc_info=error)
            outcome.set_exception(EngineFailure("the call cannot be sent to the worker"))

    def _post(self, life: _Life, handler: Callable[..., None], rank: int, *args: Any) -> None:
        """From one of Ray's threads into the event loop; after the loop has closed there is nobody left to tell."""
        with suppress(RuntimeError):
            life.loop.call_soon_threadsafe(handler, life, rank, *args)

    def _take_answer(
        self,
        life: _Life,
        rank: int,
        outcome: asyncio.Future[list[Any]],
        answers: list[Any],
        missing: set[int],
        answer: Future[Any],
    ) -> None:
        error = answer.exception()
        if isinstance(error, RayActorError) or (error is not None and not life.loaded):
            self._take_end(life, rank, answer)
        if outcome.done():
            return
        if error is not None:
            _log.error("rank %d of base model %s gave no result", rank, self._spec.model, exc_info=error)
            outcome.set_exception(EngineFailure("the worker's result cannot be sent"))
            return
        answers[rank] = answer.result()
        missing.discard(rank)
        if not missing:
            outcome.set_result(answers)

    def _take_end(self, life: _Life, rank: int, end: Future[Any]) -> None:
        if life.over:
            return
        life.over = True
        _log.error("rank %d of base model %s ended: %s", rank, self._spec.model, end.exception())
        life.sender.submit(life.gang.kill)
        if not life.loaded:
            self._fail_pending(
                life,
                Unavailable(
                    f"the actor of rank {rank} of base model {self._spec.model!r} ended while loading",
                    hint="the server's log has the reason that Ray gives",
                ),
            )
            return
        error = WorkerDied(
            f"the actor of rank {rank} of base model {self._spec.model!r} ended unexpectedly "
            "(often because the machine ran out of memory)"
        )
        for callback in self._callbacks:
            callback(error)
        self._fail_pending(life, error)

    def _fail_pending(self, life: _Life, error: TinsmithError) -> None:
        for outcome in life.pending:
            if not outcome.done():
                outcome.set_exception(error)
