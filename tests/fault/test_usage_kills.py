"""Usage and budgets are exact while workers and servers are killed: no token is lost or counted twice."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.database import Store
from store.keys import create_key, ensure_project
from store.limits import key_subject, project_subject, set_limits
from tests.fault.harness import MODEL, Service
from tests.support.ledger import Ledger, send_until_answered

PROJECTS = 3
OPERATIONS = 30
VICTIMS = ("worker", "server", "worker", "tree", "server")


async def _tenants(data_dir: Path) -> list[str]:
    """Projects with budgets and limits, before the server begins; returns their keys."""
    store = await Store.open(data_dir)

    async def make(db: Any) -> list[str]:
        keys = []
        for number in range(PROJECTS):
            project_id = await ensure_project(db, f"project {number}")
            key_id, key = await create_key(db, project_id, "key")
            now = datetime.now(UTC)
            await set_limits(
                db, project_subject(project_id), {"training_token_budget": 1e6, "unfinished_operations": 4}, now
            )
            await set_limits(
                db,
                key_subject(key_id),
                {"sampling_token_budget": 1e6, "requests_per_second": 20, "requests_burst": 5},
                now,
            )
            keys.append(key)
        return keys

    try:
        return await store.write(make)
    finally:
        await store.close()


def _kill(service: Service, over: threading.Event, deaths: list[str]) -> None:
    """One after the other, at random moments."""
    chance = random.Random(11)
    for victim in VICTIMS:
        if over.wait(0.5 + 2 * chance.random()):
            return
        service.wait_until_ready()
        time.sleep(chance.random())
        if {"worker": service.kill_worker, "server": service.kill_server, "tree": service.kill_tree}[victim]():
            deaths.append(victim)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_killed_workers_and_servers_neither_lose_nor_double_a_token(tmp_path: Path, base: Path) -> None:
    service = Service(tmp_path, base, "--snapshot-operations", "8", "--snapshot-share", "1")
    keys = asyncio.run(_tenants(service.data_dir))
    service.start()
    over, deaths = threading.Event(), list[str]()
    killer = threading.Thread(target=_kill, args=(service, over, deaths))
    try:
        killer.start()
        ledgers = asyncio.run(_work(service, keys, killer))
        over.set()
        killer.join()
        assert len(deaths) >= 3, f"only {deaths} died"
        for ledger, counted, budgets in ledgers:
            ledger.check(counted, budgets)
        left = "operations, held, training_reserved, sampling_reserved"
        rows = service.rows(f"SELECT DISTINCT {left} FROM limit_counters")
        assert rows == [(0, 0, 0, 0)], "nothing stays reserved"
    finally:
        over.set()
        service.stop()


async def _work(
    service: Service, keys: list[str], killer: threading.Thread
) -> list[tuple[Ledger, dict[str, int], dict[str, float]]]:
    """Random operations until nobody is killed any more; each client's own count, and what the server says."""
    ledgers = []
    for number, key in enumerate(keys):
        client = httpx.AsyncClient(base_url=f"{service.url}/api/v1", headers={"X-API-Key": key}, timeout=120)
        ledgers.append(Ledger(partial(send_until_answered, client), MODEL, random.Random(number), vocabulary=259))
    await asyncio.gather(*(_client(ledger, killer) for ledger in ledgers))
    return [(ledger, await ledger.counted(), await ledger.budgets()) for ledger in ledgers]


async def _client(ledger: Ledger, killer: threading.Thread) -> None:
    await ledger.begin()
    await ledger.work(OPERATIONS)
    while killer.is_alive():
        await ledger.work(3)
