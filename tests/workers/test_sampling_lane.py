"""Sampling in the runtime, on the toy sampler: joining, room, order, streams, cancelling, failing, dying."""

from __future__ import annotations

import asyncio
import threading
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.sampling.base import SampleStep
from schemas.errors import Cancelled, EngineFailure, Gone, InvalidRequest, NotFound, TinsmithError, WorkerDied
from schemas.operations import Operation, Sample, SampleDelta, SampleResult, SamplingParams
from tests.support.inline_group import InlineWorkerGroup
from tests.support.toy_worker import INFO, RAISE_PROMPT, REFUSE_PROMPT, ToyEngine, ToySampler
from tests.workers.harness import batch, create, running, sample, toy_group, until, value
from workers.runtime import ModelRuntime, Ticket
from workers.sampling_lane import PREFETCHED, READY_INSIDE, STREAM_TURN
from workers.tinker import TinkerActorRolloutRefWorker


def engine(group: InlineWorkerGroup) -> ToySampler:
    found = group.worker.rollout
    assert isinstance(found, ToySampler)
    return found


async def again(group: InlineWorkerGroup, runtime: ModelRuntime) -> None:
    """Wait for the worker that follows one that died."""
    await until(lambda: group.worker is not None and runtime.state == "ready")


async def stopped(outcome: asyncio.Future[Any]) -> Cancelled:
    """The end of a sample that was cancelled."""
    found = await asyncio.wait_for(outcome, 10)
    assert isinstance(found, Cancelled)
    return found


def took(found: Cancelled) -> tuple[int, int]:
    """Tokens of the prompt, tokens drawn."""
    return found.prompt_tokens, found.drawn_tokens


class Listener:
    """Collects the tokens of a stream, by sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.calls = self.tops = 0

    def __call__(self, delta: SampleDelta) -> None:
        assert len(delta.tokens) == len(delta.logprobs) > 0
        self.calls += 1
        assert delta.topk is None or delta.topk.ids.tolist() == [[token, token + 1] for token in delta.tokens]
        self.tops += delta.topk is not None
        self.tokens.setdefault(delta.index, []).extend(int(token) for token in delta.tokens)


# -- joining and room ----------------------------------------------------------------------------------------------
async def test_new_samples_join_what_is_running() -> None:
    group = toy_group(step_seconds=0.005)
    async with running(group, decode_slice=2) as (runtime, client, _lost):
        long = client.submit(sample(tokens=10**9), request_id="long")
        await until(lambda: engine(group).running)
        late = [client.submit(sample(i, tokens=4), request_id=f"late{i}") for i in range(3)]
        for outcome in late:
            await value(outcome)
        assert engine(group).most_rows == 4
        runtime.cancel("long")
        with pytest.raises(Gone):
            await value(long)


async def test_a_burst_of_samples_decodes_together() -> None:
    group = toy_group()
    async with running(group) as (_runtime, client, _):
        first = client.submit(sample(1))
        await asyncio.sleep(0.002)
        await asyncio.gather(first, *(client.submit(sample(i)) for i in range(2, 8)))
        assert group.calls.count("sample_turn") <= 4


async def test_the_worker_gets_what_it_has_room_for_and_a_few_more() -> None:
    group = toy_group(step_seconds=0.01, max_rows=3)
    async with running(group, max_sample_rows=3) as (_, client, _lost):
        outcomes = [client.submit(sample(tokens=20)) for _ in range(40)]
        most = 0
        while not all(outcome.done() for outcome in outcomes):
            most = max(most, engine(group).load.active)
            ahead = len(client.loads) - len(client.order)
            assert ahead <= 3 + READY_INSIDE + PREFETCHED
            await asyncio.sleep(0.005)
        assert most == 3 + READY_INSIDE
        assert engine(group).most_rows == 3
        wide = await value(client.submit(sample(rows=20)))
        assert len(wide.sequences) == 20


async def test_two_thousand_waiting_samples_take_no_memory() -> None:
    """Prompts of 80 kB each, which are made when they are read back: together 160 MB."""
    group = toy_group(max_rows=4)
    async with running(group, max_sample_rows=4) as (runtime, _client, _):
        outcomes: list[asyncio.Future[Any]] = []

        def submit(number: int) -> None:
            outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            async def load() -> Operation:
                return Sample(np.full(10_000, 5, np.int64), SamplingParams(max_tokens=2))

            async def done(result: Any) -> None:
                outcome.set_result(result)

            runtime.submit(Ticket(f"s{number}", "p", None, None, load, done))
            outcomes.append(outcome)

        tracemalloc.start()
        try:
            for number in range(2000):
                submit(number)
            await asyncio.sleep(0)
            assert runtime.samples_waiting("p") > 1900
            for outcome in outcomes:
                assert isinstance(await value(outcome, 60), SampleResult)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 16e6, f"{peak / 1e6:.1f} MB"


async def test_projects_share_the_worker_and_one_with_long_answers_does_not_fill_it() -> None:
    group = toy_group(step_seconds=0.001, max_rows=8)
    async with running(group, max_sample_rows=8, decode_slice=4) as (_runtime, client, _):
        greedy = [client.submit(sample(rows=4, tokens=60), request_id=f"g{i}", project_id="greedy") for i in range(12)]
        other = client.submit(sample(rows=4), request_id="other", project_id="modest")
        await value(other)
        assert client.order.index("other") <= 4, client.order
        await asyncio.gather(*greedy)
        assert [name for name in client.order if name != "other"] == [f"g{i}" for i in range(12)]


async def test_waiting_samples_say_how_many_are_ahead() -> None:
    async with running(toy_group(step_seconds=0.02, max_rows=1), max_sample_rows=1) as (runtime, client, _):
        outcomes = [client.submit(sample(tokens=10_000), request_id=f"s{i}") for i in range(20)]
        await until(lambda: runtime.waiting("s0").reason == "running")
        left = 20 - 1 - READY_INSIDE
        await until(lambda: runtime.samples_waiting("p") <= left)
        await asyncio.sleep(0.1)
        assert runtime.samples_waiting("p") == left
        last = runtime.waiting(f"s{len(outcomes) - 1}")
        assert last.state == "active"
        assert last.reason == f"{left - 1} samples of this project ahead"
        for i in range(len(outcomes)):
            runtime.cancel(f"s{i}")
        assert runtime.samples_waiting("p") == 0


# -- what the worker is told ---------------------------------------------------------------------------------------
async def test_samples_carry_their_project_and_always_a_seed() -> None:
    group = toy_group()
    async with running(group) as (_, client, _lost):
        await value(client.submit(sample(), request_id="plain", project_id="P"))
        await value(client.submit(sample(), request_id="other", project_id="Q"))
        given = Sample(np.array([1, 5], np.int64), SamplingParams(max_tokens=2, seed=2**80))
        await value(client.submit(given, request_id="seeded"))
        taken = engine(group).taken
    assert (taken["plain"][1], taken["other"][1]) == ("P", "Q")
    assert taken["seeded"][0] == 2**80
    assert taken["plain"][0] is not None
    assert taken["plain"][0] != taken["other"][0]


# -- streams -------------------------------------------------------------------------------------------------------
async def test_a_stream_tells_every_token_once_before_the_result() -> None:
    group = toy_group(step_seconds=0.001)
    async with running(group) as (_, client, _lost):
        listener = Listener()
        outcome = client.submit(sample(rows=3, tokens=50), progress=listener)
        quiet = await value(client.submit(sample(rows=3, tokens=50)))
        result = await value(outcome)
        assert listener.calls <= 3 * group.calls.count("sample_turn"), "one for each sequence and turn"
        for index, sequence in enumerate(result.sequences):
            assert listener.tokens[index] == list(sequence.tokens)
        assert [list(one.tokens) for one in quiet.sequences] == [list(one.tokens) for one in result.sequences]


async def test_a_stream_of_slow_steps_tells_each_token_when_it_is_drawn() -> None:
    group = toy_group(step_seconds=1.5 * STREAM_TURN)
    async with running(group, decode_slice=8) as (_, client, _lost):
        listener = Listener()
        quiet = client.submit(sample(tokens=12))
        await value(client.submit(sample(tokens=12), progress=listener))
        assert listener.calls == len(listener.tokens[0]) == 12
        await value(quiet)


async def test_steps_that_take_no_time_share_a_turn_of_a_stream() -> None:
    group = toy_group(step_seconds=0.0001)
    async with running(group) as (_, client, _lost):
        listener = Listener()
        await value(client.submit(sample(tokens=400), progress=listener))
        assert len(listener.tokens[0]) == 400
        assert listener.calls < 200


async def test_a_stream_goes_on_after_its_worker_died_without_telling_anything_twice() -> None:
    group = toy_group(step_seconds=0.002)
    async with running(group, decode_slice=3) as (runtime, client, _):
        listener = Listener()
        request = replace(sample(rows=2, tokens=100), topk_sample_logprobs=2)
        outcome = client.submit(request, request_id="s", progress=listener)
        seeds = []
        for part in (10, 40):
            await until(lambda part=part: len(listener.tokens.get(0, ())) >= part)  # type: ignore[misc]
            seeds.append(engine(group).taken["s"][0])
            told = {index: list(tokens) for index, tokens in listener.tokens.items()}
            group.die()
            await again(group, runtime)
            await until(lambda: engine(group).taken)
            assert {index: tokens[: len(told[index])] for index, tokens in listener.tokens.items()} == told
        result = await value(outcome)
        seeds.append(engine(group).taken["s"][0])
        assert len(set(seeds)) == 1
        for index, sequence in enumerate(result.sequences):
            assert listener.tokens[index] == list(sequence.tokens)
        assert client.started == ["s", "s", "s"]
        assert listener.tops == listener.calls


async def test_a_listener_that_raises_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def broken(delta: SampleDelta) -> None:
        raise RuntimeError("nobody is there")

    async with running(toy_group()) as (_, client, _lost):
        outcomes = [client.submit(sample(), progress=broken), client.submit(sample())]
        for outcome in outcomes:
            assert isinstance(await value(outcome), SampleResult)
    assert "cannot be told" in caplog.text


# -- cancelling ----------------------------------------------------------------------------------------------------
async def test_cancelled_samples_end_at_once_and_leave_the_worker() -> None:
    group = toy_group(step_seconds=0.02, max_rows=1)
    async with running(group, decode_slice=1) as (runtime, client, _):
        outcomes = [client.submit(sample(tokens=10_000), request_id=f"s{i}") for i in range(12)]
        await asyncio.sleep(0.1)
        for i in range(12):
            runtime.cancel(f"s{i}")
        runtime.cancel("unknown")
        for outcome in outcomes:
            with pytest.raises(Gone):
                await value(outcome)
        await until(lambda: not engine(group).load.active)
        turns = group.calls.count("sample_turn")
        await asyncio.sleep(0.1)
        assert group.calls.count("sample_turn") == turns, "the worker is left in peace"
        assert isinstance(await value(client.submit(sample(tokens=2))), SampleResult)


async def test_a_cancelled_sample_stops_within_one_turn_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    group = toy_group(step_seconds=0.01)
    async with running(group, decode_slice=2) as (runtime, client, _):
        client.submit(sample(tokens=10_000), request_id="gone")
        kept = client.submit(sample(tokens=40), request_id="kept")
        await until(lambda: len(engine(group).running) == 2)
        cancel, dropped_in = engine(group).cancel, list[int]()

        def noted(request_id: str) -> None:
            dropped_in.append(group.calls.count("sample_turn"))
            cancel(request_id)

        monkeypatch.setattr(engine(group), "cancel", noted)
        turns = group.calls.count("sample_turn")
        runtime.cancel("gone")
        await until(lambda: "gone" not in engine(group).running)
        assert dropped_in[0] <= turns + 1, "the turn that was running, and the one that drops it"
        assert isinstance(await value(kept), SampleResult)


async def test_a_cancelled_sample_ends_with_what_it_took() -> None:
    group = toy_group(step_seconds=0.01, max_rows=2)
    async with running(group, decode_slice=1, max_sample_rows=2) as (runtime, client, _):
        drawing = client.submit(sample(rows=2, tokens=10_000), request_id="drawing")
        waiting = [client.submit(sample(tokens=10_000), request_id=f"w{i}") for i in range(READY_INSIDE + 2)]
        await until(lambda: engine(group).running and len(engine(group).waiting) == READY_INSIDE)
        for i in range(len(waiting)):
            runtime.cancel(f"w{i}")
        for outcome in waiting:
            assert took(await stopped(outcome)) == (0, 0), "in the worker or not, it had not begun"
        kept = engine(group).running["drawing"]
        runtime.cancel("drawing")
        runtime.cancel("drawing")
        assert took(await stopped(drawing)) == (2, 2 * kept.done)
        assert kept.done > 0
        await until(lambda: runtime.load().samples == 0)


async def test_a_sample_that_is_done_before_it_can_be_stopped_has_its_result() -> None:
    drawn, gate = threading.Event(), threading.Event()

    class Held(ToySampler):
        """Stands still when three tokens are drawn: that is in the second turn, which draws all that are left."""

        def step(self) -> SampleStep:
            if any(request.done == 3 for request in self.running.values()):
                drawn.set()
                gate.wait(60)
            return super().step()

    group = InlineWorkerGroup(lambda progress: TinkerActorRolloutRefWorker(ToyEngine(), Held(), INFO))
    async with running(group, decode_slice=8) as (runtime, client, _):
        outcome = client.submit(sample(tokens=6), request_id="short")
        await until(drawn.is_set)
        runtime.cancel("short")
        gate.set()
        assert len((await value(outcome)).sequences[0].tokens) == 6


async def test_what_was_lost_with_the_worker_is_not_counted_but_for_what_was_told() -> None:
    group = toy_group(step_seconds=0.01)
    async with running(group, decode_slice=1) as (runtime, client, _):
        listener = Listener()
        told = client.submit(sample(rows=2, tokens=10_000), request_id="told", progress=listener)
        quiet = client.submit(sample(rows=2, tokens=10_000), request_id="quiet")
        again = client.submit(sample(rows=2, tokens=30), request_id="again")
        await until(lambda: len(listener.tokens.get(0, ())) > 5)
        for name in ("told", "quiet"):
            runtime.cancel(name)
        group.die()
        assert took(await stopped(quiet)) == (0, 0)
        assert took(await stopped(told))[1] == sum(map(len, listener.tokens.values()))
        assert sum(len(one.tokens) for one in (await value(again)).sequences) == 60, "what runs again counts once"


# -- failing -------------------------------------------------------------------------------------------------------
async def test_one_bad_sample_fails_alone() -> None:
    async with running(toy_group()) as (_, client, _lost):
        good = [client.submit(sample(i)) for i in range(1, 4)]
        bad = client.submit(sample(RAISE_PROMPT))
        refused = client.submit(sample(REFUSE_PROMPT))
        unreadable = client.submit(InvalidRequest("expired body"))
        missing = client.submit(sample(1, folder="/no/such/checkpoint"))
        for outcome in good:
            assert isinstance(await value(outcome), SampleResult)
        with pytest.raises(EngineFailure):
            await value(bad)
        with pytest.raises(InvalidRequest, match="the toy refuses"):
            await value(refused)
        with pytest.raises(InvalidRequest, match="expired body"):
            await value(unreadable)
        with pytest.raises(NotFound, match="does not exist"):
            await value(missing)


async def test_a_sample_that_the_worker_forgets_fails_instead_of_hanging() -> None:
    class Forgetful(ToySampler):
        def step(self) -> SampleStep:
            self.waiting.clear()
            return SampleStep()

    group = InlineWorkerGroup(lambda progress: TinkerActorRolloutRefWorker(ToyEngine(), Forgetful(), INFO))
    async with running(group) as (_, client, _lost):
        for outcome in [client.submit(sample()) for _ in range(2)]:
            with pytest.raises(EngineFailure, match="gave no result"):
                await value(outcome)


# -- dying ---------------------------------------------------------------------------------------------------------
async def test_lost_samples_run_again_and_models_are_lost() -> None:
    group = toy_group(step_seconds=0.01)
    async with running(group, decode_slice=1) as (runtime, client, lost):
        runtime.open_model("m")
        await value(client.submit(create(), "m", 0))
        outcomes = [client.submit(sample(i, tokens=20)) for i in range(1, 5)]
        await asyncio.sleep(0.05)
        group.die()
        queued = client.submit(batch("m"), "m", 1)
        with pytest.raises(TinsmithError, match="was lost") as caught:
            await value(queued)
        assert "create_training_client_from_state_with_optimizer" in (caught.value.hint or "")
        assert lost == ["m"]
        for outcome in outcomes:
            assert isinstance(await value(outcome), SampleResult)
        assert runtime.state == "ready"


async def test_after_a_second_death_samples_run_alone_and_after_a_third_they_fail() -> None:
    gate = threading.Event()

    class Held(ToySampler):
        """Stands still after each step until the gate is open."""

        def step(self) -> SampleStep:
            found = super().step()
            gate.wait(60)
            return found

    group = InlineWorkerGroup(lambda progress: TinkerActorRolloutRefWorker(ToyEngine(), Held(), INFO))
    async with running(group, decode_slice=1, restart_limit=9) as (runtime, client, _):
        outcomes = [client.submit(sample(i, tokens=30), request_id=f"s{i}") for i in range(4)]
        for _ in range(2):
            await until(lambda: len(engine(group).running) == 4)
            group.die()
            await again(group, runtime)
        fresh = client.submit(sample(tokens=5), request_id="fresh")
        await until(lambda: engine(group).running)
        assert list(engine(group).running) == ["s0"]
        assert runtime.waiting("s2").reason == "waiting to run alone: it was running each time that the worker failed"
        group.die()
        gate.set()
        with pytest.raises(WorkerDied, match="each time"):
            await value(outcomes[0])
        for outcome in [*outcomes[1:], fresh]:
            assert isinstance(await value(outcome), SampleResult)
        assert engine(group).most_rows == 1


# -- beside training -----------------------------------------------------------------------------------------------
class Clocked(InlineWorkerGroup):
    """Adds up the seconds of the calls, by method."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__(lambda progress: TinkerActorRolloutRefWorker(ToyEngine(), ToySampler(step_seconds), INFO))
        self.seconds = {"run_micro_batch": 0.0, "sample_turn": 0.0}
        self.short_turns: list[float] = []
        """Seconds of each turn of sampling."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
        try:
            return await super().call(method, *args, **kwargs)
        finally:
            took = time.monotonic() - began
            self.seconds[method] = self.seconds.get(method, 0.0) + took
            if method == "sample_turn":
                self.short_turns.append(took)


@pytest.mark.parametrize(("train", "step_seconds"), [(0.02, 0.005), (0.25, 0.001), (0.004, 0.004), (0.05, 0.0001)])
async def test_training_and_sampling_get_equal_shares_of_the_worker(train: float, step_seconds: float) -> None:
    group = Clocked(step_seconds)
    async with running(group, micro_batch_tokens=2) as (runtime, client, _):
        runtime.open_model("m")
        await value(client.submit(create(), "m", 0))
        for seq_id in range(1, 1000):
            client.submit(batch("m", sleep=train), "m", seq_id)
        for number in range(8):
            client.submit(sample(tokens=10**9), request_id=f"s{number}")
        await asyncio.sleep(1.5)
        trained, sampled = group.seconds["run_micro_batch"], group.seconds["sample_turn"]
    share = sampled / (trained + sampled)
    assert 0.35 < share < 0.65, f"sampling had {share:.0%}"
    most = sorted(group.short_turns)[len(group.short_turns) * 9 // 10]  # the machine may pause in a few
    assert most < max(0.3, 12 * step_seconds), "a turn of sampling is short"


async def test_training_that_comes_back_after_a_pause_is_not_held_up() -> None:
    """A client that waits for each result: it is idle whenever sampling looks, but has work a moment later."""
    group = Clocked(0.004)
    async with running(group, decode_slice=4) as (runtime, client, _):
        runtime.open_model("m")
        await value(client.submit(create(), "m", 0))
        client.submit(sample(tokens=10**9), request_id="endless")
        await until(lambda: engine(group).running)
        waits: list[float] = []
        for seq_id in range(1, 20):
            began = time.monotonic()
            await value(client.submit(batch("m", sleep=0.01), "m", seq_id))
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.002)
        assert sorted(waits)[-4] < 0.25, "training waits for one short turn of sampling, not for more"
        trained, sampled = group.seconds["run_micro_batch"], group.seconds["sample_turn"]
        assert sampled > 0.2 * trained
