"""One request of a sampler on its way: its plan, its rows, and what becomes of them.

Not responsible for the passes that compute its logits (`sampling_pass.py`) or for room (`torch_sampler.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from engines.lora import AdapterWeights
from engines.sampling.holders import AnyHolder
from engines.sampling.prompt_scores import PromptScores
from engines.sampling.sampling_rules import DrawRule, stream
from engines.sampling.stops import StopRule
from schemas.errors import Cancelled
from schemas.operations import Sample, SampleDelta, SampledSequence, SampleResult, TopK


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked request with everything resolved: `limit` new tokens at most, `seed` set."""

    request: Sample
    limit: int
    seed: int
    stop: StopRule

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)


@dataclass(eq=False, slots=True)
class Row:
    """One continuation in progress; `index` is its place among the samples of its request."""

    index: int
    plan: Plan
    draws: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[list[int], list[float]]] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] | None = None

    def take(self, token: int, logprob: float) -> None:
        """Append a token and see whether it is the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.plan.stop.reached(self.tokens):
            self.stop_reason = "stop"
        elif len(self.tokens) >= self.plan.limit:
            self.stop_reason = "length"

    def newest(self) -> SampleDelta:
        """The newest token by itself, and why it is the last if it is."""
        tokens, logprobs = np.array(self.tokens[-1:], np.int32), np.array(self.logprobs[-1:], np.float32)
        return SampleDelta(self.index, tokens, logprobs, _topk(self.topk[-1:]), self.stop_reason)

    def result(self) -> SampledSequence:
        """The finished continuation."""
        assert self.stop_reason is not None
        return SampledSequence(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            self.stop_reason,
            _topk(self.topk),
            np.array(self.plain, np.float32) if self.plan.request.plain_logprobs else None,
        )


@dataclass(eq=False, slots=True)
class Running:
    """A request that has room: its prompt is read, then its rows draw.

    `alive` are the rows that draw, in the order of the holder's rows. They have `logits` [alive, V] for their next
    token, or their newest token still has to go through the model (None).
    """

    request_id: str
    plan: Plan
    adapter: AdapterWeights | None
    rule: DrawRule
    scores: PromptScores
    holder: AnyHolder
    rows: list[Row]
    alive: list[Row]
    position: int = 0
    """Tokens of the prompt that the holder has."""
    cached: int = 0
    """How many of them came from the prefix cache."""
    logits: Tensor | None = None

    @classmethod
    def of(cls, request_id: str, plan: Plan, adapter: AdapterWeights | None, holder: AnyHolder) -> Running:
        """A request whose prompt has not been read."""
        request, params = plan.request, plan.request.params
        rows = [Row(i, plan, stream(plan.seed, i)) for i in range(request.num_samples)]
        return cls(
            request_id,
            plan,
            adapter,
            DrawRule(params.temperature, params.top_k, params.top_p),
            PromptScores(request, stream(plan.seed, "alternatives")),
            holder,
            rows,
            list(rows),
        )

    @property
    def reading(self) -> bool:
        """Whether part of the prompt is still to be read."""
        return self.position < self.plan.length

    @property
    def most_tokens(self) -> int:
        """The most that its rows may ever hold."""
        return self.plan.request.num_samples * (self.plan.length + self.plan.limit)

    def let_go(self) -> None:
        """Drop the rows that are finished from the holder."""
        kept = [place for place, row in enumerate(self.alive) if row.stop_reason is None]
        if kept and len(kept) < len(self.alive):
            self.holder.select(kept)
        self.alive = [self.alive[place] for place in kept]

    def cancelled(self) -> Cancelled:
        """What the request has taken until now, by the same count as that of a finished one."""
        return Cancelled(
            prompt_tokens=self.position,
            cached_tokens=self.cached,
            drawn_tokens=sum(len(row.tokens) for row in self.rows),
        )

    def result(self) -> SampleResult:
        """The finished request."""
        return SampleResult(
            sequences=tuple(row.result() for row in self.rows),
            prompt_logprobs=self.scores.logprobs,
            topk_prompt_logprobs=self.scores.topk,
            target_prompt_logprobs=self.scores.targets,
            prompt_alt_tokens=self.scores.alternatives,
            prompt_cache_hit_tokens=self.cached,
        )


def _topk(found: list[tuple[list[int], list[float]]]) -> TopK | None:
    if not found:
        return None
    return TopK(np.array([ids for ids, _ in found], np.int32), np.array([lp for _, lp in found], np.float32))
