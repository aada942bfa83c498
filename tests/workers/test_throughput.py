"""Totals and rates from what turns report."""

from __future__ import annotations

import pytest

from schemas.operations import PassStats, SampleStats
from workers.throughput import GAP_BATCHES, LogprobGap, ThroughputMeter


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


def test_sampling_has_totals_and_a_rate_of_its_own() -> None:
    meter = ThroughputMeter()
    meter.begin(0.0)
    meter.add_sampling(SampleStats(100, 20, 30, 8, 0.5), busy=0.6, now=1.0)
    meter.add_sampling(SampleStats(10, 5, 60, 2, 0.25), busy=0.3, now=30.0)
    read = meter.read(40.0, 0.0).sampling
    assert (read.prompt_tokens, read.cached_tokens, read.drawn_tokens, read.steps, read.turns) == (110, 25, 90, 10, 2)
    assert read.seconds == 0.75
    assert read.busy_seconds == pytest.approx(0.9)
    assert read.tokens_per_second == pytest.approx(90 / 40)
    assert meter.read(80.0, 0.0).sampling.tokens_per_second == pytest.approx(60 / 60)
    assert meter.read(40.0, 0.0).tokens == 0, "tokens of training are counted apart"


def test_the_gap_between_sampler_and_trainer_is_that_of_the_latest_batches() -> None:
    meter = ThroughputMeter()
    meter.note_gap({"loss:sum": 1.0})
    assert meter.read(1.0, 0.0).logprob_gap == LogprobGap()
    meter.note_gap({"logprob_gap_abs:mean": 0.5, "logprob_gap_abs:max": 8.0})
    meter.note_gap({"logprob_gap_abs:mean": 0.25, "logprob_gap_abs:max": 1.0})
    meter.note_gap({"logprob_gap_abs:mean": float("nan"), "logprob_gap_abs:max": float("inf")})
    assert meter.read(1.0, 0.0).logprob_gap == LogprobGap(0.375, 8.0, 2, 1)
    for _ in range(GAP_BATCHES):
        meter.note_gap({"logprob_gap_abs:mean": 0.125, "logprob_gap_abs:max": 0.5})
    assert meter.read(1.0, 0.0).logprob_gap == LogprobGap(0.125, 0.5, GAP_BATCHES, 0)
