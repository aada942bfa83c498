"""What a base model has computed and how fast: totals of all turns, and the rate of the last minute.

Pure: times are passed in as seconds of any monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from schemas.operations import PassStats

RATE_SECONDS = 60.0
"""The window of `Throughput.tokens_per_second`."""
_RATE_STEP = 1.0
"""Turns that end within this time of each other are kept as one number."""


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


class ThroughputMeter:
    """Adds up turns."""

    def __init__(self) -> None:
        self._tokens = self._rows = self._sequences = self._passes = self._turns = self._steps = 0
        self._flops = self._busy = 0.0
        self._seconds: dict[str, float] = {}
        self._room = 0
        """Token budgets of the turns that computed datums."""
        self._began: float | None = None
        self._recent: deque[tuple[float, int]] = deque()

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
        if self._recent and now - self._recent[-1][0] < _RATE_STEP:
            tokens += self._recent[-1][1]
            now = self._recent.pop()[0]
        self._recent.append((now, tokens))

    def read(self, now: float, peak_flops: float) -> Throughput:
        """The totals at `now`; `peak_flops` in FLOP/s, 0 = unknown."""
        self._forget(now)
        wall = 0.0 if self._began is None else now - self._began
        window = min(wall, RATE_SECONDS)
        recent = sum(tokens for _, tokens in self._recent)
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
            tokens_per_second=recent / window if window > 0 else 0.0,
            mfu=self._flops / (self._busy * peak_flops) if known else None,
        )

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()
