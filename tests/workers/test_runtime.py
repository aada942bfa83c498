"""The model runtime on the toy engine in a thread: mapping, order, failures, fairness, limits, stopping."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import EngineFailure, Gone, InvalidRequest, NotFound, TinsmithError, Unavailable
from schemas.operations import LoadWeights, Operation, SampleResult, SaveWeights, ZeroGrad
from tests.workers.harness import batch, create, gate_of, running, sample, step, toy_group, until, until_state, value
from workers.runtime import Ticket


async def test_every_operation_reaches_its_worker_method(tmp_path: Path) -> None:
    group = toy_group()
    folder = str(tmp_path / "saved")
    async with running(group) as (runtime, client, _):
        runtime.open_model("m")
        runtime.open_model("n")
        operations = [create(), batch("m"), ZeroGrad(), batch("m"), step(0.5), batch("m", backward=False)]
        operations += [SaveWeights(folder, True), LoadWeights(folder, True, create=False)]
        outcomes = [client.submit(operation, "m", seq_id) for seq_id, operation in enumerate(operations)]
        results = [await value(outcome) for outcome in outcomes]
        assert results[0] is None
        assert results[1].metrics == {"loss:sum": -5.0}
        assert results[4].metrics["grad_norm:mean"] == 5.0
        np.testing.assert_array_equal(results[5].logprobs[0], np.float32([7.0, 10.5]))
        assert results[6].size_bytes > 0
        loaded = await value(client.submit(LoadWeights(folder, True, create=True), "n", 0))
        assert loaded.lora.rank == 8
        forward = await value(client.submit(batch("n", backward=False), "n", 1))
        np.testing.assert_array_equal(forward.logprobs[0], np.float32([7.0, 10.5]))
        drawn = await value(client.submit(sample(rows=2, tokens=3, folder=folder)))
        assert [list(sequence.tokens) for sequence in drawn.sequences] == [[8, 9, 10], [9, 10, 11]]
    expected = ["create_adapter", "forward_backward", "optimizer_zero_grad", "forward_backward", "optimizer_step"]
    expected += ["infer_batch", "save_checkpoint", "load_checkpoint", "load_checkpoint", "infer_batch"]
    assert group.calls[:10] == expected
    assert group.calls[10:] == ["sample_turn", "sample_turn"]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(8)), st.sets(st.integers(1, 7), max_size=3))
def test_any_arrival_order_gives_the_in_order_result(arrival: list[int], refused: set[int]) -> None:
    """forward_backward on odd, optim_step on even seq_ids: executed in any other order the weight would differ."""

    def weight(seq_ids: list[int]) -> float:
        weight, gradient = 1.0, 0.0
        for seq_id in seq_ids:
            if seq_id % 2:
                gradient -= 5.0
            else:
                weight, gradient = weight - 0.1 * seq_id * gradient, 0.0
        return weight

    async def scenario() -> None:
        async with running(toy_group()) as (runtime, client, _):
            runtime.open_model("m")
            outcomes = []
            for seq_id in arrival:
                if seq_id in refused:
                    runtime.note_refused("m", seq_id)
                else:
                    operation = create() if seq_id == 0 else batch("m") if seq_id % 2 else step(0.1 * seq_id)
                    outcomes.append(client.submit(operation, "m", seq_id))
                await asyncio.sleep(0)
            for outcome in outcomes:
                await value(outcome)
            result = await value(client.submit(batch("m", backward=False), "m", None))
            expected = weight([seq_id for seq_id in range(1, 8) if seq_id not in refused])
            np.testing.assert_allclose(result.metrics["loss:sum"], -5.0 * expected, rtol=1e-6)

    asyncio.run(scenario())


async def test_a_failed_operation_does_not_poison_later_ones(caplog: pytest.LogCaptureFixture) -> None:
    async with running(toy_group()) as (runtime, client, _):
        runtime.open_model("m")
        await value(client.submit(create(), "m", 0))
        with pytest.raises(EngineFailure) as caught:
            await value(client.submit(batch("m", **{"raise": 1.0}), "m", 1))
        assert "secret" not in caught.value.message
        with pytest.raises(EngineFailure, match="reading the request back"):
            await value(client.submit(RuntimeError("disk path /x"), "m", 2))
        with pytest.raises(InvalidRequest, match="expired body"):
            await value(client.submit(InvalidRequest("expired body"), "m", 3))
        stepped = await value(client.submit(step(), "m", 4))
        assert stepped.metrics["grad_norm:mean"] == 0.0, "the failed batch left a gradient behind"


@pytest.mark.parametrize(
    "first", [create(rank=0), InvalidRequest("rank 0 is not positive"), LoadWeights("/no", True, True)]
)
async def test_a_failed_creation_fails_what_follows_and_says_why(first: Any) -> None:
    async with running(toy_group()) as (runtime, client, _):
        runtime.open_model("m")
        later = client.submit(batch("m"), "m", 1)
        with pytest.raises(TinsmithError) as cause:
            await value(client.submit(first, "m", 0))
        for outcome in (later, client.submit(step(), "m", 2)):
            with pytest.raises(NotFound, match="was not created") as caught:
                await value(outcome)
            assert cause.value.message in caught.value.message
            assert caught.value.code == "model_not_created"


async def test_gap_fails_what_waits_and_later_operations_go_on() -> None:
    async with running(toy_group(), gap_timeout=0.15) as (runtime, client, _):
        runtime.open_model("m")
        await value(client.submit(create(), "m", 0))
        behind = [client.submit(batch("m"), "m", 2), client.submit(step(), "m", 3)]
        assert client.runtime.waiting("p-1").reason == "waiting for seq_id 1 of this model"
        for outcome in behind:
            with pytest.raises(InvalidRequest, match="seq_id 1 of this model did not arrive") as caught:
                await value(outcome)
            assert caught.value.code == "seq_id_gap"
        assert (await value(client.submit(step(), "m", 4))).metrics["grad_norm:mean"] == 0.0
        with pytest.raises(InvalidRequest, match="too late"):
            await value(client.submit(batch("m"), "m", 1))


async def test_unopened_and_never_created_models_are_not_found() -> None:
    async with running(toy_group(), gap_timeout=0.05) as (runtime, client, _):
        with pytest.raises(NotFound, match="not open"):
            await value(client.submit(step(), "nobody", 1))
        runtime.open_model("m")
        runtime.note_refused("m", 0)
        with pytest.raises(NotFound, match="never created"):
            await value(client.submit(step(), "m", 1))


@pytest.mark.parametrize("micro_batch_tokens", [2, 512])
async def test_models_and_projects_take_turns(micro_batch_tokens: int) -> None:
    async with running(toy_group(), micro_batch_tokens=micro_batch_tokens) as (runtime, client, _):
        models = {"a1": "A", "a2": "A", "b1": "B"}
        for model_id, project_id in models.items():
            runtime.open_model(model_id)
            await value(client.submit(create(), model_id, 0, project_id=project_id))
        blocker = client.submit(batch("a1", sleep=0.1), "a1", 1, project_id="A")
        client.order.clear()
        outcomes = [
            client.submit(batch(model_id), model_id, seq_id, f"{model_id}.{seq_id}", project_id)
            for model_id, project_id in models.items()
            for seq_id in range(2 if model_id == "a1" else 1, 5)
        ]
        await asyncio.gather(blocker, *outcomes)
        turns = [name.partition(".")[0] for name in client.order[1:]]
        assert turns == ["b1", "a2", "b1", "a1", "b1", "a2", "b1", "a1", "a2", "a1", "a2"], turns


async def test_of_one_model_at_most_one_operation_is_loaded_ahead() -> None:
    group = toy_group()
    async with running(group, micro_batch_tokens=2) as (runtime, client, _):
        runtime.open_model("m")
        await value(client.submit(create(), "m", 0))
        gate = gate_of(group)
        outcomes = [client.submit(batch("m", held=float(seq_id == 2)), "m", seq_id) for seq_id in range(1, 9)]
        await outcomes[0]
        await until(lambda: "p-3" in client.loads)
        await asyncio.sleep(0.05)
        assert client.loads == ["p-0", "p-1", "p-2", "p-3"]
        gate.set()
        await asyncio.gather(*outcomes)


async def test_cancelling_while_the_request_is_read_back_does_not_disturb_the_runtime() -> None:
    async with running(toy_group()) as (runtime, client, _):
        reading, go_on = asyncio.Event(), asyncio.Event()

        async def slow_load() -> Operation:
            reading.set()
            await go_on.wait()
            return sample()

        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def done(result: Any) -> None:
            outcome.set_result(result)

        runtime.submit(Ticket("slow", "p", None, None, slow_load, done))
        await asyncio.wait_for(reading.wait(), 5)
        runtime.cancel("slow")
        with pytest.raises(Gone):
            await value(outcome, 1)
        go_on.set()
        assert isinstance(await value(client.submit(sample())), SampleResult)


async def test_training_cannot_be_cancelled() -> None:
    async with running(toy_group()) as (runtime, client, _):
        runtime.open_model("m")
        outcome = client.submit(create(), "m", 0, request_id="c")
        runtime.cancel("c")
        assert await value(outcome) is None


async def test_adapters_are_bounded_and_closing_frees_one() -> None:
    group = toy_group()
    async with running(group, max_adapters=2) as (runtime, client, _):
        for model_id in ("a", "b", "c"):
            runtime.open_model(model_id)
        await value(client.submit(create(), "a", 0))
        await value(client.submit(create(), "b", 0))
        with pytest.raises(InvalidRequest, match="already trains 2 models") as caught:
            await value(client.submit(create(), "c", 0))
        assert caught.value.code == "adapter_limit"
        runtime.close_model("a")
        runtime.open_model("d")
        await value(client.submit(create(seed=9), "d", 0))
        assert set(group.worker.actor.engine.adapters) == {"b", "d"}
        assert group.worker.actor.engine.adapters["d"].weight == 9.0


async def test_closing_fails_what_waits_even_while_an_operation_runs() -> None:
    group = toy_group()
    async with running(group, micro_batch_tokens=2) as (runtime, client, _):
        runtime.open_model("m")
        await value(client.submit(create(), "m", 0))
        gate = gate_of(group)
        current = client.submit(batch("m", held=1.0), "m", 1)
        behind = client.submit(batch("m"), "m", 2)
        await until(lambda: runtime.waiting("p-1").reason == "running")
        runtime.close_model("m")
        runtime.close_model("m")
        with pytest.raises(Gone):
            await value(behind)
        gate.set()
        assert (await value(current)).metrics["loss:sum"] == -5.0
        with pytest.raises(NotFound):
            await value(client.submit(step(), "m", 3))
        await until(lambda: not group.worker.actor.engine.adapters)


async def test_a_failed_removal_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    group = toy_group()
    async with running(group, max_adapters=1, clock=lambda: now[0]) as (runtime, client, _):
        runtime.open_model("a")
        await value(client.submit(create(), "a", 0))
        engine = group.worker.actor.engine
        remove, failures = engine.remove_adapter, [OSError("busy")]

        def flaky(adapter_id: str) -> None:
            if failures:
                raise failures.pop()
            remove(adapter_id)

        monkeypatch.setattr(engine, "remove_adapter", flaky)
        runtime.close_model("a")
        await until(lambda: not failures)
        now[0] += 100.0
        runtime.open_model("b")
        await value(client.submit(create(), "b", 0))
        assert set(engine.adapters) == {"b"}


async def test_waiting_says_why() -> None:
    group = toy_group()
    async with running(group, micro_batch_tokens=2) as (runtime, client, _):
        for model_id, project_id in (("m", "P"), ("n", "Q"), ("o", "P")):
            runtime.open_model(model_id)
            await value(client.submit(create(), model_id, 0, project_id=project_id))
        gate = gate_of(group)
        outcomes = [client.submit(batch("m", held=1.0), "m", 1, "m1", "P")]
        await until(lambda: runtime.waiting("m1").reason == "running")
        outcomes += [client.submit(batch("m"), "m", seq_id, f"m{seq_id}", "P") for seq_id in (2, 3, 4)]
        assert [runtime.waiting(f"m{seq_id}").reason for seq_id in (1, 2, 3, 4)] == [
            "running",
            "waiting for its turn: next",
            "1 operation of this model ahead",
            "2 operations of this model ahead",
        ]
        outcomes.append(client.submit(batch("o"), "o", 1, "o1", "P"))
        reason = runtime.waiting("m2").reason or ""
        assert reason.startswith("waiting for its turn: 1 other model of this project is training, about "), reason
        outcomes.append(client.submit(batch("n"), "n", 1, "n1", "Q"))
        reason = runtime.waiting("n1").reason or ""
        assert reason == "waiting for its turn: 1 other project is training, about 2 tokens ahead"
        assert runtime.waiting("unknown").state == "active"
        gate.set()
        await asyncio.gather(*outcomes)


async def test_stop_drains_what_is_queued_and_refuses_new_work() -> None:
    async with running(toy_group(), gap_timeout=60) as (runtime, client, _):
        runtime.open_model("m")
        outcomes = [client.submit(create(), "m", 0)]
        outcomes += [client.submit(batch("m", sleep=0.02), "m", seq_id) for seq_id in range(1, 6)]
        outcomes.append(client.submit(sample(tokens=50)))
        blocked = client.submit(step(), "m", 9)
        stopping = asyncio.ensure_future(runtime.stop(grace=5))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="shutting down"):
            await value(client.submit(sample()))
        await asyncio.wait_for(stopping, 5)
        for outcome in outcomes:
            assert outcome.done()
            await value(outcome)
        with pytest.raises(Unavailable, match="shutting down"):
            await value(blocked)


async def test_stop_without_enough_grace_answers_everything() -> None:
    group = toy_group()
    async with running(group) as (runtime, client, _):
        runtime.open_model("m")
        gate = gate_of(group)
        outcomes = [client.submit(create(), "m", 0)]
        outcomes += [client.submit(batch("m", held=1.0), "m", seq_id) for seq_id in range(1, 4)]
        await until(lambda: runtime.waiting("p-1").reason == "running")
        await runtime.stop(grace=0.05)
        gate.set()
        assert all(outcome.done() for outcome in outcomes)
        with pytest.raises(Unavailable):
            await value(outcomes[1])


async def test_restarts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    group = toy_group()
    async with running(group, restart_limit=2) as (runtime, client, _):
        starts = 0

        async def failing_start() -> Any:
            nonlocal starts
            starts += 1
            raise Unavailable("the weights are gone")

        monkeypatch.setattr(group, "start", failing_start)
        group.die()
        waiting = client.submit(sample())
        with pytest.raises(Unavailable, match="'toy' is not available: the weights are gone"):
            await value(waiting)
        await until_state(runtime, "failed")
        assert starts == 2
        assert runtime.failure is not None
        with pytest.raises(Unavailable):
            await value(client.submit(sample()))
        assert not await runtime.probe(1)


async def test_a_duplicate_request_is_answered_once() -> None:
    async with running(toy_group()) as (runtime, client, _):
        runtime.open_model("m")
        first = client.submit(create(), "m", 0, request_id="same")
        client.submit(create(), "m", 0, request_id="same")
        assert await value(first) is None
        await asyncio.sleep(0.02)
        assert client.answers == {"same": 1}
