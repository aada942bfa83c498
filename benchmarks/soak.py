"""Whether a server that works for long keeps what it does not need: descriptors, threads, memory, disk, rows.

A tiny random model, so that as many operations as possible pass: clients train, overwrite a checkpoint, sample, stream,
ask for bad things, close their session and begin a new one. Every few seconds the server's own process and its worker
are looked at. A figure is flat if its median in the last quarter of the time is within a tenth (and a small constant)
of that in the third: the first half fills caches and reaches the shortest retention period, 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import tinker
from tinker import types

from tests.support.server import RunningServer, serve
from tests.support.tiny_model import make_tiny_model

MODEL = "bench/tiny"
RETENTION = (
    *("--sweep-interval", "2", "--snapshot-operations", "8"),
    *("--result-retention-delivered", "600", "--result-retention-undelivered", "600", "--log-retention", "600"),
)
"""The shortest that there are: what is collected at all is collected within the first half of 20 minutes."""
CLOSE_SECONDS = 30.0
"""The SDK waits for its heartbeat when it closes; now and then the cancellation is lost, and it would wait for ever."""
PACE = 10.0
"""Seconds from one session of a client to its next: the same amount of work is remembered at every look."""
SLACK = {"descriptors": 40, "threads": 4, "memory MiB": 24, "disk MiB": 8, "files": 60, "rows": 400}
"""What a figure may grow beside a tenth: the work in flight is not the same at every look, and connections that a
client leaves behind are closed after 75 s."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity: medians of the third and the last quarter, and its highest value."""

    name: str
    early: float
    late: float
    most: float

    @property
    def flat(self) -> bool:
        """See the module's docstring."""
        kind = next((kind for kind in SLACK if self.name.endswith(kind)), "rows")
        return self.late <= 1.1 * self.early + SLACK[kind]


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--json", type=Path, help="write every look here")


def run(given: argparse.Namespace) -> list[Figure]:
    """Measure, print a table; exits with 1 if a figure is not flat."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        base = make_tiny_model(folder / "base")
        options = ["--base-model", f"{MODEL}={base}", "--threads", "1", "--log-level", "warning", *RETENTION]
        with serve(folder / "data", options) as server:
            looks, done = _soak(server, 60 * given.minutes, given.clients)
    if given.json:
        given.json.write_text(json.dumps(looks))
    figures = _figures(looks)
    sys.stdout.write(_table(figures, given, done) + "\n")
    return figures


def _soak(server: RunningServer, seconds: float, clients: int) -> tuple[list[dict[str, float]], int]:
    """What was seen at each look, and how many rounds the clients finished."""
    over = threading.Event()
    rounds = count()
    looks: list[dict[str, float]] = []
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(clients) as threads:
        working = [threads.submit(_client, server, seed, over, lambda: next(rounds)) for seed in range(clients)]
        try:
            while time.monotonic() < end:
                over.wait(min(5.0, seconds / 80))
                looks.append(_look(server))
                failed = [one.exception() for one in working if one.done()]
                if failed:
                    raise RuntimeError("a client failed") from failed[0]
                if len(looks) % 12 == 0:
                    sys.stderr.write(f"{end - time.monotonic():.0f} s to go: {looks[-1]}\n")
        finally:
            over.set()
        for one in working:
            one.result(timeout=300)
    return looks, next(rounds)


def _client(server: RunningServer, seed: int, over: threading.Event, finished: Callable[[], int]) -> None:
    """Sessions, one after the other, until told to stop."""
    while not over.is_set():
        began = time.monotonic()
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        _session(server, service, seed)
        with suppress(TimeoutError):
            service.close("success").result(timeout=CLOSE_SECONDS)
        finished()
        over.wait(max(0.0, PACE - (time.monotonic() - began)))


def _session(server: RunningServer, service: Any, seed: int) -> None:
    training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=seed).result()
    tokens = list(range(3, 40))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    for _ in range(12):
        sent = [training.forward_backward([datum] * 4, "cross_entropy"), training.optim_step(types.AdamParams())]
        for each in sent:
            each.result()
    path = training.save_state("state").result().path
    training.load_state(path).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    sampler.sample(types.ModelInput.from_ints(tokens), 4, types.SamplingParams(max_tokens=16)).result()
    with httpx.Client(base_url=server.url, headers={"X-API-Key": server.key}, timeout=60) as http:
        body = {"model": MODEL, "prompt": "one two", "max_tokens": 8, "stream": True}
        http.post("/v1/completions", json=body).raise_for_status()
        refused = http.post("/v1/completions", json={**body, "temperature": -1})
        if refused.status_code != 400:
            raise RuntimeError(f"a bad request was answered {refused.status_code}")
        run = path.removeprefix("tinker://").split("/")[0]
        for checkpoint in http.get(f"/api/v1/training_runs/{run}/checkpoints").raise_for_status().json()["checkpoints"]:
            http.delete(f"/api/v1/training_runs/{run}/checkpoints/{checkpoint['checkpoint_id']}").raise_for_status()


def _look(server: RunningServer) -> dict[str, float]:
    me = psutil.Process(server.process.pid)
    found: dict[str, float] = {}
    for name, processes in (("server", [me]), ("worker", me.children(recursive=True))):
        found[f"{name} descriptors"] = sum(process.num_fds() for process in processes)
        found[f"{name} threads"] = sum(process.num_threads() for process in processes)
        found[f"{name} memory MiB"] = sum(process.memory_info().rss for process in processes) / 2**20
    sizes = [size for path in server.data_dir.rglob("*") if (size := _size(path)) is not None]
    found["disk MiB"] = sum(sizes) / 2**20
    found["files"] = len(sizes)
    return {**found, **_rows(server.data_dir / "tinsmith.db")}


def _size(path: Path) -> int | None:
    """Bytes of a file; None for a folder, or a file that is gone by now."""
    try:
        return path.stat().st_size if path.is_file() else None
    except FileNotFoundError:
        return None


def _rows(database: Path) -> dict[str, float]:
    """Rows that are working state. Sessions, runs, samplers and usage are the record of what was done."""
    tables = ("operations", "snapshots", "checkpoints")
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)
    try:
        return {f"{name} rows": connection.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0] for name in tables}
    finally:
        connection.close()


def _figures(looks: Sequence[dict[str, float]]) -> list[Figure]:
    quarter = len(looks) // 4
    return [
        Figure(
            name,
            statistics.median(look[name] for look in looks[2 * quarter : 3 * quarter]),
            statistics.median(look[name] for look in looks[-quarter:]),
            max(look[name] for look in looks),
        )
        for name in looks[0]
    ]


def _table(figures: Sequence[Figure], given: argparse.Namespace, done: int) -> str:
    lines = [
        f"{given.minutes:g} minutes, {given.clients} clients, {done} sessions",
        f"{'':<22}{'3rd quarter':>12}{'last quarter':>14}{'most':>10}",
    ]
    for each in figures:
        verdict = "" if each.flat else "   GROWS"
        lines.append(f"{each.name:<22}{each.early:>12.1f}{each.late:>14.1f}{each.most:>10.1f}{verdict}")
    return "\n".join(lines)
