"""Whether flooding neighbours leave a project its share: eight projects on a tiny model, seven of them greedy.

Each neighbour keeps many batches of several training runs and many samples on their way, the modest project one request
of training and one sample at a time, first alone and then among them. Two promises: no project that always has work
gets less than half of an even share of the tokens; and the modest one, whose pace is set by how soon it is answered,
keeps at least half of the pace that an even share of the machine would give it: an eighth of its pace alone.

The neighbours are clients in a process of their own, so that the modest project does not wait for their answers to be
read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from store.database import Store
from store.keys import create_key, ensure_project
from tests.support.server import RunningServer, serve
from tests.support.tiny_model import make_tiny_model

MODEL = "bench/tiny"
NEIGHBOURS = 7
PROJECTS = NEIGHBOURS + 1
RUNS, BATCHES, SAMPLES = 2, 4, 12
"""Of a neighbour: training runs, batches of each on their way, and samples on their way."""
DATUMS, LENGTH = 8, 64
PROMPT, DRAWN = 16, 24
PROMISE = 0.5
"""Of an even share."""
STEP = {"learning_rate": 1e-4}


@dataclass(slots=True)
class Tokens:
    """What a project got while it was measured, how long (s) each of its answers took, and its HTTP requests."""

    name: str
    training: int = 0
    sampling: int = 0
    steps: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """One phase: what each project got (the modest one first), and CPU seconds of the server's own process."""

    projects: list[Tokens]
    seconds: float
    cpu: float

    @property
    def requests(self) -> int:
        """HTTP requests of all projects."""
        return sum(one.requests for one in self.projects)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two phases (60)")
    parser.add_argument("--json", type=Path)


def run(given: argparse.Namespace) -> bool:
    """Measure on a server of its own, print the tables; whether the promises were kept."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        base = make_tiny_model(folder / "base")
        keys = asyncio.run(_keys(folder / "data"))
        options = ["--base-model", f"{MODEL}={base}", "--threads", "1", "--log-level", "warning"]
        with serve(folder / "data", options) as server:
            alone, crowd = asyncio.run(_measure(server, keys, given.seconds))
    if given.json:
        given.json.write_text(json.dumps({"alone": asdict(alone), "crowd": asdict(crowd)}))
    sys.stdout.write(_table(alone, crowd) + "\n")
    return min(*_shares(crowd.projects[1:]), *_paces(alone.projects[0], crowd.projects[0])) >= PROMISE


async def _keys(data_dir: Path) -> list[str]:
    """A key for each project; the modest one first."""
    store = await Store.open(data_dir)

    async def make(db: Any) -> list[str]:
        names = ["modest", *(f"neighbour {number}" for number in range(1, PROJECTS))]
        return [(await create_key(db, await ensure_project(db, name), "key"))[1] for name in names]

    try:
        return await store.write(make)
    finally:
        await store.close()


class Client:
    """What one project does, without an SDK."""

    def __init__(self, url: str, key: str, name: str) -> None:
        limits = httpx.Limits(max_connections=None)
        headers = {"X-API-Key": key}
        self._http = httpx.AsyncClient(base_url=f"{url}/api/v1", headers=headers, timeout=300, limits=limits)
        self.tokens = Tokens(name)
        self._sampler = ""
        self._sample = 0

    async def begin(self, runs: int) -> list[str]:
        """A session with a sampler of the base model and so many training runs."""
        session = (await self._post("create_session", sdk_version="bench"))["session_id"]
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        self._sampler = (await self._post("create_sampling_session", **body))["sampling_session_id"]
        made = []
        for number in range(runs):
            body = {"session_id": session, "model_seq_id": number, "base_model": MODEL, "lora_config": {"rank": 4}}
            made.append((await self._do("create_model", **body))["model_id"])
        return made

    async def train(self, model: str, *, steps: bool) -> None:
        """Batches without end, each waited for; with `steps` an optimizer step, waited for too, behind each."""
        tokens = [3 + (7 * place) % 250 for place in range(LENGTH)]
        loss = {"target_tokens": tokens, "weights": [1.0] * LENGTH}
        data = [{"model_input": tokens, "loss_fn_inputs": loss}] * DATUMS
        while True:
            began = time.monotonic()
            await self._do("forward_backward", model_id=model, data=data, loss_fn="cross_entropy")
            self.tokens.training += DATUMS * LENGTH
            if steps:
                await self._do("optim_step", model_id=model, adam_params=STEP)
            self.tokens.steps.append(time.monotonic() - began)

    async def sample(self) -> None:
        """Samples without end, each waited for."""
        params = {"max_tokens": DRAWN, "stop": []}
        while True:
            began = time.monotonic()
            self._sample += 1
            body = {"sampling_session_id": self._sampler, "seq_id": self._sample, "prompt": [5] * PROMPT}
            await self._do("asample", **body, sampling_params=params)
            self.tokens.sampling += PROMPT + DRAWN
            self.tokens.samples.append(time.monotonic() - began)

    async def _do(self, route: str, **body: Any) -> dict[str, Any]:
        request_id = (await self._post(route, **body))["request_id"]
        while True:
            self.tokens.requests += 1
            answer = await self._http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code == 408:
                continue
            outcome: dict[str, Any] = answer.raise_for_status().json()
            if "error" in outcome:
                raise RuntimeError(f"{route} failed: {outcome['error']}")
            return outcome

    async def _post(self, route: str, **body: Any) -> dict[str, Any]:
        self.tokens.requests += 1
        answer = await self._http.post(route, json=body)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found


async def _measure(server: RunningServer, keys: Sequence[str], seconds: float) -> tuple[Window, Window]:
    """The modest project alone, then all of them, the modest one first."""
    modest = Client(server.url, keys[0], "modest")
    [model] = await modest.begin(1)
    working = [asyncio.create_task(modest.train(model, steps=True)), asyncio.create_task(modest.sample())]
    await _work(working, 1.0)
    modest.tokens = Tokens("modest")
    cpu = _cpu(server)
    await _work(working, seconds)
    alone, modest.tokens = Window([modest.tokens], seconds, _cpu(server) - cpu), Tokens("modest")

    ours, theirs = multiprocessing.Pipe()
    flood = multiprocessing.get_context("spawn").Process(target=_flood, args=(theirs, server.url, keys[1:], seconds))
    flood.start()
    theirs.close()
    try:
        await asyncio.to_thread(ours.recv)  # the queues are as long as they get
        modest.tokens = Tokens("modest")
        cpu = _cpu(server)
        await _work(working, seconds)
        spent, got = _cpu(server) - cpu, modest.tokens
        neighbours = await asyncio.to_thread(ours.recv)
    finally:
        flood.join(30)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    return alone, Window([got, *neighbours], seconds, spent)


def _flood(pipe: Connection, url: str, keys: Sequence[str], seconds: float) -> None:
    """The process of the neighbours: says when the floods are there, counts from then on, and sends what they got."""
    asyncio.run(_neighbours(pipe, url, keys, seconds))


async def _neighbours(pipe: Connection, url: str, keys: Sequence[str], seconds: float) -> None:
    clients, working = [], []
    for number, key in enumerate(keys, start=1):
        client = Client(url, key, f"neighbour {number}")
        for model in await client.begin(RUNS):
            working += [asyncio.create_task(client.train(model, steps=False)) for _ in range(BATCHES)]
        working += [asyncio.create_task(client.sample()) for _ in range(SAMPLES)]
        clients.append(client)
    await _work(working, seconds / 6)
    for client in clients:
        client.tokens = Tokens(client.tokens.name)
    pipe.send(None)
    await _work(working, seconds)
    pipe.send([client.tokens for client in clients])
    for task in working:
        task.cancel()
    await asyncio.gather(*working, return_exceptions=True)


async def _work(working: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Let them work; raises what one of them raised."""
    done, _ = await asyncio.wait(working, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


def _cpu(server: RunningServer) -> float:
    """CPU seconds of the server's own process so far: those of its workers are not in it."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _shares(greedy: Sequence[Tokens]) -> list[float]:
    """Of each project that always had work, in even shares of what all of them got: the smaller one of training and
    sampling."""
    training, sampling = sum(one.training for one in greedy), sum(one.sampling for one in greedy)
    count = len(greedy)
    return [min(count * one.training / max(1, training), count * one.sampling / max(1, sampling)) for one in greedy]


def _paces(alone: Tokens, among: Tokens) -> list[float]:
    """Of training and of sampling: the pace among the others, in eighths of the pace alone; at most as alone."""
    pairs = ((alone.steps, among.steps), (alone.samples, among.samples))
    return [PROJECTS * statistics.median(one) / statistics.median(other) if other else 0.0 for one, other in pairs]


def _table(alone: Window, crowd: Window) -> str:
    training, sampling = (sum(getattr(one, what) for one in crowd.projects) for what in ("training", "sampling"))
    lines = [f"{'project':<16}{'training tokens':>17}{'even shares':>13}{'sampling tokens':>17}{'even shares':>13}"]
    for one in crowd.projects:
        shares = (PROJECTS * one.training / max(1, training), PROJECTS * one.sampling / max(1, sampling))
        lines.append(f"{one.name:<16}{one.training:>17,}{shares[0]:>13.2f}{one.sampling:>17,}{shares[1]:>13.2f}")
    lines.append(f"{'all, a second':<16}{training / crowd.seconds:>17,.0f}{'':>13}{sampling / crowd.seconds:>17,.0f}")
    lines.append(f"\n{'modest project (ms)':<24}{'step median':>13}{'p95':>9}{'sample median':>15}{'p95':>9}")
    for label, one in (("alone", alone.projects[0]), ("among seven floods", crowd.projects[0])):
        lines.append(
            f"{label:<24}{_median(one.steps):>13,.0f}{_p95(one.steps):>9,.0f}"
            f"{_median(one.samples):>15,.0f}{_p95(one.samples):>9,.0f}"
        )
    step, sample = _paces(alone.projects[0], crowd.projects[0])
    lines.append(f"{'in eighths of its pace':<24}{step:>13.2f}{'':>9}{sample:>15.2f}")
    for label, window in (("alone", alone), ("among seven floods", crowd)):
        lines.append(
            f"server {label}: {window.requests / window.seconds:,.0f} requests/s, "
            f"{1000 * window.cpu / max(1, window.requests):.1f} ms of CPU each"
        )
    least = min(_shares(crowd.projects[1:]))
    lines.append(f"\nleast share of a project that always has work: {least:.2f} (promised: {PROMISE})")
    lines.append(f"the modest project's share of an even pace: {min(step, sample):.2f} (promised: {PROMISE})")
    return "\n".join(lines)


def _median(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds) if seconds else float("nan")


def _p95(seconds: Sequence[float]) -> float:
    return 1000 * sorted(seconds)[int(0.95 * (len(seconds) - 1))] if seconds else float("nan")
