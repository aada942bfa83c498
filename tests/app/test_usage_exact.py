"""What the server counts is what clients counted for themselves, in usage and in budgets alike."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from app.settings import Settings
from tests.app.conftest import MODEL
from tests.app.test_limits import Tenant, tenant, toy_edge
from tests.support.ledger import Ledger, send_once

OPERATIONS = 40
PROJECTS = 3


@pytest.mark.filterwarnings("ignore:overflow")
async def test_random_operations_of_several_projects_are_counted_exactly(
    make_settings: Callable[..., Settings],
) -> None:
    """With limits that hold work back on the way: that must not change what is counted."""
    async with toy_edge(make_settings(poll_hold=5.0)) as edge:
        tenants: list[Tenant] = [await tenant(edge, f"project {number}") for number in range(PROJECTS)]
        limits: list[dict[str, Any]] = [
            {},
            {"unfinished_operations": 2, "training_tokens_per_second": 2000, "training_tokens_burst": 100},
            {"requests_per_second": 100, "requests_burst": 3, "sampling_tokens_per_second": 3000},
        ]
        ledgers = []
        for number, (one, more) in enumerate(zip(tenants, limits, strict=True)):
            await one.limit(training_token_budget=10**6, **more)
            await one.limit("keys", sampling_token_budget=10**6)
            ledger = Ledger(partial(send_once, one.client), MODEL, random.Random(number), vocabulary=100)
            await ledger.begin()
            ledgers.append(ledger)
        await asyncio.gather(*(ledger.work(OPERATIONS) for ledger in ledgers))
        for ledger in ledgers:
            assert min(ledger.own.values()) > 0, "the test would prove nothing"
            ledger.check(await ledger.counted(), await ledger.budgets())
