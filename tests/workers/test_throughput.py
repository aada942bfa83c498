"""Totals and rates from what turns report."""

from __future__ import annotations

import pytest

from schemas.operations import PassStats
from workers.throughput import ThroughputMeter


def test_nothing_was_computed_yet() -> None:
    meter = ThroughputMeter()
    read = meter.read(5.0, 1e9)
    assert (read.tokens, read.turns, read.turn_fill, read.tokens_per_second, read.wall_seconds) == (0, 0, 0.0, 0.0, 0.0)
    assert read.mfu is None


def test_totals_add_up_and_the_rate_is_that_of_the_last_minute() -> None:
    meter = ThroughputMeter()
    meter.begin(100.0)
    meter.begin(300.0)
    stats = PassStats(40, 48, 3, 1, 2e6, {"base": 1.0, "lora": 0.5})
    meter.add(stats, tokens=40, budget=80, steps=1, busy=2.0, now=110.0)
    meter.add(stats, tokens=80, budget=80, steps=0, busy=2.0, now=110.5)
    meter.add(PassStats(seconds={"optimizer": 0.25}), tokens=0, budget=80, steps=2, busy=1.0, now=120.0)
    read = meter.read(130.0, 1e7)
    assert (read.tokens, read.rows, read.sequences, read.passes, read.turns, read.steps) == (120, 96, 6, 2, 3, 3)
    assert read.seconds == {"base": 2.0, "lora": 1.0, "optimizer": 0.25}
    assert read.turn_fill == 0.75, "a turn of steps only has no datums to fill it"
    assert (read.busy_seconds, read.wall_seconds) == (5.0, 30.0)
    assert read.tokens_per_second == pytest.approx(120 / 30)
    assert read.mfu == pytest.approx(4e6 / (5.0 * 1e7))
    assert meter.read(130.0, 0.0).mfu is None
    late = meter.read(160.0, 0.0)
    assert late.tokens_per_second == pytest.approx(120 / 60)
    assert meter.read(500.0, 0.0).tokens_per_second == 0.0
    assert meter.read(500.0, 0.0).tokens == 120


def test_the_memory_of_the_rate_does_not_grow_with_the_number_of_turns() -> None:
    meter = ThroughputMeter()
    meter.begin(0.0)
    for turn in range(20_000):
        meter.add(PassStats(), tokens=1, budget=1, steps=0, busy=0.01, now=turn * 0.01)
    assert meter.read(200.0, 0.0).tokens_per_second == pytest.approx(100.0, rel=0.05)
    assert len(meter._recent) <= 70
