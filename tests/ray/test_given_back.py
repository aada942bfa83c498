"""A replica whose worker cannot be brought back gives its samples back: they wait until Serve has replaced it.

The replicas are real, in this process; what Serve does stands in `tests/ray/serve_here.py`, so that how long it takes
is the test's choice. With Serve itself: `test_ray_samplers.py`.
"""

from __future__ import annotations

import asyncio
import time
from types import ModuleType

import pytest

from schemas.errors import Cancelled, Unavailable
from tests.workers.harness import sample, until, value
from workers.ray.sampler_options import SamplerOptions
from workers.reruns import MAX_RERUNS, seeded

LONG = 100
TOKENS = [(5 + place) % 100 for place in range(LONG)]
"""What the toy draws after the prompts of `sample`."""


@pytest.fixture(scope="module")
def here() -> ModuleType:
    """`tests.ray.serve_here`, imported when it is needed."""
    import tests.ray.serve_here

    return tests.ray.serve_here


async def test_samples_that_are_given_back_wait_for_the_next_replica_and_draw_the_same(here: ModuleType) -> None:
    async with here.sampling(patience=800, pause=0.01) as (samplers, client, handle):
        told: list[int] = []
        first = client.submit(
            sample(1, tokens=LONG), request_id="a", progress=lambda delta: told.extend(delta.tokens.tolist())
        )
        second = client.submit(sample(1, tokens=LONG, rows=2), request_id="b")
        await until(lambda: len(told) > 5 and len(client.started) == 2)
        bad = handle.replica
        bad.lose_worker()
        await until(lambda: handle.given_back > 10 * MAX_RERUNS)  # Serve goes on sending to it for a while
        assert not first.done()
        assert not second.done()
        heard = len(told)
        handle.replica = None  # Serve has noticed: what is sent waits for the next replica
        bad_requests = len(handle.requests)
        await asyncio.sleep(0.05)
        assert len(handle.requests) <= bad_requests + 2, "a sample was sent again before it had an answer"
        handle.replica = await here.make_replica()
        [sequence] = (await value(first)).sequences
        assert sequence.tokens.tolist() == told == TOKENS
        assert heard < len(told), "nothing was left to draw: the test is vacuous"
        assert [one.tokens[0] for one in (await value(second)).sequences] == [5, 6]
        assert samplers.samples_waiting("p") == samplers.load().samples == 0
        await bad.stop()
    for name in ("a", "b"):
        mine = [request for request in handle.requests if request.request_id.startswith(f"{name}.")]
        expected = seeded(sample(1, tokens=LONG), name).params.seed
        assert {request.sample.params.seed for request in mine} == {expected}, "a rerun drew with another seed"
        assert len({request.request_id for request in mine}) == len(mine), "two runs have the same name"


async def test_a_sample_that_cannot_be_read_now_is_sent_later_and_holds_up_no_other(
    here: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.tickets._FIRST_PAUSE", 0.1)
    async with here.sampling(patience=800, pause=0.01) as (samplers, client, _):
        late = client.submit(sample(1, tokens=3), request_id="late", unread=2)
        unwanted = client.submit(sample(1, tokens=3), request_id="unwanted", unread=100)
        await value(client.submit(sample(1, tokens=3)))
        assert not late.done()
        assert samplers.waiting("late").state == "paused_capacity"
        assert "the disk is away" in samplers.waiting("late").reason
        assert samplers.samples_waiting("p") == 2
        samplers.cancel("unwanted")
        assert isinstance(await value_or_error(unwanted), Cancelled)
        assert len((await value(late)).sequences[0].tokens) == 3
        assert samplers.samples_waiting("p") == 0


async def value_or_error(outcome: asyncio.Future[object]) -> object:
    """What a sample ends with."""
    return await asyncio.wait_for(asyncio.shield(outcome), 10)


async def test_polls_say_that_the_replica_is_being_replaced(here: ModuleType) -> None:
    clock = here.Clock()
    async with here.sampling(patience=800, pause=60, clock=clock) as (samplers, client, handle):
        client.submit(sample(1, tokens=LONG), request_id="a")
        await until(lambda: samplers.waiting("a").reason == "running")
        handle.replica.lose_worker()
        await until(lambda: handle.given_back and samplers.waiting("a").reason != "running")
        clock.now += 12
        assert samplers.waiting("a").state == "paused_capacity"
        assert samplers.waiting("a").reason == "its sampling replica has failed and is being replaced (12 s)"
        assert samplers.load().samples == 1, "it does not run"


@pytest.mark.parametrize("replica_is_gone", [False, True])
async def test_a_sample_that_gets_no_other_replica_in_time_is_answered_with_what_to_do(
    here: ModuleType, replica_is_gone: bool
) -> None:
    """Whether the failed replica stays, or Serve ends it and can start no other."""
    async with here.sampling(patience=0.4, pause=0.02) as (_, client, handle):
        outcome = client.submit(sample(1, tokens=LONG))
        await until(lambda: client.started)
        bad = handle.replica
        began = time.monotonic()
        bad.lose_worker()
        await until(lambda: handle.given_back)
        if replica_is_gone:
            handle.replica = None
        with pytest.raises(Unavailable, match="no other one for it in 0 s") as caught:
            await value(outcome)
        assert time.monotonic() - began >= 0.4
        assert caught.value.code == "base_model_unavailable"
        assert "serve status" in (caught.value.hint or "")
        await bad.stop()


async def test_the_bound_holds_for_all_waits_of_a_sample_together_and_running_does_not_count(here: ModuleType) -> None:
    """A sample that ends the worker of every replica must not go on for ever."""
    clock = here.Clock()
    async with here.sampling(patience=800, pause=0.01, clock=clock) as (samplers, client, handle):
        outcome = client.submit(sample(1, tokens=50_000), request_id="a")
        for begun in (1, 2, 3):
            await until(lambda begun=begun: len(client.started) == begun and samplers.waiting("a").reason == "running")
            clock.now += 10_000
            handle.replica.lose_worker()
            sent = handle.given_back
            await until(lambda sent=sent: handle.given_back > sent)
            clock.now += 300
            if begun < 3:
                await handle.replica.stop()
                handle.replica = await here.make_replica()
        with pytest.raises(Unavailable, match="no other one for it in 800 s"):
            await value(outcome)
        assert len(handle.requests) == handle.given_back, "it was sent once more after its time"


async def test_a_sample_that_waits_for_room_beside_others_is_not_given_up(here: ModuleType) -> None:
    """Replicas that draw other samples are there, and only full."""
    async with here.sampling(patience=0.1, pause=0.01) as (samplers, client, handle):
        outcome = client.submit(sample(1, tokens=LONG), request_id="a")
        await until(lambda: client.started)
        bad = handle.replica
        bad.lose_worker()
        handle.has_room = lambda request: request.request_id.startswith("other")
        handle.replica = await here.make_replica()
        client.submit(sample(1, tokens=50_000), request_id="other")
        await until(lambda: samplers.waiting("other").reason == "running")
        sent = len(handle.requests)
        await until(lambda: len(handle.requests) > sent + 2)  # its time was over three times
        assert not outcome.done()
        handle.has_room = lambda request: True
        assert (await value(outcome)).sequences[0].tokens.tolist() == TOKENS
        samplers.cancel("other")
        await bad.stop()


async def test_a_sample_is_cancelled_at_once_while_it_waits_for_another_replica(here: ModuleType) -> None:
    async with here.sampling(patience=800, pause=60) as (samplers, client, handle):
        told: list[int] = []
        outcome = client.submit(
            sample(1, tokens=LONG), request_id="a", progress=lambda delta: told.extend(delta.tokens.tolist())
        )
        await until(lambda: len(told) > 5)
        handle.replica.lose_worker()
        await until(lambda: handle.given_back)
        began = time.monotonic()
        samplers.cancel("a")
        with pytest.raises(Cancelled) as stopped:
            await value(outcome)
        assert time.monotonic() - began < 2
        assert stopped.value.drawn_tokens == len(told), "what the listener had is not counted"
        assert len(handle.requests) == 1, "it was sent again, though nobody wants it"


@pytest.mark.parametrize("when", ["it runs", "it pauses", "it was sent again"])
async def test_a_stop_does_not_wait_for_another_replica(here: ModuleType, when: str) -> None:
    async with here.sampling(patience=800, pause=0.01 if when == "it was sent again" else 60) as (
        samplers,
        client,
        handle,
    ):
        outcome = client.submit(sample(1, tokens=50_000))
        await until(lambda: client.started)
        bad = handle.replica
        stopping = asyncio.create_task(samplers.stop(30)) if when == "it runs" else None
        await asyncio.sleep(0.02)
        assert not outcome.done(), "a stop waits for what runs"
        bad.lose_worker()
        await until(lambda: handle.given_back)
        if when == "it was sent again":
            handle.replica = None
            await until(lambda: len(handle.requests) > handle.given_back)
        began = time.monotonic()
        await (stopping or samplers.stop(30))
        assert time.monotonic() - began < 2
        with pytest.raises(Unavailable, match="shutting down"):
            await value(outcome)
        await bad.stop()


def test_the_start_of_another_replica_fits_into_what_a_sample_waits() -> None:
    from workers.ray.application import DEPLOY_SECONDS
    from workers.ray.samplers import replaced_within

    options = SamplerOptions(start_timeout=600)
    three_looks = 16.5
    assert replaced_within(options) >= three_looks + options.drain_timeout + DEPLOY_SECONDS + options.start_timeout
    assert replaced_within(options) == 800, "docs/cluster.md says so"
