"""What limits cost where operations are accepted: CPU time of the server's process for one optimizer step that is
posted, made durable and queued, on a scripted engine that runs nothing meanwhile.

CPU time and not elapsed time, and the least of several rounds, so that a busy machine changes little. The cases take
turns.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from app.main import create_app
from app.settings import Settings
from store.keys import create_key, ensure_project
from tests.support.inline_group import InlineWorkerGroup
from tests.support.toy_worker import INFO, ToyEngine, ToySampler
from workers.tinker import TinkerActorRolloutRefWorker

MODEL = "bench/scripted"
RATES = {"requests_per_second": 10**6, "training_tokens_per_second": 10**6, "sampling_tokens_per_second": 10**6}
BOUNDS = {"unfinished_operations": 10**6, "training_token_budget": 10**9, "sampling_token_budget": 10**9}
CASES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "no limits": ({}, {}),
    "one rate of the project": ({"requests_per_second": 10**6}, {}),
    "every limit of the project": ({**RATES, **BOUNDS}, {}),
    "every limit of project and key": ({**RATES, **BOUNDS}, {**RATES, **BOUNDS}),
}
"""Limits of the project and of its key, all far away."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this measurement."""
    parser.add_argument("--operations", type=int, default=200, help="of a round (200)")
    parser.add_argument("--rounds", type=int, default=5, help="of each case (5)")


def run(given: argparse.Namespace) -> None:
    """Measure and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_measure(Path(folder) / "data", given.operations, given.rounds))
    before = min(found["no limits"])
    lines = [f"{'':<34}{'CPU ms each':>12}{'more':>8}"]
    for name, rounds in found.items():
        least = min(rounds)
        lines.append(f"{name:<34}{least:>12.2f}{least - before:>8.2f}")
    sys.stdout.write("\n".join(lines) + "\n")


async def _measure(data_dir: Path, operations: int, rounds: int) -> dict[str, list[float]]:
    settings = Settings(data_dir=data_dir, base_model=(MODEL,), shutdown_grace=0.0, max_adapters=1024)

    def group(name: str, source: str | None) -> InlineWorkerGroup:
        return InlineWorkerGroup(lambda progress: TinkerActorRolloutRefWorker(ToyEngine(), ToySampler(), INFO))

    app = create_app(settings, group_factory=group)
    found: dict[str, list[float]] = {name: [] for name in CASES}
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        clients = {}
        for name, (of_project, of_key) in CASES.items():
            clients[name] = await _client(app, transport, name, of_project, of_key)
        for _ in range(rounds):
            for name, (client, session) in clients.items():
                found[name].append(await _round(client, session, len(found[name]), operations))
    return found


async def _client(
    app: Any, transport: httpx.ASGITransport, name: str, of_project: dict[str, int], of_key: dict[str, int]
) -> tuple[httpx.AsyncClient, str]:
    """A project with these limits, its client and a session of it."""

    async def make(db: Any) -> tuple[str, str, str]:
        project_id = await ensure_project(db, name)
        return project_id, *(await create_key(db, project_id, "key"))

    project_id, key_id, key = await app.state.store.write(make)
    if of_project:
        await app.state.services.limits.set_for_project(project_id, of_project, by="benchmark")
    if of_key:
        await app.state.services.limits.set_for_key(key_id, of_key, by="benchmark")
    url = "http://localhost/api/v1/"
    client = httpx.AsyncClient(transport=transport, base_url=url, headers={"X-API-Key": key}, timeout=600)
    answer = await client.post("create_session", json={"sdk_version": "bench"})
    return client, str(answer.raise_for_status().json()["session_id"])


async def _round(client: httpx.AsyncClient, session: str, number: int, operations: int) -> float:
    """CPU milliseconds for one of so many steps. They wait for the first one, which comes last."""
    body = {"session_id": session, "model_seq_id": number, "base_model": MODEL, "lora_config": {"rank": 1}}
    request = (await client.post("create_model", json=body)).raise_for_status().json()
    while (await client.post("retrieve_future", json={"request_id": request["request_id"]})).status_code == 408:
        continue
    step = {"model_id": request["model_id"], "adam_params": {"learning_rate": 1e-4}}
    began = time.process_time()
    for seq_id in range(2, operations + 2):
        (await client.post("optim_step", json={**step, "seq_id": seq_id})).raise_for_status()
    spent = time.process_time() - began
    last = (await client.post("optim_step", json={**step, "seq_id": 1})).raise_for_status().json()
    while (await client.post("retrieve_future", json={"request_id": last["request_id"]})).status_code == 408:
        continue
    return 1000 * spent / operations
