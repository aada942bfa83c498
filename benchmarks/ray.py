"""What Ray costs: the same small operations on worker processes, on a Ray cluster, and there with a sampler of its own.

A tiny random model, so that nearly all of the time is overhead: one client, one operation after the other, each sent
and its result waited for by plain HTTP. Reported for each layout: seconds from the command to the first ready answer,
the latency of each operation, and the memory of the server with all that it started (Ray's own processes included).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil  # type: ignore[import-untyped]

from schemas.proto import tinker_public_pb2 as pb
from tests.support.server import RunningServer, serve
from tests.support.tiny_model import make_tiny_model

MODEL = "bench/tiny"
LAYOUTS = {"embedded": (), "ray": ("--ray", "local"), "ray, a sampler": ("--ray", "local", "--samplers", "1")}
TOKENS = 64
TARGETS = 1_360
"""Targets of each token of the large body: with their weights 64 x 1,360 x 12 bytes = 1.04 MB."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from sending a request to its result."""

    median: float
    p95: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Latency:
        ordered = sorted(1000 * value for value in seconds)
        return cls(statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))])


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB of a number of processes. `uss` is what would be free without them; `rss` counts shared pages once each."""

    processes: int
    rss: float
    uss: float


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured on one layout."""

    layout: str
    start_seconds: float
    operations: dict[str, Latency]
    memory: Memory
    drawn: list[int]
    """Tokens that the trained adapter draws: the same on every layout, or they did not do the same work."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m benchmarks ray`."""
    parser.add_argument("--repeats", type=int, default=100, help="operations of each kind; a third as many large ones")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="what is measured")


def run(given: argparse.Namespace) -> list[Found]:
    """Measure the layouts one after the other, and print the table."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        base = make_tiny_model(Path(folder) / "tiny")
        for number, layout in enumerate(given.layouts):
            options = ["--base-model", f"{MODEL}={base}", "--threads", "1", "--log-level", "warning", *LAYOUTS[layout]]
            began = time.monotonic()
            with serve(Path(folder) / f"data-{number}", options, ready_within=400) as server:
                started = time.monotonic() - began
                operations, drawn = _measure(server, given.repeats)
                found.append(Found(layout, started, operations, _memory(server), drawn))
            sys.stderr.write(json.dumps(asdict(found[-1])) + "\n")
            if drawn != found[0].drawn:
                raise RuntimeError(f"{layout} and {found[0].layout} drew different tokens from the same adapter")
    sys.stdout.write(_table(found, given.repeats) + "\n")
    return found


def _measure(server: RunningServer, repeats: int) -> tuple[dict[str, Latency], list[int]]:
    """The latencies, and what the adapter draws that came of it all."""
    with server.client() as http:
        session = http.post("create_session", json={"sdk_version": "bench"}).raise_for_status().json()["session_id"]
        opening = {"session_id": session, "base_model": MODEL}
        created = _done(http, "create_model", {**opening, "model_seq_id": 0, "lora_config": {"rank": 8, "seed": 3}})
        model = created["model_id"]
        sampler = http.post("create_sampling_session", json={**opening, "sampling_session_seq_id": 0})
        drawing = {"sampling_session_id": sampler.raise_for_status().json()["sampling_session_id"], "prompt": [5, 6]}
        numbers, samples = itertools.count(1), itertools.count()

        def train(body: bytes) -> None:
            head = pb.ForwardBackwardRequest(model_id=model, seq_id=next(numbers)).SerializeToString()
            _done(http, "forward_backward", head + body)

        def step() -> None:
            adam = {"learning_rate": 1e-4}
            _done(http, "optim_step", {"model_id": model, "seq_id": next(numbers), "adam_params": adam})

        def sample() -> None:
            params = {"max_tokens": 1, "seed": 1}
            _done(http, "asample", {**drawing, "seq_id": next(samples), "sampling_params": params, "num_samples": 1})

        small, large = _examples(1), _examples(TARGETS)
        kinds: dict[str, tuple[Callable[[], None], int]] = {
            f"forward_backward, {len(small) / 1000:.0f} kB": (lambda: train(small), repeats),
            f"forward_backward, {len(large) / 1e6:.2f} MB": (lambda: train(large), max(10, repeats // 3)),
            "optim_step": (step, repeats),
            "sample of one token": (sample, repeats),
        }
        latencies = {name: _timed(work, count) for name, (work, count) in kinds.items()}
        save = {"model_id": model, "seq_id": next(numbers), "path": "trained"}
        trained = {"session_id": session, "model_path": _done(http, "save_weights_for_sampler", save)["path"]}
        sampler = http.post("create_sampling_session", json={**trained, "sampling_session_seq_id": 1})
        drawing = {**drawing, "sampling_session_id": sampler.raise_for_status().json()["sampling_session_id"]}
        params = {"max_tokens": 32, "seed": 7, "stop": []}
        outcome = _done(http, "asample", {**drawing, "seq_id": 0, "sampling_params": params, "num_samples": 1})
        return latencies, outcome["sequences"][0]["tokens"]


def _timed(work: Callable[[], None], count: int) -> Latency:
    for _ in range(5):  # whatever happens only once
        work()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return Latency.of(taken)


def _done(http: httpx.Client, route: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
    """Send an operation and wait for its result."""
    if isinstance(body, bytes):
        answer = http.post(route, content=body, headers={"Content-Type": "application/x-protobuf"})
    else:
        answer = http.post(route, json=body)
    promise = {"request_id": answer.raise_for_status().json()["request_id"]}
    while (outcome := http.post("retrieve_future", json=promise)).status_code == 408:
        continue
    if outcome.status_code != 200 or b'"error"' in outcome.content[:200]:
        raise RuntimeError(f"{route} failed: {outcome.text[:300]}")
    found: dict[str, Any] = json.loads(outcome.content) if outcome.content[:1] == b"{" else {}
    return found


def _examples(targets: int) -> bytes:
    """One datum of `TOKENS` tokens with so many targets each; a number in front of it makes it a request."""
    rng = np.random.default_rng(0)
    message = pb.ForwardBackwardRequest(loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = rng.integers(3, 259, TOKENS).astype("<i4").tobytes()
    shape = [TOKENS] if targets == 1 else [TOKENS, targets]
    for name, values, kind in (
        ("target_tokens", rng.integers(3, 259, shape).astype("<i8"), pb.DTYPE_INT64),
        ("weights", np.full(shape, 1 / targets, "<f4"), pb.DTYPE_FLOAT32),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), kind
        tensor.shape.extend(shape)
    data: bytes = message.SerializeToString()
    return data


def _memory(server: RunningServer) -> Memory:
    """Of the server and of every process that came of it."""
    me = psutil.Process(server.process.pid)
    sizes = []
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            sizes.append(process.memory_full_info())
    return Memory(len(sizes), sum(one.rss for one in sizes) / 2**20, sum(one.uss for one in sizes) / 2**20)


def _table(found: Sequence[Found], repeats: int) -> str:
    width = 17
    head = f"{f'median (p95), {repeats} repeats':<28}" + "".join(f"{one.layout:>{width}}" for one in found)
    rows = [head, f"{'ready after, s':<28}" + "".join(f"{one.start_seconds:>{width}.1f}" for one in found)]
    for name in found[0].operations:
        cells = (f"{one.operations[name].median:.1f} ({one.operations[name].p95:.1f})" for one in found)
        rows.append(f"{name + ', ms':<28}" + "".join(f"{cell:>{width}}" for cell in cells))
    for label, read in (
        ("processes", lambda one: f"{one.memory.processes}"),
        ("memory (RSS), MiB", lambda one: f"{one.memory.rss:.0f}"),
        ("memory (USS), MiB", lambda one: f"{one.memory.uss:.0f}"),
    ):
        rows.append(f"{label:<28}" + "".join(f"{read(one):>{width}}" for one in found))
    return "\n".join([*rows, json.dumps([asdict(one) for one in found])])
