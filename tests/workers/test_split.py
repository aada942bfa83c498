"""A base model in two places: each operation goes where it belongs, and both are spoken of as one."""

from __future__ import annotations

import pytest

from schemas.errors import Gone, Unavailable
from tests.support.inline_group import InlineWorkerGroup
from tests.support.toy_worker import INFO, ToySampler
from tests.workers.harness import Client, batch, create, running, sample, step, toy_group, until, value
from workers.rollout import RolloutWorker
from workers.split import SplitRuntime


def rollout_group(step_seconds: float = 0.0) -> InlineWorkerGroup:
    """A worker that has no method but that of sampling: whatever else arrived there would fail."""
    return InlineWorkerGroup(lambda progress: RolloutWorker(ToySampler(step_seconds), INFO))


async def test_training_and_samples_go_to_different_places() -> None:
    async with running(toy_group()) as (trainer, _, _), running(rollout_group()) as (samplers, _, _):
        both = SplitRuntime(trainer, samplers)
        client = Client(both)  # type: ignore[arg-type]  # it uses `submit` alone
        both.open_model("m")
        await value(client.submit(create(), "m", 0))
        await value(client.submit(batch("m"), "m", 1))
        await value(client.submit(step(), "m", 2))
        [sequence] = (await value(client.submit(sample(1, tokens=4)))).sequences
        assert sequence.tokens.tolist() == [5, 6, 7, 8]
        assert trainer.throughput().sampling.drawn_tokens == 0, "the trainer drew the sample"
        assert samplers.throughput().tokens == 0, "a sampler trained"
        done = both.throughput()
        assert (done.sampling.drawn_tokens, done.steps) == (4, 1)
        assert done.tokens == 2
        assert await both.probe(5.0)


async def test_a_sample_says_why_it_waits_and_can_be_cancelled() -> None:
    async with running(toy_group()) as (trainer, _, _), running(rollout_group(0.05)) as (samplers, _, _):
        both = SplitRuntime(trainer, samplers)
        client = Client(both)  # type: ignore[arg-type]
        long = client.submit(sample(1, tokens=2000), request_id="long")
        await until(lambda: both.waiting("long").reason == "running")
        assert both.load().samples == 0
        both.cancel("long")
        with pytest.raises(Gone, match="cancelled"):
            await value(long)
        both.open_model("m")
        client.submit(batch("m"), "m", 1, request_id="early")
        reason = both.waiting("early").reason
        assert reason is not None
        assert reason == trainer.waiting("early").reason
        assert both.load().training == 1


async def test_it_is_as_well_as_the_half_that_is_worse_off() -> None:
    def broken(progress: object) -> RolloutWorker:
        raise Unavailable("there is no room for samplers")

    async with (
        running(toy_group()) as (trainer, _, _),
        running(InlineWorkerGroup(broken), wait=False) as (samplers, _, _),
    ):
        both = SplitRuntime(trainer, samplers)
        assert both.state in ("starting", "failed")
        await until(lambda: both.state == "failed")
        assert both.failure is not None
        assert "no room for samplers" in both.failure.message
        assert not await both.probe(1.0)
        client = Client(both)  # type: ignore[arg-type]
        with pytest.raises(Unavailable, match="no room for samplers"):
            await value(client.submit(sample(1)))
        both.open_model("m")
        await value(client.submit(create(), "m", 0))
