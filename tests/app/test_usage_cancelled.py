"""What cancelled samples drew is counted: by usage, budgets and rates, to the token. The sampler here steps when the
test lets it, and counts for itself who draws at each step: the server's numbers are compared with that."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from app.settings import Settings
from engines.sampling.base import SampleStep
from tests.app.conftest import running
from tests.app.test_limits import Tenant, refusal, tenant
from tests.support.inline_group import InlineWorkerGroup
from tests.support.toy_worker import INFO, ToyEngine, ToySampler
from workers.tinker import TinkerActorRolloutRefWorker

SAMPLES = 16
LEAVING = SAMPLES // 2
"""So many of these are cancelled, before they have all their tokens."""
PROJECTS = 2
BURST = 10**6
SLOW = 1e-4
"""Tokens a second that flow into a bucket: none, while a test lasts."""


class Metered(ToySampler):
    """Counts, at each step, the prompts that begin and the rows that draw, by project, and the steps of each request.
    No permit, no step."""

    def __init__(self) -> None:
        super().__init__(max_rows=6)
        self.permits = threading.Semaphore(0)
        self.prompts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.standing = asyncio.Lock()
        """Held by whoever permits steps, or wants none meanwhile."""

    def permit(self) -> None:
        """One more step. A permit that was not taken is not added to: the worker may be as slow as it likes."""
        self.permits.acquire(blocking=False)
        self.permits.release()

    def step(self) -> SampleStep:
        return super().step() if self.permits.acquire(timeout=0.01) else SampleStep()

    async def until_begun(self, project_id: str) -> None:
        """Step until somebody of this project draws."""
        before = self.tokens[project_id]
        while self.tokens[project_id] == before:
            self.permit()
            await asyncio.sleep(0.002)

    def _admit(self) -> int:
        before = set(self.running)
        read = super()._admit()
        for request_id, request in self.running.items():
            project_id = request.sample.cache_domain
            if request_id not in before:
                self.prompts[project_id] += len(request.sample.prompt)
            self.tokens[project_id] += request.sample.num_samples
            self.steps[request_id] += 1
        return read


def served(settings: Settings, sampler: Metered) -> Any:
    def group(name: str, source: str | None) -> InlineWorkerGroup:
        return InlineWorkerGroup(lambda progress: TinkerActorRolloutRefWorker(ToyEngine(), sampler, INFO))

    return running(settings, group)


async def usage(one: Tenant) -> dict[tuple[str, str | None], int]:
    """Tokens by kind and session."""
    end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    window = {"starting_on": (end - timedelta(hours=3)).isoformat(), "ending_before": end.isoformat()}
    found: Counter[tuple[str, str | None]] = Counter()
    for row in (await one.client.get("billing/usage/events", params=window)).json()["data"]:
        found[row["event_info"]["type"], row.get("session_id")] += row["event_info"]["token_count"]
    return found


async def cancel(one: Tenant, answer: httpx.Response) -> None:
    body = {"request_id": answer.json()["request_id"]}
    assert (await one.client.post("cancel_future", json=body)).status_code == 204


async def leave_at_random(one: Tenant, sampler: Metered, chance: random.Random) -> list[dict[str, Any]]:
    """Samples that are cancelled after some steps, or not at all, at random; the last ones end with their session."""
    lengths = [60] * LEAVING + [chance.randint(1, 20) for _ in range(SAMPLES - LEAVING)]
    chance.shuffle(lengths)
    answers = [
        await one.sample(length, prompt=chance.randint(1, 4), num_samples=chance.randint(1, 3)) for length in lengths
    ]
    answers += [await one.sample(60) for _ in range(3)]
    following = [asyncio.ensure_future(one.outcome(answer, 120)) for answer in answers]
    leaving = {number: chance.randint(0, 10) for number, length in enumerate(lengths) if length == 60}
    while not all(each.done() for each in following[:SAMPLES]):
        async with sampler.standing:  # until those that leave have left: else they might come to their end
            sampler.permit()
            await asyncio.sleep(0.002)
            for number, most in list(leaving.items()):
                if sampler.steps[answers[number].json()["request_id"]] >= most:
                    del leaving[number]
                    await cancel(one, answers[number])
                    await following[number]
    await one.client.post(f"sessions/{one.session}/finish", json={"reason": {"type": "success"}})
    while not all(each.done() for each in following):
        async with sampler.standing:
            sampler.permit()
            await asyncio.sleep(0.002)
    return [each.result() for each in following]


async def test_samples_cancelled_at_random_are_counted_as_the_sampler_drew_them(
    make_settings: Callable[..., Settings],
) -> None:
    sampler = Metered()
    async with served(make_settings(poll_hold=5.0, decode_slice=2), sampler) as edge:
        tenants = [await tenant(edge, f"project {number}") for number in range(PROJECTS)]
        for one in tenants:
            await one.limit(sampling_token_budget=BURST)
            await one.limit("keys", sampling_tokens_per_second=SLOW, sampling_tokens_burst=BURST)
        outcomes = await asyncio.gather(
            *(leave_at_random(one, sampler, random.Random(number)) for number, one in enumerate(tenants))
        )
        for one, ended in zip(tenants, outcomes, strict=True):
            codes = Counter(found.get("code", "done") for found in ended)
            assert codes["done"] >= SAMPLES - LEAVING, codes
            assert codes["cancelled"] >= LEAVING, codes
            prompts, drawn = sampler.prompts[one.project_id], sampler.tokens[one.project_id]
            received = sum(len(sequence["tokens"]) for found in ended for sequence in found.get("sequences", ()))
            assert drawn > received, "nothing was cut off in the middle: the test would prove nothing"
            counted = await usage(one)
            assert counted == {("sampling_prefill", one.session): prompts, ("sampling_sample", one.session): drawn}
            assert (await one.state("sampling_token_budget"))["used"] == prompts + drawn, "nothing stays reserved"
            left = (await one.state("sampling_tokens_per_second", "key"))["remaining"]
            assert abs(BURST - prompts - drawn - left) < 1, "a rate is settled by the same number"


async def test_who_always_leaves_cannot_draw_more_than_the_budget(make_settings: Callable[..., Settings]) -> None:
    sampler, budget = Metered(), 160
    async with served(make_settings(poll_hold=5.0, decode_slice=1), sampler) as edge:
        one = await tenant(edge, "always")
        await one.limit(sampling_token_budget=budget)
        cut = 0
        while (answer := await one.sample(tokens=40, prompt=3, num_samples=2)).status_code != 400:
            if answer.status_code == 429:  # what unfinished ones may use is reserved
                await asyncio.sleep(0.01)
                continue
            await sampler.until_begun(one.project_id)
            await cancel(one, answer)
            cut += "error" in await one.outcome(answer)
            assert sampler.prompts[one.project_id] + sampler.tokens[one.project_id] <= budget
        assert refusal(answer)[0] == "budget_spent"
        assert cut > 1, "it did not leave early"
        taken = sampler.prompts[one.project_id] + sampler.tokens[one.project_id]
        assert (await one.state("sampling_token_budget"))["used"] == taken > budget - 83


async def test_what_never_began_takes_nothing(make_settings: Callable[..., Settings]) -> None:
    """One is held back by a limit, others wait for room."""
    sampler = Metered()
    async with served(make_settings(poll_hold=5.0, decode_slice=1), sampler) as edge:
        one = await tenant(edge, "never")
        limits: dict[str, Any] = {"sampling_tokens_per_second": SLOW, "sampling_tokens_burst": BURST}
        await one.limit(**limits, sampling_token_budget=BURST, requests_per_second=0.01, requests_burst=20)
        long = await one.sample(tokens=60, prompt=2, num_samples=6)
        assert long.status_code == 200, long.text
        await sampler.until_begun(one.project_id)
        others = [await one.sample(tokens=50, prompt=3, num_samples=3) for _ in range(20)]
        for answer in reversed(others):
            await cancel(one, answer)
        await cancel(one, long)
        for answer in others:
            assert (await one.outcome(answer))["code"] == "cancelled"
        assert (await one.outcome(long))["code"] == "cancelled"
        drawn = sampler.tokens[one.project_id]
        assert sampler.prompts[one.project_id] == 2, "another one began: the test would prove nothing"
        assert await usage(one) == {("sampling_prefill", one.session): 2, ("sampling_sample", one.session): drawn}
        assert (await one.state("sampling_token_budget"))["used"] == 2 + drawn
        left = (await one.state("sampling_tokens_per_second"))["remaining"]
        assert abs(BURST - 2 - drawn - left) < 1
