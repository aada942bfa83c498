"""What is read when it is asked for: base models, queues, files, disk, the process.

Not responsible for what has to be counted as it happens (`events.py`).
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from app.metrics.events import Events
from app.services import Services
from store.checkpoints import sizes
from workers.runtime import State as RuntimeState
from workers.runtime_protocol import Runtime


@dataclass(frozen=True)
class Facts:
    """What is told of the server as a whole, at one moment."""

    checkpoints: Mapping[str, tuple[int, int]]
    """By kind: how many, and their bytes."""
    pending: Mapping[str, int]
    """By base model: operations that are accepted and not settled."""
    disk_total: int = 0
    disk_free: int = 0
    draining: bool = False
    snapshots: int = 0
    recoveries: int = 0
    unsettled: int = 0
    writes_waiting: int = 0


class Snapshot(Collector):
    """The state of a server at one moment."""

    def __init__(self, runtimes: Mapping[str, Runtime], facts: Facts) -> None:
        self._runtimes = runtimes
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        yield InfoMetricFamily("tinsmith", "What runs here.", value={"version": version("tinsmith")})
        yield from _states(self._runtimes)
        yield from _work(self._runtimes, self._facts.pending)
        yield from _training(self._runtimes)
        yield from _sampling(self._runtimes)
        yield from _durability(self._facts)
        yield from _files(self._facts)


def _durability(facts: Facts) -> Iterator[Metric]:
    yield _gauge("tinsmith_draining", "1 while the server is stopping and takes no new work.", facts.draining)
    yield _counter("tinsmith_snapshots", "Snapshots of training runs that were recorded.", facts.snapshots)
    yield _counter("tinsmith_recoveries", "Training runs that were brought back after a death.", facts.recoveries)
    yield _gauge("tinsmith_results_unsettled", "Outcomes that the database could not take yet.", facts.unsettled)
    yield _gauge("tinsmith_database_writes_waiting", "Writes that no transaction has taken yet.", facts.writes_waiting)


def _files(facts: Facts) -> Iterator[Metric]:
    count = GaugeMetricFamily("tinsmith_checkpoints", "Checkpoints that are kept.", labels=["kind"])
    size = GaugeMetricFamily("tinsmith_checkpoint_bytes", "Size of the checkpoints that are kept.", labels=["kind"])
    for kind, (number, total) in sorted(facts.checkpoints.items()):
        count.add_metric([kind], number)
        size.add_metric([kind], total)
    yield count
    yield size
    yield _gauge("tinsmith_disk_bytes", "Size of the disk that has the data folder.", facts.disk_total)
    yield _gauge("tinsmith_disk_free_bytes", "What is free on that disk.", facts.disk_free)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=float(value))


def _states(runtimes: Mapping[str, Runtime]) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "tinsmith_base_model_state",
        "1 for the state that the base model is in, else 0.",
        labels=["base_model", "state"],
    )
    restarts = CounterMetricFamily(
        "tinsmith_worker_restarts", "Workers started again after a death.", labels=["base_model"]
    )
    for name, runtime in runtimes.items():
        for state in get_args(RuntimeState):
            states.add_metric([name, state], float(runtime.state == state))
        restarts.add_metric([name], runtime.throughput().restarts)
    yield states
    yield restarts


def _work(runtimes: Mapping[str, Runtime], pending: Mapping[str, int]) -> Iterator[Metric]:
    accepted = GaugeMetricFamily(
        "tinsmith_operations_pending", "Operations that are accepted and not settled.", labels=["base_model"]
    )
    waiting = GaugeMetricFamily(
        "tinsmith_queue_waiting", "Operations that are accepted and not begun.", labels=["base_model", "queue"]
    )
    adapters = GaugeMetricFamily("tinsmith_adapters", "Adapters that the worker has.", labels=["base_model"])
    for name, runtime in runtimes.items():
        load = runtime.load()
        accepted.add_metric([name], pending.get(name, 0))
        waiting.add_metric([name, "training"], load.training)
        waiting.add_metric([name, "sampling"], load.samples)
        adapters.add_metric([name], load.adapters)
    yield accepted
    yield waiting
    yield adapters


def _training(runtimes: Mapping[str, Runtime]) -> Iterator[Metric]:
    label = ["base_model"]
    tokens = CounterMetricFamily("tinsmith_trained_tokens", "Tokens that were trained or scored.", labels=label)
    steps = CounterMetricFamily("tinsmith_optimizer_steps", "Steps of optimizers.", labels=label)
    turns = CounterMetricFamily("tinsmith_training_turns", "Turns of training.", labels=label)
    busy = CounterMetricFamily("tinsmith_training_busy_seconds", "Time of turns of training.", labels=label)
    rate = GaugeMetricFamily(
        "tinsmith_trained_tokens_per_second", "Tokens trained or scored in the last minute.", labels=label
    )
    fill = GaugeMetricFamily(
        "tinsmith_turn_fill_ratio", "Share of the turns' token budget that was used.", labels=label
    )
    mfu = GaugeMetricFamily(
        "tinsmith_model_flops_ratio", "FLOP/s while busy over the measured peak, if known.", labels=label
    )
    gap = GaugeMetricFamily(
        "tinsmith_logprob_gap",
        "Mean and largest |trainer's - client's logprob| of the latest batches that carried logprobs.",
        labels=["base_model", "of"],
    )
    for name, runtime in runtimes.items():
        done = runtime.throughput()
        tokens.add_metric([name], done.tokens)
        steps.add_metric([name], done.steps)
        turns.add_metric([name], done.turns)
        busy.add_metric([name], done.busy_seconds)
        rate.add_metric([name], done.tokens_per_second)
        fill.add_metric([name], done.turn_fill)
        if done.mfu is not None:
            mfu.add_metric([name], done.mfu)
        if done.logprob_gap.batches and math.isfinite(done.logprob_gap.max):
            gap.add_metric([name, "mean"], done.logprob_gap.mean)
            gap.add_metric([name, "max"], done.logprob_gap.max)
    yield from (tokens, steps, turns, busy, rate, fill, mfu, gap)


def _sampling(runtimes: Mapping[str, Runtime]) -> Iterator[Metric]:
    label = ["base_model"]
    drawn = CounterMetricFamily("tinsmith_sampled_tokens", "Tokens that were drawn.", labels=label)
    prompts = CounterMetricFamily(
        "tinsmith_prompt_tokens",
        "Tokens of prompts, read or found in the prefix cache.",
        labels=["base_model", "source"],
    )
    busy = CounterMetricFamily("tinsmith_sampling_busy_seconds", "Time of turns of sampling.", labels=label)
    rate = GaugeMetricFamily("tinsmith_sampled_tokens_per_second", "Tokens drawn in the last minute.", labels=label)
    for name, runtime in runtimes.items():
        done = runtime.throughput().sampling
        drawn.add_metric([name], done.drawn_tokens)
        prompts.add_metric([name, "read"], done.prompt_tokens)
        prompts.add_metric([name, "cached"], done.cached_tokens)
        busy.add_metric([name], done.busy_seconds)
        rate.add_metric([name], done.tokens_per_second)
    yield from (drawn, prompts, busy, rate)


async def expose(services: Services, events: Events, data_dir: Path, *, draining: bool) -> bytes:
    """Everything, in Prometheus' text format. Raises `Unavailable` if the database cannot be read."""
    usage = await asyncio.to_thread(shutil.disk_usage, data_dir)
    facts = Facts(
        checkpoints=await services.store.read(sizes),
        pending=services.operations.pending(),
        disk_total=usage.total,
        disk_free=usage.free,
        draining=draining,
        snapshots=services.history.snapshots_kept,
        recoveries=services.history.recalled,
        unsettled=len(services.operations.settling.waiting_to_settle()),
        writes_waiting=services.store.writes_waiting,
    )
    state = CollectorRegistry()
    state.register(Snapshot(services.models.runtimes, facts))
    ProcessCollector(registry=state)
    return generate_latest(events.registry) + generate_latest(state)
