"""`python -m benchmarks scale`: one server after the other, with ten times as many training runs each time."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from benchmarks.scale.load import Found, Latency, load
from tests.support.server import RunningServer, free_port, serve


@dataclass(frozen=True, slots=True)
class Row:
    """`server_cpu`, `worker_cpu`: milliseconds of CPU for one operation; memory in MiB of the server's process."""

    runs: int
    waiting: int
    created_per_second: float
    accepted_per_second: float
    finished_per_second: float
    accept: Latency
    heartbeat: Latency
    polls: int
    server_cpu: float
    worker_cpu: float
    memory: float


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    parser.add_argument("--runs", type=int, nargs="+", default=[10, 100, 1000], help="training runs (10 100 1000)")
    parser.add_argument("--ahead", type=int, default=10, help="operations of each run that are waited for at once (10)")
    parser.add_argument("--json", type=Path)


def run(given: argparse.Namespace) -> None:
    """Measure each size on a new server and print the table."""
    rows = []
    for runs in given.runs:
        with tempfile.TemporaryDirectory() as folder:
            data_dir, port = Path(folder) / "data", free_port()
            command = (sys.executable, "-m", "benchmarks.scale.server", str(data_dir), str(port), str(runs))
            with serve(data_dir, command=command, port=port) as server:
                rows.append(_measure(server, runs, given.ahead))
        sys.stderr.write(f"{rows[-1]}\n")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows]))
    sys.stdout.write(_table(rows) + "\n")


def _measure(server: RunningServer, runs: int, ahead: int) -> Row:
    process = psutil.Process(server.process.pid)
    used: list[tuple[float, float]] = []

    def look() -> None:
        workers = process.children(recursive=True)
        used.append((_cpu(process), sum(_cpu(worker) for worker in workers)))

    found: Found = asyncio.run(load(server.url, server.key, runs, ahead, look, look))
    (server_before, worker_before), (server_after, worker_after) = used
    return Row(
        runs,
        found.waiting,
        runs / found.created,
        found.waiting / found.accepting,
        found.waiting / found.finishing,
        Latency.of(found.accepts),
        Latency.of(found.heartbeats),
        found.polls,
        1000 * (server_after - server_before) / found.waiting,
        1000 * (worker_after - worker_before) / found.waiting,
        process.memory_info().rss / 2**20,
    )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _table(rows: list[Row]) -> str:
    head = (
        f"{'runs':>6}{'waiting':>9}{'created/s':>11}{'accepted/s':>12}{'finished/s':>12}{'accept ms':>12}{'p95':>8}"
        f"{'heartbeat p95':>15}{'server ms/op':>14}{'worker ms/op':>14}{'MiB':>7}"
    )
    lines = [
        f"{row.runs:>6}{row.waiting:>9}{row.created_per_second:>11.0f}{row.accepted_per_second:>12.0f}"
        f"{row.finished_per_second:>12.0f}{row.accept.median:>12.1f}{row.accept.p95:>8.1f}{row.heartbeat.p95:>15.1f}"
        f"{row.server_cpu:>14.2f}{row.worker_cpu:>14.2f}{row.memory:>7.0f}"
        for row in rows
    ]
    return "\n".join([head, *lines])
