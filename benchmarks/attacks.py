"""Every hostile request of the suite against a server that works for somebody else meanwhile, over a socket.

    python -m benchmarks attacks --rounds 5 --write docs/attacks.md

Each round sends the whole catalogue of `tests/attacks`. Beside it a client of another project trains on the same base
model, step after step. In the end there is a table: how many requests of each kind were tried and answered as stated,
that none was a 5xx, that nothing was left behind (rows and files are those of before), that the other project's weights
have every bit of a twin's that trained alone, and what the server's memory, descriptors and threads did.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

from store.database import Store
from store.keys import create_key, ensure_project
from tests.attacks.catalogue import KINDS
from tests.attacks.catalogue.case import BASE_MODEL
from tests.attacks.sweep import Attacker, Honest, Report, footprint, targets
from tests.support.server import RunningServer, serve
from tests.support.tiny_model import make_tiny_model

SLACK = {"memory": 24.0, "descriptors": 20.0, "threads": 4.0}
"""What may come on top between the end of the first round, when caches are full, and the end of the last."""
PAUSE = 5.0
"""Seconds between the steps of whoever trains meanwhile."""
LINES = ("Traceback", "tml-")
"""What no line of the server's log holds. The line for the terminal that says that the server is ready has its key."""


@dataclass
class Outcome:
    """What a run found. `looks` are the server's figures before the first round and after each."""

    report: Report
    rounds: int
    seconds: float
    looks: list[dict[str, float]]
    steps: int = 0
    lost: list[str] = field(default_factory=list)
    """What is not as it was: rows, files, weights, lines of the log."""

    @property
    def flat(self) -> bool:
        """Whether nothing grew from the end of the first round to that of the last."""
        first, last = self.looks[1], self.looks[-1]
        return all(last[name] - first[name] <= SLACK[name] for name in SLACK)

    @property
    def passed(self) -> bool:
        """Whether everything is as it must be."""
        return not self.report.wrong and not self.lost and self.flat and not any(s >= 500 for s in self.report.statuses)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="write the page with the table here")


def run(given: argparse.Namespace) -> Outcome:
    """Measure and print the table; exits with 1 if anything is not as it must be."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        base = make_tiny_model(folder / "base")
        data_dir = folder / "data"
        keys = asyncio.run(_keys(data_dir, "trains", "twin"))
        options = ["--base-model", f"{BASE_MODEL}={base}", "--threads", "1", "--log-requests", "true"]
        with serve(data_dir, options, ready_within=900) as server:
            outcome = asyncio.run(_attack(server, keys, given.rounds, base))
        log = "\n".join(line for line in server.log.read_text(errors="replace").splitlines() if line[:6] != "ready ")
        outcome.lost += [f"the log holds {line}" for line in LINES if line in log]
        outcome.lost += [
            f"an error in the log: {line[:200]}" for line in log.splitlines() if re.search(r"Z ERROR ", line)
        ]
    sys.stdout.write(table(outcome) + "\n")
    for each in (*outcome.report.wrong[:20], *outcome.lost):
        sys.stderr.write(f"{each}\n")
    if given.write is not None:
        given.write.write_text(page(outcome))
    if not outcome.passed:
        raise SystemExit(1)
    return outcome


async def _keys(data_dir: Path, *projects: str) -> list[str]:
    """Keys of other projects, made before the server starts."""
    store = await Store.open(data_dir)
    try:
        made = []
        for name in projects:

            async def make(db: Any, name: str = name) -> str:
                return (await create_key(db, await ensure_project(db, name), "key"))[1]

            made.append(await store.write(make))
        return made
    finally:
        await store.close()


async def _attack(server: RunningServer, keys: Sequence[str], rounds: int, base: Path) -> Outcome:
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as opened:
        own, trains, alone = [await opened.enter_async_context(_client(server, key)) for key in (server.key, *keys)]
        sends = await opened.enter_async_context(httpx.AsyncClient(timeout=120))
        secrets = [server.key, *keys, str(server.data_dir), str(base)]
        attacker = Attacker(sends, server.url, server.key, await targets(own), secrets)
        honest = await Honest.begin(trains)
        before = footprint(server.data_dir)
        outcome = Outcome(Report(), rounds, 0.0, [])
        over = asyncio.Event()
        working = asyncio.create_task(_train(honest, over))
        outcome.looks.append(_look(server))
        for number in range(rounds):
            for kind, cases in KINDS.items():
                await attacker.sweep(kind, cases(), outcome.report)
            outcome.looks.append(_look(server))
            sys.stderr.write(f"round {number + 1}: {outcome.report.tried.total()} requests, {outcome.looks[-1]}\n")
        over.set()
        outcome.steps = await working
        outcome.lost += _changes(before, footprint(server.data_dir))
        twin = await Honest.begin(alone)
        for _ in range(outcome.steps):
            await twin.round()
        if await honest.ending() != await twin.ending():
            outcome.lost.append("the weights of whoever trained meanwhile are not those of its twin")
        outcome.seconds = time.monotonic() - began
        return outcome


def _client(server: RunningServer, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": key}, timeout=120)


async def _train(honest: Honest, over: asyncio.Event) -> int:
    """Rounds of training until told to stop; returns how many. The twin does them all again, so there is a pause."""
    steps = 0
    while not over.is_set():
        await honest.round()
        steps += 1
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), PAUSE)
    return steps


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What there is more than before. Whoever trains leaves operations and snapshots: those are its own."""
    found = [f"{name}: {before[name]} rows before, {after[name]} after"
             for name in before if name not in ("files", "operations") and before[name] != after[name]]  # fmt: skip
    new = [
        name for name in set(after["files"]) - set(before["files"]) if not name.startswith(("snapshots/", "bodies/"))
    ]
    return found + [f"a new file: {name}" for name in new]


def _look(server: RunningServer) -> dict[str, float]:
    """Of the server's own process, which reads what is hostile."""
    process = psutil.Process(server.process.pid)
    return {
        "memory": process.memory_info().rss / 2**20,
        "descriptors": float(process.num_fds()),
        "threads": float(process.num_threads()),
    }


# -- the page ----------------------------------------------------------------------------------------------------------
def table(outcome: Outcome) -> str:
    """The figures as Markdown."""
    report = outcome.report
    lines = ["| kind | tried | answered as stated |", "|---|---:|---:|"]
    lines += [f"| {kind} | {count:,} | {count - _wrong(report, kind):,} |" for kind, count in report.tried.items()]
    total = report.tried.total()
    lines += [f"| **all** | **{total:,}** | **{total - len(report.wrong):,}** |", ""]
    statuses = ", ".join(f"{status}: {count:,}" for status, count in sorted(report.statuses.items()))
    lines += [
        "| | |",
        "|---|---|",
        f"| statuses | {statuses} |",
        f"| 5xx | {sum(count for status, count in report.statuses.items() if status >= 500)} |",
        f"| slowest answer | {report.slowest:.2f} s |",
        f"| left behind or changed | {len(outcome.lost) or 'nothing'} |",
        f"| steps of the other project meanwhile | {outcome.steps:,}, every bit that of its twin |"
        if not outcome.lost
        else f"| steps of the other project meanwhile | {outcome.steps:,} |",
        *(
            f"| {name}, before and after each round | {', '.join(f'{look[key]:.0f}' for look in outcome.looks)} |"
            for name, key in (("memory (MiB)", "memory"), ("descriptors", "descriptors"), ("threads", "threads"))
        ),
    ]
    return "\n".join(lines)


def _wrong(report: Report, kind: str) -> int:
    return sum(1 for each in report.wrong if each.startswith(f"[{kind}] "))


def page(outcome: Outcome) -> str:
    """docs/attacks.md."""
    machine = f"Python {platform.python_version()}, uvicorn {version('uvicorn')}, {psutil.cpu_count()} cores"
    return PAGE.format(
        rounds=outcome.rounds, machine=machine, minutes=round(outcome.seconds / 60), table=table(outcome)
    )


PAGE = """# What was tried

The catalogue of hostile requests (`tests/attacks/catalogue`), {rounds} times over, through a socket to a server that
trained for another project meanwhile. Each request has one answer that is right: a status, the field that is named,
the shape of the route's errors; no path, no traceback, no key. Measured ({machine}, in {minutes} minutes) by

    python -m benchmarks attacks --rounds {rounds} --write docs/attacks.md

which writes this page.

{table}

The same catalogue runs in `make test` within one process. What else is tried, there and by `make test-slow`:

* losses that pass the look at the door and break when they run (`tests/attacks/test_losses_that_break.py`);
* query parameters that a route does not have, and those and headers that come twice or are written in a second way, on
  every route (`tests/app/test_parameters.py`);
* bytes that two programs on the way could read as different requests (`test_connections.py`), endless and slow heads
  (`tests/app/test_attacks_connection.py`);
* files of an adapter that were altered or made up (`test_adapter_files.py`), downloads that are cut off
  (`test_downloads_cut.py`);
* requests made up from the server's own description by schemathesis (`test_generated.py`; more of them with
  `TINSMITH_EXAMPLES=100`);
* wild bodies for the decoders (`test_fuzz.py`; more of them with `make fuzz`);
* what one project can learn of another's prompts (`test_prefixes_of_others.py`).
"""
