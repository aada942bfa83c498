"""The samples behind one request of a door: submitted, followed while they draw, dropped if their client leaves.

Responsible for telling every token of every continuation exactly once, however it comes. Not responsible for text
(`text_stream.py`) or for how samples run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from starlette.requests import ClientDisconnect

from app.services.doors.text_stream import Top
from app.services.futures import Failed, Futures, Pending, Ready
from app.services.sampling import DirectWeights, Sampling
from app.services.waiting import Disconnected
from schemas.errors import EngineFailure, TinsmithError, Unavailable
from schemas.operations import Float32, Sample, SampleDelta, SampleResult, TopK
from store.records import OperationRecord

HOLD = 3600.0
"""Seconds of one wait in memory for an outcome; it is woken at once when there is one."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """New tokens of continuation `index` of the request's sample `sample`, each (token, logprob, alternatives)."""

    sample: int
    index: int
    tokens: tuple[tuple[int, float, Top | None], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """Continuation `index` of sample `sample` has all its tokens."""

    sample: int
    index: int
    stop_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class _Settled:
    """A sample's outcome is durable, and everything of it has been told."""


_News = Drawn | Ended | _Settled | TinsmithError


class _Follower:
    """Listens to one sample, and tells what was not told yet when its result is there."""

    def __init__(self, number: int, sample: Sample, news: asyncio.Queue[_News]) -> None:
        self._number = number
        self._wants_top = sample.topk_sample_logprobs > 0
        self._news = news
        self._told: dict[int, list[int]] = {index: [] for index in range(sample.num_samples)}
        self._late: set[int] = set()
        """Continuations whose alternatives come with the result only."""
        self._ended: set[int] = set()
        self.result: SampleResult | None = None
        self._over = False

    def progress(self, delta: SampleDelta) -> None:
        """New tokens, each told once."""
        if self._wants_top and delta.topk is None:
            self._late.add(delta.index)
        if not self._over and delta.index not in self._late:
            self._tell(delta.index, delta.tokens, delta.logprobs, delta.topk)
            if delta.stop_reason is not None:
                self._end(delta.index, delta.stop_reason)

    def finished(self, result: SampleResult) -> None:
        """The result, before it is durable. Called in a thread."""
        self.result = result

    def end(self) -> None:
        """The outcome is durable: tell what was not told yet."""
        self._over = True
        if self.result is None:
            self._news.put_nowait(EngineFailure("the result of this sample is not there"))
            return
        for index, sequence in enumerate(self.result.sequences):
            told = self._told[index]
            at = len(told)
            if sequence.tokens[:at].tolist() != told:
                self._news.put_nowait(EngineFailure("the sample began anew and drew other tokens"))
                return
            topk = sequence.topk and TopK(sequence.topk.ids[at:], sequence.topk.logprobs[at:])
            self._tell(index, sequence.tokens[at:], sequence.logprobs[at:], topk)
            self._end(index, sequence.stop_reason)
        self._news.put_nowait(_Settled())

    def _end(self, index: int, stop_reason: Literal["stop", "length"]) -> None:
        if index not in self._ended:
            self._ended.add(index)
            self._news.put_nowait(Ended(self._number, index, stop_reason))

    def _tell(self, index: int, tokens: NDArray[np.int32], logprobs: Float32, topk: TopK | None) -> None:
        if len(tokens):
            new = tokens.tolist()
            self._told[index] += new
            drawn = tuple(zip(new, logprobs.tolist(), top_rows(topk, len(new)), strict=True))
            self._news.put_nowait(Drawn(self._number, index, drawn))


class DoorRun:
    """All samples of one request."""

    def __init__(self, sampling: Sampling, futures: Futures, cancel: Callable[[str], None], project_id: str) -> None:
        self._sampling = sampling
        self._futures = futures
        self._cancel = cancel
        self._project_id = project_id
        self._news: asyncio.Queue[_News] = asyncio.Queue()
        self._followers: list[_Follower] = []
        self._open: set[str] = set()
        self.records: list[OperationRecord] = []

    @property
    def results(self) -> list[SampleResult]:
        """The results of the samples, in order; complete when `follow` has ended."""
        return [follower.result for follower in self._followers if follower.result is not None]

    async def begin(self, weights: DirectWeights, samples: Sequence[Sample], *, stream: bool) -> None:
        """Submit the samples, all or none; without `stream`, their tokens come all at once.

        Raises as `Sampling.sample_directly`.
        """
        self._followers = [_Follower(number, sample, self._news) for number, sample in enumerate(samples)]
        accepted = await asyncio.gather(
            *(self._accept(weights, *each, stream) for each in zip(samples, self._followers, strict=True)),
            return_exceptions=True,
        )
        self.records = [each for each in accepted if not isinstance(each, BaseException)]
        self._open = {record.request_id for record in self.records}
        for each in accepted:
            if isinstance(each, BaseException):
                self.drop()
                raise each

    def drop(self) -> None:
        """Nobody waits any more: stop what still draws."""
        for request_id in self._open:
            self._cancel(request_id)
        self._open.clear()

    async def follow(
        self, disconnected: Disconnected, *, pause: float | None = None
    ) -> AsyncGenerator[Drawn | Ended | None]:
        """What happens, until every sample's outcome is durable; None whenever nothing did for `pause` seconds.

        Leaving early, for whatever reason, stops what still draws. Raises the error of a sample that failed, and
        `ClientDisconnect` when the client has gone away.
        """
        gone = asyncio.ensure_future(disconnected())
        gone.add_done_callback(lambda _: self._news.put_nowait(_GONE))
        waits = [asyncio.create_task(self._wait(*each)) for each in zip(self.records, self._followers, strict=True)]
        left = len(waits)
        try:
            while left:
                try:
                    async with asyncio.timeout(pause):
                        news = await self._news.get()
                except TimeoutError:
                    yield None
                    continue
                if news is _GONE:
                    raise ClientDisconnect
                if isinstance(news, TinsmithError):
                    raise news
                if isinstance(news, _Settled):
                    left -= 1
                else:
                    yield news
        finally:
            for task in (gone, *waits):
                task.cancel()
            self.drop()

    async def _accept(
        self, weights: DirectWeights, sample: Sample, follower: _Follower, stream: bool
    ) -> OperationRecord:
        progress = follower.progress if stream else None
        return await self._sampling.sample_directly(
            self._project_id, weights, sample, progress=progress, finished=follower.finished
        )

    async def _wait(self, record: OperationRecord, follower: _Follower) -> None:
        """Until the outcome of one sample is durable."""
        now = asyncio.get_running_loop().time
        try:
            until = now()
            while now() >= until:  # a wait that ends early without an outcome: the server is stopping
                until = now() + HOLD
                outcome = await self._futures.retrieve(self._project_id, record.request_id, HOLD, _never)
                if not isinstance(outcome, Pending):
                    break
        except TinsmithError as error:
            self._news.put_nowait(error)
            return
        self._open.discard(record.request_id)
        if isinstance(outcome, Ready):
            follower.end()
        elif isinstance(outcome, Failed):
            self._news.put_nowait(outcome.error)
        else:
            self._news.put_nowait(Unavailable("the server is shutting down", hint="try again in a moment"))


_GONE = EngineFailure("the client has gone away")


async def _never() -> None:
    """The request's own watch sees its client leave."""
    await asyncio.Event().wait()


def top_rows(topk: TopK | None, count: int) -> list[Top | None]:
    """A table of `count` rows of alternatives as (id, logprob); cells without a logprob are left out."""
    if topk is None:
        return [None] * count
    rows = zip(topk.ids.tolist(), topk.logprobs.tolist(), strict=True)
    return [tuple((i, value) for i, value in zip(ids, values, strict=True) if value == value) for ids, values in rows]
