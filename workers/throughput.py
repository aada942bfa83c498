"""What a base model has computed and how fast: totals of all turns, rates of the last minute, and how well sampler and
trainer agree.

Pure: times are passed in as seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.operations import PassStats, SampleStats

RATE_SECONDS = 60.0
"""The window of `Throughput.tokens_per_second`."""
_RATE_STEP = 1.0
"""Turns that end within this time of each other are kept as one number."""
GAP_BATCHES = 256
"""The training batches that `LogprobGap` tells about: the latest."""


@dataclass(frozen=True, slots=True)
class SamplingThroughput:
    """Totals of sampling. Of the prompts, `prompt_tokens` were read and `cached_tokens` found in the prefix cache;
    `drawn_tokens` in `steps` of the engine, in `turns` of the worker. `seconds` were spent in the engine,
    `busy_seconds` with the way there and back. `tokens_per_second` is that of drawing in the last minute."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    drawn_tokens: int = 0
    steps: int = 0
    turns: int = 0
    seconds: float = 0.0
    busy_seconds: float = 0.0
    tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """|logprob of the trainer - logprob that the client sent| over the latest batches that carried `logprobs`.

    `mean` of the batches' means and `max` of their largest; a batch whose gap is not a finite number is only counted
    in `broken`. `batches` are those that the numbers are made of; with none of them both are 0.
    """

    mean: float = 0.0
    max: float = 0.0
    batches: int = 0
    broken: int = 0


@dataclass(frozen=True, slots=True)
class Throughput:
    """Totals since the runtime began, restarts of the worker included.

    `tokens` were trained or scored, `rows` were computed for them (the rest aligned kernels), in `passes` through the
    base model and `turns` of the worker. `turn_fill` is the share of the turns' token budget that was used, 0 to 1
    (more, if single datums exceed it). `seconds` by part as in `PassStats`; `busy_seconds` is the time of the turns,
    `wall_seconds` all time since the base model was loaded first. `tokens_per_second` is that of the last minute.
    `mfu` is base-model FLOP/s while busy over the measured peak, 0 to 1; None where no peak is known.
    """

    tokens: int
    rows: int
    sequences: int
    passes: int
    turns: int
    steps: int
    flops: float
    seconds: Mapping[str, float]
    turn_fill: float
    busy_seconds: float
    wall_seconds: float
    tokens_per_second: float
    mfu: float | None
    sampling: SamplingThroughput
    logprob_gap: LogprobGap
    restarts: int = 0
    """How often the worker was started again after a death."""


class ThroughputMeter:
    """Adds up turns."""

    def __init__(self) -> None:
        self._tokens = self._rows = self._sequences = self._passes = self._turns = self._steps = 0
        self._flops = self._busy = 0.0
        self._restarts = 0
        self._seconds: dict[str, float] = {}
        self._room = 0
        """Token budgets of the turns that computed datums."""
        self._began: float | None = None
        self._recent = _Recent()
        self._sampled = SampleStats()
        self._sample_turns, self._sample_busy = 0, 0.0
        self._recent_drawn = _Recent()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=GAP_BATCHES)
        """Mean and largest gap of a batch; not finite where it had none."""

    def begin(self, now: float) -> None:
        """The base model is loaded; only the first time counts."""
        self._began = now if self._began is None else self._began

    def add(self, stats: PassStats, *, tokens: int, budget: int, steps: int, busy: float, now: float) -> None:
        """A turn has ended at `now` after `busy` seconds: `tokens` of datums (0 = steps only) and `steps`."""
        self._turns += 1
        self._tokens += tokens
        self._steps += steps
        self._room += budget if tokens else 0
        self._rows += stats.rows
        self._sequences += stats.sequences
        self._passes += stats.passes
        self._flops += stats.flops
        self._busy += busy
        for part, seconds in stats.seconds.items():
            self._seconds[part] = self._seconds.get(part, 0.0) + seconds
        self._recent.add(tokens, now)

    def add_sampling(self, stats: SampleStats, *, busy: float, now: float) -> None:
        """A turn of sampling has ended at `now` after `busy` seconds."""
        total = self._sampled
        self._sampled = SampleStats(
            prompt_tokens=total.prompt_tokens + stats.prompt_tokens,
            cached_tokens=total.cached_tokens + stats.cached_tokens,
            drawn_tokens=total.drawn_tokens + stats.drawn_tokens,
            steps=total.steps + stats.steps,
            seconds=total.seconds + stats.seconds,
        )
        self._sample_turns += 1
        self._sample_busy += busy
        self._recent_drawn.add(stats.drawn_tokens, now)

    def note_restart(self) -> None:
        """The worker was started again."""
        self._restarts += 1

    def note_gap(self, metrics: Mapping[str, float]) -> None:
        """A training batch has ended with these metrics; those of a batch without `logprobs` have no gap."""
        mean = metrics.get("logprob_gap_abs:mean")
        if mean is not None:
            self._gaps.append((mean, metrics.get("logprob_gap_abs:max", mean)))

    def read(self, now: float, peak_flops: float) -> Throughput:
        """The totals at `now`; `peak_flops` in FLOP/s, 0 = unknown."""
        wall = 0.0 if self._began is None else now - self._began
        window = min(wall, RATE_SECONDS)
        known = peak_flops > 0 and self._busy > 0
        return Throughput(
            tokens=self._tokens,
            rows=self._rows,
            sequences=self._sequences,
            passes=self._passes,
            turns=self._turns,
            steps=self._steps,
            flops=self._flops,
            seconds=dict(self._seconds),
            turn_fill=self._tokens / self._room if self._room else 0.0,
            busy_seconds=self._busy,
            wall_seconds=wall,
            tokens_per_second=self._recent.rate(now, window),
            mfu=self._flops / (self._busy * peak_flops) if known else None,
            sampling=SamplingThroughput(
                prompt_tokens=self._sampled.prompt_tokens,
                cached_tokens=self._sampled.cached_tokens,
                drawn_tokens=self._sampled.drawn_tokens,
                steps=self._sampled.steps,
                turns=self._sample_turns,
                seconds=self._sampled.seconds,
                busy_seconds=self._sample_busy,
                tokens_per_second=self._recent_drawn.rate(now, window),
            ),
            logprob_gap=self._gap(),
            restarts=self._restarts,
        )

    def _gap(self) -> LogprobGap:
        usable = [(mean, most) for mean, most in self._gaps if math.isfinite(mean) and math.isfinite(most)]
        broken = len(self._gaps) - len(usable)
        if not usable:
            return LogprobGap(broken=broken)
        mean = sum(mean for mean, _ in usable) / len(usable)
        return LogprobGap(mean, max(most for _, most in usable), len(usable), broken)


class _Recent:
    """Tokens of the last `RATE_SECONDS`, in steps of `_RATE_STEP`."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()

    def add(self, tokens: int, now: float) -> None:
        if self._steps and now - self._steps[-1][0] < _RATE_STEP:
            began, before = self._steps.pop()
            now, tokens = began, before + tokens
        self._steps.append((now, tokens))
        self._forget(now)

    def rate(self, now: float, window: float) -> float:
        """Tokens per second in the `window` seconds before `now`; 0 if there was no time."""
        self._forget(now)
        return sum(tokens for _, tokens in self._steps) / window if window > 0 else 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def _forget(self, now: float) -> None:
        while self._steps and self._steps[0][0] < now - RATE_SECONDS:
            self._steps.popleft()
