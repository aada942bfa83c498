"""Two thousand samples at once beside two hundred training runs, of five projects of which one is greedy.

Every request has a result, or is told to come later; nobody waits longer than the SDK would. What is computed has the
bits of the same work done alone, nobody gets less than half of an even share, and when the crowd has gone the server is
as it was: descriptors, threads, and what an operation costs; memory stays within a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import pytest
import tinker
from tinker import types

from store.database import Store
from store.keys import create_key, ensure_project
from tests.fault.crowd import (
    DRAWN,
    DRAWS,
    KINDS,
    LENGTH,
    PROMPT,
    RATE,
    Client,
    Project,
    Trainer,
    clients,
    datum,
    draw,
    open_sampler,
    open_session,
    shares,
)
from tests.fault.harness import MODEL
from tests.fault.harness import saved as checkpoint
from tests.support.server import RunningServer, serve

logger = logging.getLogger(__name__)

PROJECTS = ("greedy", "one", "two", "three", "four")
TRAINERS = (80, 30, 30, 30, 30)
SAMPLERS = (1000, 400, 400, 400, 400)
MANY = 2000
"""Samples that are accepted at once."""
ROOM = 600
"""Samples of a project that may wait: those of the greedy one do not all get in."""
GATHER, WINDOW = 30.0, 60.0
"""Seconds until everybody is there, and then of the measurement."""
ROUNDS = 40
"""Steps, and samples, of the client that says what an operation costs."""
EXTRA_MIB = 150.0
"""What the server's process takes for this crowd at most, and may keep for the next one."""
WORKER_MIB = 250.0
"""The same for the worker, which keeps the memory of the largest turn that it had."""
DESCRIPTORS, THREADS = 12, 12
"""What may be more: files of the database that are opened when many read at once, and threads of pools."""


@dataclass
class Look:
    """At the server and its worker: descriptors and threads of both together, MiB of each."""

    descriptors: int
    threads: int
    server: float
    worker: float


@dataclass
class Watch:
    """The highest figures since it was begun."""

    process: psutil.Process
    most: Look = field(default_factory=lambda: Look(0, 0, 0.0, 0.0))

    def look(self) -> Look:
        """Now."""
        workers = self.process.children(recursive=True)
        both = [self.process, *workers]
        return Look(
            sum(each.num_fds() for each in both),
            sum(each.num_threads() for each in both),
            self.process.memory_info().rss / 2**20,
            sum(each.memory_info().rss for each in workers) / 2**20,
        )

    async def go_on(self) -> None:
        """Look until cancelled."""
        while True:
            now = self.look()
            self.most = Look(*(max(getattr(self.most, name), getattr(now, name)) for name in vars(now)))
            await asyncio.sleep(0.25)

    def cpu(self) -> float:
        """Seconds of CPU that both have used."""
        times = [each.cpu_times() for each in (self.process, *self.process.children(recursive=True))]
        return float(sum(one.user + one.system for one in times))


@dataclass
class Quick:
    """What one client alone sees: milliseconds of CPU for a step and a sample, and until both are answered."""

    cpu: float
    wall: float


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A data folder, and a key for each project in it."""
    data_dir = tmp_path_factory.mktemp("crowd") / "data"

    async def make() -> dict[str, str]:
        store = await Store.open(data_dir)
        try:
            return {name: await store.write(lambda db, name=name: _key(db, name)) for name in (*PROJECTS, "alone")}
        finally:
            await store.close()

    return data_dir, asyncio.run(make())


async def _key(db: Any, name: str) -> str:
    return (await create_key(db, await ensure_project(db, name), "key"))[1]


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
async def test_a_crowd_of_samples_and_training_runs_is_served(keys: tuple[Path, dict[str, str]], base: Path) -> None:
    data_dir, by_name = keys
    options = ["--base-model", f"{MODEL}={base}", "--threads", "1", "--log-level", "warning"]
    with serve(data_dir, [*options, "--max-waiting-samples", str(ROOM)], ready_within=900) as server:
        watch = Watch(psutil.Process(server.process.pid))
        alone = Project("alone", by_name["alone"])
        await _quick(server, alone, watch)  # fills caches
        before, quick_before = watch.look(), await _quick(server, alone, watch)
        projects = [Project(name, by_name[name]) for name in PROJECTS]
        crowd = await _crowd(server, projects, watch)
        await asyncio.to_thread(_wait_for, lambda: watch.look().descriptors <= before.descriptors + DESCRIPTORS, 120)
        quick_after, after = await _quick(server, alone, watch), watch.look()
        _report(before, watch.most, after, quick_before, quick_after, projects)
        await _compare(server, alone, crowd)
        for project in projects:
            assert await _counted(server, project) == (project.training, project.sampling)
        log = server.log.read_text()
    assert "Traceback" not in log
    assert " ERROR " not in log
    assert max(watch.most.server, after.server) <= before.server + EXTRA_MIB
    assert max(watch.most.worker, after.worker) <= before.worker + WORKER_MIB
    assert after.descriptors <= before.descriptors + DESCRIPTORS
    assert after.threads <= before.threads + THREADS
    assert quick_after.cpu <= 1.5 * quick_before.cpu + 2


@dataclass
class Crowd:
    """What there is to be compared: every training run, the checkpoint of the first of each project after as many
    steps, and what the official clients got: (kind, losses)."""

    trainers: list[Trainer]
    saved: dict[int, list[dict[str, bytes]]]
    official: list[tuple[int, list[float]]]
    steps: int


async def _crowd(server: RunningServer, projects: Sequence[Project], watch: Watch) -> Crowd:
    """Let them all come, work and go."""
    over = threading.Event()
    async with AsyncExitStack() as opened:
        watching = asyncio.create_task(watch.go_on())
        opened.callback(watching.cancel)
        firsts: list[Trainer] = []
        trainers: list[Trainer] = []
        work: list[Coroutine[Any, Any, None]] = []
        official = [asyncio.create_task(asyncio.to_thread(_official, server, each, over)) for each in projects]
        opened.callback(over.set)
        for project, trains, samples in zip(projects, TRAINERS, SAMPLERS, strict=True):
            made = await opened.enter_async_context(clients(server.url, project, trains + samples + 1))
            session = await open_session(made[0])
            own = [Trainer(client, number % KINDS) for number, client in enumerate(made[:trains])]
            await asyncio.gather(*(each.begin(session, number) for number, each in enumerate(own)))
            await open_sampler(made[0], session, 0, base_model=MODEL)
            await open_sampler(made[0], session, 1, model_path=await _sampled(own[0]))
            firsts.append(own[0])
            trainers += own
            work.append(_heartbeats(made[-1], session, over))
            work += [_train(each, over) for each in own]
            work += [_sample(each, number, over) for number, each in enumerate(made[trains:-1])]
        working = [asyncio.create_task(each) for each in work]
        most = await _window(projects, [*working, *official])
        assert most >= MANY, f"at most {most} samples were accepted at once"
        over.set()
        began = time.monotonic()
        await asyncio.gather(*working)
        losses = await asyncio.gather(*official)
        for project, (_, own_losses) in zip(projects, losses, strict=True):
            project.training += LENGTH * len(own_losses)
            project.sampling += (PROMPT + DRAWN) * len(own_losses)
        logger.info("the last answer came %.1f s after the crowd stopped asking", time.monotonic() - began)
        steps = max(len(each.losses) for each in trainers)
        saved: dict[int, list[dict[str, bytes]]] = {}
        for each in firsts:
            while len(each.losses) < steps:
                await each.step()
            saved.setdefault(each.kind, []).append(checkpoint(server.data_dir, await each.save()))
        for each in firsts:
            for session in each.client.project.sessions:
                await each.client.post(f"sessions/{session}/finish", reason={"type": "success"})
    return Crowd(trainers, saved, losses, steps)


async def _sampled(trainer: Trainer) -> str:
    """The path of what is sampled beside the base model: an adapter after a few steps."""
    for _ in range(3):
        await trainer.step()
    return await trainer.save_for_sampler("sampled")


async def _train(trainer: Trainer, over: threading.Event) -> None:
    while not over.is_set():
        await trainer.step()


async def _sample(client: Client, number: int, over: threading.Event) -> None:
    for place in _ever(number):
        if over.is_set():
            return
        await draw(client, place % 2, place // 2 % DRAWS)


def _ever(number: int) -> Any:
    while True:
        yield number
        number += 1


async def _heartbeats(client: Client, session: str, over: threading.Event) -> None:
    while not over.is_set():
        await client.post("session_heartbeat", session_id=session)
        await asyncio.sleep(1)


def _official(server: RunningServer, project: Project, over: threading.Event) -> tuple[int, list[float]]:
    """The SDK among them: trains and samples, and has the numbers of its kind."""
    kind = len(project.name) % KINDS
    service = tinker.ServiceClient(base_url=server.url, api_key=project.key)
    training = service.create_lora_training_client(base_model=MODEL, rank=2, seed=kind).result()
    sampler = service.create_sampling_client(base_model=MODEL).result()
    plain = datum(kind)
    data = [types.Datum(types.ModelInput.from_ints(plain["model_input"]), plain["loss_fn_inputs"])]
    losses: list[float] = []
    number = 0
    while not over.is_set():
        batch = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=RATE))
        prompt = [3 + (number * 17 + position) % 250 for position in range(PROMPT)]
        params = types.SamplingParams(max_tokens=DRAWN, seed=number, stop=[])
        drawn = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result(timeout=300)
        tokens = list(drawn.sequences[0].tokens)
        assert project.drawn.setdefault((0, number), tokens) == tokens
        losses.append(batch.result(timeout=300).metrics["loss:sum"])
        step.result(timeout=300)
        number = (number + 1) % DRAWS
    with contextlib.suppress(TimeoutError):  # now and then the SDK loses the cancellation of its own heartbeat
        service.close("success").result(timeout=30)
    return kind, losses


async def _window(projects: Sequence[Project], working: Sequence[asyncio.Task[Any]]) -> int:
    """Let them work, and compare what the projects got; returns how many samples were accepted at once at most."""
    most = await _look_at(projects, working, GATHER)
    began = [(each.training, each.sampling) for each in projects]
    most = max(most, await _look_at(projects, working, WINDOW))
    for place, kind in enumerate(("training", "sampling")):
        got = [getattr(each, kind) - old[place] for each, old in zip(projects, began, strict=True)]
        logger.info("%s tokens in %.0f s: %s", kind, WINDOW, dict(zip(PROJECTS, got, strict=True)))
        if kind == "training":  # all of a project step together: a round more or less is chance
            got = [tokens + count * LENGTH for tokens, count in zip(got, TRAINERS, strict=True)]
        assert min(shares(got)) >= 0.5, f"{kind}: {shares(got)}"
    return most


async def _look_at(projects: Sequence[Project], working: Sequence[asyncio.Task[Any]], seconds: float) -> int:
    most, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        done, _ = await asyncio.wait(working, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
            raise AssertionError("a client stopped")
        most = max(most, sum(each.accepted for each in projects))
    return most


async def _quick(server: RunningServer, project: Project, watch: Watch) -> Quick:
    async with clients(server.url, project, 1) as [client]:
        session = await open_session(client)
        project.samplers.clear()
        await open_sampler(client, session, 0, base_model=MODEL)
        trainer = Trainer(client, 0)
        await trainer.begin(session, 0)
        cpu, began = watch.cpu(), time.monotonic()
        for number in range(ROUNDS):
            await trainer.step()
            await draw(client, 0, number % DRAWS)
        cpu, took = watch.cpu() - cpu, time.monotonic() - began
        await client.post(f"sessions/{session}/finish", reason={"type": "success"})
    return Quick(1000 * cpu / ROUNDS, 1000 * took / ROUNDS)


async def _compare(server: RunningServer, project: Project, crowd: Crowd) -> None:
    """Each kind once more, with nobody else on the server."""
    async with _alone(server, project) as (client, session):
        for kind in range(KINDS):
            trainer = Trainer(client, kind)
            await trainer.begin(session, kind)
            if kind == 0:
                await open_sampler(client, session, 1, model_path=await _sampled(trainer))
            same = [each.losses for each in crowd.trainers if each.kind == kind]
            same += [losses for number, losses in crowd.official if number == kind]
            assert same
            if kind in crowd.saved:
                await _train_to(trainer, crowd.steps)
                expected = checkpoint(server.data_dir, await trainer.save())
                assert all(files == expected for files in crowd.saved[kind])
            await _train_to(trainer, max(map(len, same)))
            other = [losses for losses in same if losses != trainer.losses[: len(losses)] or not losses]
            assert not other, f"kind {kind}: {[each[:4] for each in other]}, alone {trainer.losses[:4]}"
        drawn = {(place, number): await draw(client, place, number) for place in (0, 1) for number in range(DRAWS)}
    for each in {id(trainer.client.project): trainer.client.project for trainer in crowd.trainers}.values():
        assert each.drawn
        assert {which: drawn[which] for which in each.drawn} == each.drawn


async def _train_to(trainer: Trainer, steps: int) -> None:
    while len(trainer.losses) < steps:
        await trainer.step()


@asynccontextmanager
async def _alone(server: RunningServer, project: Project) -> AsyncIterator[tuple[Client, str]]:
    async with clients(server.url, project, 1) as [client]:
        session = await open_session(client)
        project.samplers.clear()
        await open_sampler(client, session, 0, base_model=MODEL)
        yield client, session


async def _counted(server: RunningServer, project: Project) -> tuple[int, int]:
    """Training and sampling tokens of a project, as they will be billed."""
    hour = timedelta(hours=1)
    end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + hour
    window = {"starting_on": (end - 3 * hour).isoformat(), "ending_before": end.isoformat()}
    async with httpx.AsyncClient(headers={"X-API-Key": project.key}, timeout=60) as http:
        answer = await http.get(f"{server.url}/api/v1/billing/usage/events", params=window)
    rows = [row["event_info"] for row in answer.raise_for_status().json()["data"]]
    training = sum(row["token_count"] for row in rows if row["type"] == "training")
    return training, sum(row["token_count"] for row in rows if row["type"].startswith("sampling"))


def _wait_for(true: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.5)


def _report(
    before: Look, most: Look, after: Look, quick: Quick, quick_after: Quick, projects: Sequence[Project]
) -> None:
    for name in vars(before):
        logger.info(
            "%s: %.0f before, %.0f at most, %.0f after", name, *(getattr(x, name) for x in (before, most, after))
        )
    logger.info("a step and a sample alone: %.1f ms of CPU before, %.1f after", quick.cpu, quick_after.cpu)
    logger.info("until both are answered: %.1f ms before, %.1f after", quick.wall, quick_after.wall)
    logger.info("samples told to come later: %s", {each.name: each.refused for each in projects})
    slowest = {route: max(each.slowest.get(route, 0.0) for each in projects) for route in projects[0].slowest}
    logger.info("slowest answers (s): %s", {route: round(seconds, 2) for route, seconds in slowest.items()})
