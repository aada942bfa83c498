"""Sampling by another program: what its news becomes, whichever way it is asked.

Requests are checked here, stops are found here, and results are put together here, so that they mean the same as those
of the server's own sampler; a subclass carries rows to the other program and brings back what was drawn. Not
responsible for processes (`vllm/`) or connections (`external.py`).
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from engines.sampling.base import SampleStep, SamplingEngine
from engines.sampling.checks import check_sample, token_limit
from engines.sampling.prompt_scores import empty_topk
from engines.sampling.requests import Plan, Row
from engines.sampling.sampling_rules import LogprobKind, stream
from engines.sampling.stops import stop_rule
from schemas.base_model_info import BaseModelInfo
from schemas.errors import Cancelled, EngineFailure, InvalidRequest, TinsmithError
from schemas.operations import Float32, Sample, SampleDelta, SampleResult, SamplerLoad, SampleStats, TopK

_log = logging.getLogger(__name__)

LEAST_TEMPERATURE = 0.01
"""vLLM raises smaller temperatures to this one without a word; 0 is greedy and exact."""
_SEEDS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PromptNews:
    """Plain logprobs of a prompt of L tokens: float32 [L] (NaN at 0), and their top-k [L, k] if it was asked for."""

    logprobs: Float32
    topk: TopK | None = None


@dataclass(frozen=True, slots=True)
class RowNews:
    """What the other program drew for one row since the last news, or why the row failed.

    `reported` are the logprobs that the client gets, `plain` those at temperature 1 (only if the request asked for
    them), `topk` the (ids, logprobs) of each token, best first, of the reported distribution.
    """

    key: str
    tokens: Sequence[int] = ()
    reported: Sequence[float] = ()
    plain: Sequence[float] = ()
    topk: Sequence[tuple[list[int], list[float]]] = ()
    prompt: PromptNews | None = None
    cached_tokens: int = 0
    finished: bool = False
    error: TinsmithError | None = None


@dataclass(frozen=True, slots=True)
class ForeignRow:
    """A row as the other program is asked for it. `key` is unique; `scores` says that it brings the prompt's scores."""

    key: str
    plan: Plan
    seed: int
    scores: bool


@dataclass(eq=False, slots=True)
class _Running:
    request_id: str
    plan: Plan
    rows: dict[str, Row]
    prompt: PromptNews | None = None
    cached: int = 0
    begun: bool = False
    """News has come."""
    reading: bool = False
    """The other program had room for it."""
    open: set[str] = field(default_factory=set)
    """Keys of rows that still draw, or whose prompt scores have not come."""

    def result(self) -> SampleResult:
        request, scores = self.plan.request, self.prompt
        logprobs, topk = None, None
        if scores is not None:
            first = max(1, len(request.prompt) - (request.prompt_logprobs_last_n or len(request.prompt)))
            logprobs = np.full(len(request.prompt), np.nan, np.float32)
            logprobs[first:] = scores.logprobs[first:]
            if scores.topk is not None:
                topk = empty_topk(len(request.prompt), request.topk_prompt_logprobs)
                topk.ids[first:], topk.logprobs[first:] = scores.topk.ids[first:], scores.topk.logprobs[first:]
        return SampleResult(
            sequences=tuple(row.result() for row in self.rows.values()),
            prompt_logprobs=logprobs,
            topk_prompt_logprobs=topk,
            prompt_cache_hit_tokens=self.cached,
        )


class ForeignSampler(SamplingEngine):
    """The common part of samplers that another program does the work for. Sample i of a request is a row of its own.

    Args:
        info: of the base model that the trainer holds; the other program must have the same one.
        tokenizer: decodes for stop strings; None if only token ids are used.
        max_rows: rows that the other program draws at once; more of them wait there.
        entropy: gives the seed of requests that have none; default: the operating system.
    """

    name: ClassVar[str]
    """As a person chooses it (`sampler = NAME`), for messages."""

    def __init__(
        self,
        info: BaseModelInfo,
        tokenizer: Any,
        *,
        sample_logprobs: LogprobKind = "tempered",
        max_rows: int = 64,
        entropy: Callable[[], int] | None = None,
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._kind: LogprobKind = sample_logprobs
        self._max_rows = max_rows
        self._entropy = entropy or (lambda: secrets.randbits(256))
        self._running: dict[str, _Running] = {}
        self._owner: dict[str, _Running] = {}
        self._early: list[RowNews] = []
        """News that came before the step that it is for."""
        self._stats = SampleStats()
        self._keys = 0

    # -- what a subclass does ------------------------------------------------------------------------------------------
    @abstractmethod
    def _begin(self, rows: Sequence[ForeignRow]) -> None:
        """Ask for the rows of a new request. Raises `InvalidRequest` for what the other program cannot do exactly."""

    @abstractmethod
    def _abort(self, keys: Iterable[str]) -> None:
        """Tell the other program that these rows are not wanted any more; unknown keys are fine."""

    @abstractmethod
    def _advance(self) -> Sequence[RowNews]:
        """News of the rows, after at most one token for each; may be empty. Raises if the other program is lost."""

    def _arrived(self) -> Sequence[RowNews]:
        """News that is here already, without a step; none of a program that moves in steps only."""
        return ()

    @property
    def _max_tokens(self) -> int:
        """Tokens that the other program's cache holds; 0 = not known."""
        return 0

    # -- the interface -------------------------------------------------------------------------------------------------
    def add(self, request_id: str, sample: Sample) -> None:
        """See `SamplingEngine.add`."""
        plan = self._plan(sample)
        running = _Running(request_id, plan, {})
        rows: list[ForeignRow] = []
        for index in range(sample.num_samples):
            self._keys += 1
            key = f"row-{self._keys}"
            draws = stream(plan.seed, index)
            running.rows[key] = Row(index, plan, draws)
            wanted = index == 0 and (sample.prompt_logprobs or sample.topk_prompt_logprobs > 0)
            rows.append(ForeignRow(key, plan, int(draws.integers(_SEEDS)), scores=wanted))
        self._begin(rows)
        running.open = set(running.rows)
        self._running[request_id] = running
        self._owner |= dict.fromkeys(running.rows, running)

    def cancel(self, request_id: str) -> Cancelled | None:
        """See `SamplingEngine.cancel`.

        How far the other program is with a prompt cannot be seen: it counts as read from the first step that had room
        for all of the request's rows, or when news comes.
        """
        running = self._running.get(request_id)
        if running is None:
            return None
        self._early += self._arrived()
        for item in self._early:
            if self._owner.get(item.key) is running:
                self._read(running, item, SampleStep())
        self._running.pop(request_id, None)
        self._forget(running)
        return Cancelled(
            prompt_tokens=running.plan.length if running.begun or running.reading else 0,
            cached_tokens=running.cached,
            drawn_tokens=sum(len(row.tokens) for row in running.rows.values()),
        )

    def step(self) -> SampleStep:
        """See `SamplingEngine.step`. Raises if the other program is lost; all requests are forgotten then."""
        started, step = time.monotonic(), SampleStep()
        self._note_reading()
        try:
            news = [*self._early, *(self._advance() if self._running else ())]
        except TinsmithError:
            self._running.clear()  # whoever hands samples over may hand them over again
            self._owner.clear()
            raise
        finally:
            self._early = []
        for item in news:
            running = self._owner.get(item.key)
            if running is not None:  # else cancelled, or stopped, while its news was on the way
                self._read(running, item, step)
        seconds = self._stats.seconds + time.monotonic() - started
        self._stats = replace(self._stats, steps=self._stats.steps + 1, seconds=seconds)
        return step

    def _read(self, running: _Running, item: RowNews, step: SampleStep) -> None:
        prompt = 0
        if not running.begun and (item.tokens or item.prompt):
            running.begun, running.cached, prompt = True, item.cached_tokens, running.plan.length
        drawn, stats = self._take(running, item, step), self._stats
        self._stats = replace(
            stats,
            prompt_tokens=stats.prompt_tokens + prompt,
            cached_tokens=stats.cached_tokens + (running.cached if prompt else 0),
            drawn_tokens=stats.drawn_tokens + drawn,
        )

    def _note_reading(self) -> None:
        """Note whose rows fit into what the other program draws at once; it takes them in order."""
        rows = 0
        for running in self._running.values():
            rows += len(running.open)
            if rows > self._max_rows and rows > len(running.open):
                break
            running.reading = True

    @property
    def load(self) -> SamplerLoad:
        """How full the other program is, counted from here."""
        rows = [row for key, running in self._owner.items() for row in (running.rows[key],)]
        tokens = sum(row.plan.length + len(row.tokens) for row in rows)
        full = len(rows) > self._max_rows
        waiting = sum(not running.begun for running in self._running.values()) if full else 0
        return SamplerLoad(
            active=len(self._running),
            waiting=waiting,
            rows=min(len(rows), self._max_rows),
            max_rows=self._max_rows,
            tokens=tokens,
            max_tokens=self._max_tokens,
        )

    def take_stats(self) -> SampleStats:
        """See `SamplingEngine.take_stats`."""
        stats, self._stats = self._stats, SampleStats()
        return stats

    # -- requests ------------------------------------------------------------------------------------------------------
    def _plan(self, request: Sample) -> Plan:
        check_sample(request, self._info.vocab_size)
        self._refuse_unsupported(request)
        params = request.params
        stop = stop_rule(
            params.stop,
            eos_token_ids=self._info.eos_token_ids,
            vocab_size=self._info.vocab_size,
            tokenizer=self._tokenizer,
            last_prompt_token=int(request.prompt[-1]),
        )
        limit = token_limit(len(request.prompt), params.max_tokens, self._info.context_length)
        return Plan(request, limit, self._entropy() if params.seed is None else params.seed, stop)

    def _refuse_unsupported(self, request: Sample) -> None:
        for wanted, what in (
            (request.prompt_alt_tokens_k > 0, "prompt_alt_tokens_k"),
            (request.target_prompt_logprobs is not None, "target_prompt_logprobs"),
        ):
            if wanted:
                raise self.refusal(f"{what} cannot be answered by sampler {self.name!r}", what)
        temperature = request.params.temperature
        if 0 < temperature < LEAST_TEMPERATURE:
            raise self.refusal(
                f"temperature is {temperature}; sampler {self.name!r} takes 0, or {LEAST_TEMPERATURE} and more",
                "sampling_params.temperature",
            )

    @staticmethod
    def refusal(message: str, field: str) -> InvalidRequest:
        """What this sampler cannot do exactly, by name."""
        return InvalidRequest(message, field=field, hint="the server's own sampler (sampler = torch) can")

    def _take(self, running: _Running, news: RowNews, step: SampleStep) -> int:
        """Put news into its row; returns how many tokens counted."""
        if news.error is not None:
            self._end(running, news.error, step)
            return 0
        row = running.rows[news.key]
        running.prompt = news.prompt or running.prompt
        if any(map(math.isnan, news.reported)):
            self._end(running, EngineFailure("the model's logits are not finite with this adapter"), step)
            return 0
        before = len(row.tokens)
        for place, token in enumerate(news.tokens):
            if row.stop_reason is not None:
                break
            if news.topk:
                row.topk.append(news.topk[place])
            if news.plain:
                row.plain.append(news.plain[place])
            row.take(token, news.reported[place])
        taken = len(row.tokens) - before
        if taken and running.plan.request.stream:
            delta = SampleDelta(
                row.index,
                np.array(row.tokens[before:], np.int32),
                np.array(row.logprobs[before:], np.float32),
                stop_reason=row.stop_reason,
            )
            step.deltas.setdefault(running.request_id, []).append(delta)
        if news.finished and row.stop_reason is None:
            _log.error("row %s of %s ended after %d tokens", news.key, running.request_id, len(row.tokens))
            self._end(running, EngineFailure(f"sampler {self.name!r} ended a sequence too early"), step)
        elif row.stop_reason is not None and (running.prompt is not None or not self._wants_scores(running, news.key)):
            if not news.finished:
                self._abort([news.key])
            self._owner.pop(news.key, None)
            running.open.discard(news.key)
            if not running.open:
                self._running.pop(running.request_id, None)
                step.ended[running.request_id] = running.result()
        return taken

    def _wants_scores(self, running: _Running, key: str) -> bool:
        request = running.plan.request
        return running.rows[key].index == 0 and (request.prompt_logprobs or request.topk_prompt_logprobs > 0)

    def _end(self, running: _Running, error: TinsmithError, step: SampleStep) -> None:
        self._running.pop(running.request_id, None)
        self._forget(running)
        step.ended[running.request_id] = error

    def _forget(self, running: _Running) -> None:
        for key in running.rows:
            self._owner.pop(key, None)
        self._abort(running.open)
