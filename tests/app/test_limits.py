"""Limits of projects and keys: what is taken, what is held back, what is refused, and what is told about it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.settings import Settings
from schemas.errors import InvalidRequest
from schemas.operations import TrainBatch
from store.keys import create_key, ensure_project, rotate_key
from tests.app.conftest import BASE, MODEL, Edge, running
from tests.support.inline_group import InlineWorkerGroup
from tests.support.toy_worker import INFO, ToyEngine, ToySampler
from workers.tinker import TinkerActorRolloutRefWorker

DATUM = {
    "model_input": [5, 6, 7, 8],
    "loss_fn_inputs": {"target_tokens": [6, 7, 8, 9], "weights": [1.0, 1.0, 1.0, 1.0]},
}
TOKENS = 4


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def toy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Edge]:
    """The application on a scripted engine that computes next to nothing; every test has projects of its own."""
    folder = tmp_path_factory.mktemp("limits") / "data"
    settings = Settings(data_dir=folder, base_model=[f"{MODEL}=/nowhere"], shutdown_grace=1.0, poll_hold=5.0)
    async with toy_edge(settings) as edge:
        yield edge


BAD = 66
"""A datum that begins with this token fails when it is to be computed."""


class Engine(ToyEngine):
    """Computes nothing while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def open_operation(self, operation_id: str, batch: TrainBatch) -> None:
        self.gate.wait(60)
        if batch.datums[0].tokens[0] == BAD:
            raise InvalidRequest("this batch fails", field="data")
        super().open_operation(operation_id, batch)


def toy_edge(settings: Settings, engine: Engine | None = None) -> Any:
    engine = engine or Engine()

    def group(name: str, source: str | None) -> InlineWorkerGroup:
        return InlineWorkerGroup(lambda progress: TinkerActorRolloutRefWorker(engine, ToySampler(), INFO))

    return running(settings, group)


class Tenant:
    """A project of its own with one key, and what its client does."""

    def __init__(self, edge: Edge, project_id: str, key_id: str, client: httpx.AsyncClient) -> None:
        self.edge = edge
        self.project_id = project_id
        self.key_id = key_id
        self.client = client
        self.session = ""
        self.sampler = ""
        self._models = 0
        self._samples = 0

    async def begin(self) -> Tenant:
        answer = await self.client.post("create_session", json={"sdk_version": "test"})
        self.session = answer.json()["session_id"]
        body = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": MODEL}
        answer = await self.client.post("create_sampling_session", json=body)
        self.sampler = answer.json()["sampling_session_id"]
        return self

    async def limit(self, what: str = "projects", **values: Any) -> dict[str, Any]:
        """Set limits of the project, or (`keys`) of the key."""
        subject = self.project_id if what == "projects" else self.key_id
        answer = await self.edge.client.put(f"admin/{what}/{subject}/limits", json=values)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def state(self, name: str, source: str = "project") -> dict[str, Any]:
        """What `GET limits` says about one limit."""
        answer = await self.client.get("limits")
        assert answer.status_code == 200, answer.text
        [found] = [item for item in answer.json()["limits"] if (item["name"], item["source"]) == (name, source)]
        return dict(found)

    async def ask_model(self, **lora: Any) -> httpx.Response:
        self._models += 1
        body = {
            "session_id": self.session,
            "model_seq_id": self._models - 1,
            "base_model": MODEL,
            "lora_config": {"rank": 4, "seed": 1, **lora},
        }
        return await self.client.post("create_model", json=body)

    async def model(self) -> str:
        answer = await self.ask_model()
        assert answer.status_code == 200, answer.text
        outcome = await self.outcome(answer)
        return str(outcome["model_id"])

    async def train(self, model: str, seq_id: int | None = None, datums: int = 1, **more: Any) -> httpx.Response:
        body = {"model_id": model, "data": [DATUM] * datums, "loss_fn": "cross_entropy", **more}
        return await self.client.post("forward_backward", json=body if seq_id is None else {**body, "seq_id": seq_id})

    async def step(self, model: str, seq_id: int) -> httpx.Response:
        body = {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": 1e-3}}
        return await self.client.post("optim_step", json=body)

    async def sample(self, tokens: int | None = 4, prompt: int = 3, num_samples: int = 1) -> httpx.Response:
        self._samples += 1
        return await self.client.post(
            "asample",
            json={
                "sampling_session_id": self.sampler,
                "seq_id": self._samples - 1,
                "num_samples": num_samples,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [7] * prompt}]},
                "sampling_params": {} if tokens is None else {"max_tokens": tokens},
            },
        )

    async def poll(self, answer: httpx.Response) -> httpx.Response:
        assert answer.status_code == 200, answer.text
        body = {"request_id": answer.json()["request_id"]}
        return await self.client.post("retrieve_future", json=body)

    async def outcome(self, answer: httpx.Response, seconds: float = 30) -> dict[str, Any]:
        async with asyncio.timeout(seconds):
            while (polled := await self.poll(answer)).status_code == 408:
                pass
        assert polled.status_code == 200, polled.text
        return dict(polled.json())


async def tenant(edge: Edge, name: str) -> Tenant:
    """A new project with a key."""

    async def make(db: Any) -> tuple[str, str, str]:
        project_id = await ensure_project(db, name)
        return project_id, *(await create_key(db, project_id, "key"))

    project_id, key_id, key = await edge.app.state.store.write(make)
    transport = edge.client._transport
    client = httpx.AsyncClient(transport=transport, base_url=BASE, headers={"X-API-Key": key})
    return await Tenant(edge, project_id, key_id, client).begin()


async def second_key(one: Tenant) -> Tenant:
    """Another key of the same project."""
    made = await one.edge.app.state.store.write(lambda db: create_key(db, one.project_id, "second"))
    transport = one.edge.client._transport
    client = httpx.AsyncClient(transport=transport, base_url=BASE, headers={"X-API-Key": made[1]})
    return await Tenant(one.edge, one.project_id, made[0], client).begin()


def refusal(answer: httpx.Response, status: int = 400) -> tuple[str, str, str | None]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    return error["code"], answer.json()["detail"], error["field"]


async def test_what_never_passes_is_refused_with_limit_value_and_what_would(toy: Edge) -> None:
    one = await tenant(toy, "never")
    model = await one.model()
    await one.limit(lora_rank=8, context_length=6, live_runs=1, training_tokens_per_second=1, training_tokens_burst=10)
    code, detail, field = refusal(await one.ask_model(rank=9))
    assert (code, field) == ("over_limit", "lora_config.rank")
    assert "lora_rank of this project is 8" in detail
    code, detail, field = refusal(await one.ask_model())
    assert code == "over_limit"
    assert "live_runs of this project is 1" in detail
    long = {"model_input": [5] * 7, "loss_fn_inputs": {"target_tokens": [6] * 7, "weights": [1.0] * 7}}
    code, detail, field = refusal(await one.train(model, data=[long]))
    assert (code, field) == ("over_limit", "data")
    assert "context_length of this project is 6" in detail
    code, detail, field = refusal(await one.train(model, datums=3))
    assert (code, field) == ("over_limit", "data")
    assert "12 tokens" in detail
    assert "at most 10" in detail
    code, detail, field = refusal(await one.sample(tokens=4, prompt=3))
    assert (code, field) == ("over_limit", "prompt")
    await one.limit(sampling_tokens_per_second=1, sampling_tokens_burst=5)
    assert refusal(await one.sample(tokens=1, prompt=5))[0] == "over_limit"
    assert (await one.train(model, datums=2)).status_code == 200, "what fits is taken"


async def test_a_refused_number_counts_as_seen(toy: Edge) -> None:
    one = await tenant(toy, "numbers")
    model = await one.model()
    await one.limit(training_token_budget=TOKENS)
    assert refusal(await one.train(model, seq_id=1, datums=2))[0] == "budget_spent"
    assert "metrics" in await one.outcome(await one.step(model, 2))


async def test_without_max_tokens_a_sample_draws_to_the_end_of_its_limited_context(toy: Edge) -> None:
    one = await tenant(toy, "context")
    await one.limit(context_length=9)
    found = await one.outcome(await one.sample(tokens=None, prompt=3))
    assert [len(sequence["tokens"]) for sequence in found["sequences"]] == [6]


async def test_training_over_its_rate_is_held_in_order_and_says_why(toy: Edge) -> None:
    one = await tenant(toy, "rate")
    model = await one.model()
    await one.limit(training_tokens_per_second=0.1, training_tokens_burst=TOKENS)
    taken = [await one.train(model, 1), await one.train(model, 2), await one.step(model, 3)]
    assert "loss_fn_outputs" in await one.outcome(taken[0])
    states = [toy.app.state.services.operations.queue_state(each.json()["request_id"]) for each in taken[1:]]
    assert [state.state for state in states] == ["paused_rate_limit", "paused_rate_limit"]
    assert re.search(r"training_tokens_per_second of this project is 0.1; about \d\d s more", states[0].reason)
    assert "before it" in states[1].reason
    await one.limit(training_tokens_per_second=20)
    assert "metrics" in await one.outcome(taken[2]), "what was promised comes as much sooner"
    assert "loss_fn_outputs" in await one.outcome(taken[1])
    log = await toy.app.state.store.read(lambda db: _finished(db, f"model:{model}"))
    assert log == [1, 2, 3], "they ended in the order of their numbers"


async def _finished(db: Any, scope: str) -> list[int]:
    from sqlalchemy import select

    from store.tables import Operation

    rows = await db.scalars(select(Operation.seq_id).where(Operation.scope == scope).order_by(Operation.settled_seq))
    return list(rows)


async def test_a_poll_of_a_held_sample_says_paused_rate_limit(make_settings: Callable[..., Settings]) -> None:
    async with toy_edge(make_settings(poll_hold=0.05)) as edge:
        one, other = await tenant(edge, "held"), await tenant(edge, "free")
        await one.limit(requests_per_second=0.01, requests_burst=1)
        first, second = await one.sample(), await one.sample()
        assert "sequences" in await one.outcome(first)
        polled = await one.poll(second)
        assert polled.status_code == 408
        assert polled.json()["queue_state"] == "paused_rate_limit"
        assert "requests_per_second of this project is 0.01" in polled.json()["queue_state_reason"]
        assert "sequences" in await other.outcome(await other.sample()), "another project is not held up"
        for _ in range(20):
            await one.client.post("session_heartbeat", json={"session_id": one.session})
            await one.poll(second)
        assert (await one.state("requests_per_second"))["remaining"] < 0.9
        assert (await one.poll(second)).json()["queue_state"] == "paused_rate_limit", "polling costs nothing"
        await one.limit(requests_per_second="unlimited")
        assert "sequences" in await one.outcome(second), "a limit that is lifted holds nothing back"


async def test_a_held_sample_can_be_cancelled_and_ends_with_its_session(toy: Edge) -> None:
    one = await tenant(toy, "cancelled")
    await one.limit(requests_per_second=0.01, requests_burst=1)
    taken = [await one.sample() for _ in range(3)]
    assert "sequences" in await one.outcome(taken[0])
    body = {"request_id": taken[1].json()["request_id"]}
    assert (await one.client.post("cancel_future", json=body)).status_code == 204
    assert (await one.outcome(taken[1]))["code"] == "cancelled"
    await one.client.post(f"sessions/{one.session}/finish", json={"reason": {"type": "success"}})
    assert (await one.outcome(taken[2]))["code"] == "cancelled"


async def test_what_is_held_of_a_run_ends_with_its_session(toy: Edge) -> None:
    one = await tenant(toy, "over")
    model = await one.model()
    await one.limit(training_tokens_per_second=0.1, training_tokens_burst=TOKENS, unfinished_operations=50)
    taken = [await one.train(model, number) for number in (1, 2)] + [await one.step(model, 3)]
    assert "loss_fn_outputs" in await one.outcome(taken[0])
    await one.client.post(f"sessions/{one.session}/finish", json={"reason": {"type": "success"}})
    for answer in taken[1:]:
        assert "error" in await one.outcome(answer)
    assert (await one.state("unfinished_operations"))["used"] == 0


async def test_chunks_that_come_before_the_first_one_are_not_in_its_way(toy: Edge) -> None:
    """The SDK sends the later chunks of a call first, and the first one last."""
    one = await tenant(toy, "chunks")
    model = await one.model()
    await one.limit(training_tokens_per_second=10, training_tokens_burst=TOKENS, unfinished_operations=2)
    taken = {number: await one.train(model, number) for number in (2, 3, 1)}
    for number in (1, 2, 3):
        assert "loss_fn_outputs" in await one.outcome(taken[number])


async def test_only_so_many_operations_run_at_once_and_all_of_them_end(make_settings: Callable[..., Settings]) -> None:
    engine = Engine()
    async with toy_edge(make_settings(poll_hold=0.05), engine) as edge:
        one = await tenant(edge, "places")
        models = [await one.model() for _ in range(3)]
        await one.limit(unfinished_operations=2)
        engine.gate.clear()
        taken = [await one.train(model, number) for number in (1, 2, 3) for model in models]
        state = await one.state("unfinished_operations")
        assert (state["used"], state["held"], state["remaining"]) == (2, 7, 0)
        last = edge.app.state.services.operations.queue_state(taken[2].json()["request_id"])
        assert last.state == "paused_rate_limit"
        assert "unfinished_operations of this project is 2" in last.reason
        engine.gate.set()
        for answer in taken:
            assert "loss_fn_outputs" in await one.outcome(answer)
        state = await one.state("unfinished_operations")
        assert (state["used"], state["held"], state["remaining"]) == (0, 0, 2)


async def test_what_would_be_held_for_longer_than_an_hour_is_asked_to_come_again(toy: Edge) -> None:
    one = await tenant(toy, "flood")
    model = await one.model()
    await one.limit(training_tokens_per_second=0.002, training_tokens_burst=TOKENS)
    assert (await one.train(model, 1)).status_code == 200
    assert (await one.train(model, 2)).status_code == 200
    refused = await one.train(model, 3)
    code, detail, _ = refusal(refused, 429)
    assert code == "rate_limited"
    assert "training_tokens_per_second of this project is 0.002" in detail
    assert 0 < float(refused.headers["Retry-After"]) <= 60
    await one.limit(training_tokens_per_second="unlimited")
    third = await one.train(model, 3)
    assert "loss_fn_outputs" in await one.outcome(third), "its number was not used up"


async def test_the_narrower_of_key_and_project_rules_and_both_are_counted(toy: Edge) -> None:
    one = await tenant(toy, "both")
    two = await second_key(one)
    await one.limit(sampling_token_budget=100)
    await one.limit("keys", sampling_token_budget=10)
    assert "sequences" in await one.outcome(await one.sample(tokens=4, prompt=3))
    code, detail, field = refusal(await one.sample(tokens=4, prompt=3))
    assert (code, field) == ("budget_spent", "sampling_params.max_tokens")
    assert "of this key is 10, of which 7 are used" in detail
    assert "at most 3 are left" in detail
    assert "sequences" in await two.outcome(await two.sample(tokens=8, prompt=2))
    assert ((await one.state("sampling_token_budget"))["used"], (await two.state("sampling_token_budget"))["used"]) == (
        17,
        17,
    )
    assert (await one.state("sampling_token_budget", "key"))["remaining"] == 3
    assert refusal(await two.sample(tokens=30, prompt=3, num_samples=3))[1].count("of this project is 100") == 1


async def test_two_keys_at_once_get_no_more_than_their_project_may(toy: Edge) -> None:
    one = await tenant(toy, "racers")
    both = (one, await second_key(one))
    await one.limit(live_runs=2)
    asked = await asyncio.gather(*(both[number % 2].ask_model() for number in range(12)))
    assert sorted(answer.status_code for answer in asked) == [200] * 2 + [400] * 10


async def test_what_waits_goes_on_though_its_limit_would_not_take_it_any_more(toy: Edge) -> None:
    """The owner makes the burst smaller than what is held: what was promised is kept, new ones of its size are not."""
    one = await tenant(toy, "narrowed")
    model = await one.model()
    await one.limit(training_tokens_per_second=8, training_tokens_burst=2 * TOKENS)
    taken = [await one.train(model, number, datums=2) for number in (1, 2)]
    await one.limit(training_tokens_burst=TOKENS)
    for answer in taken:
        assert "loss_fn_outputs" in await one.outcome(answer)
    assert refusal(await one.train(model, 3, datums=2))[0] == "over_limit"


async def test_a_rotated_key_goes_on_with_its_limits_and_what_it_used(toy: Edge) -> None:
    one = await tenant(toy, "rotated")
    await one.limit("keys", sampling_token_budget=20, live_runs=1)
    await one.model()
    await one.outcome(await one.sample(tokens=4, prompt=3))
    now = datetime.now(UTC)
    made = await toy.app.state.store.write(
        lambda db: rotate_key(db, one.project_id, one.key_id, until=now + timedelta(hours=1), expires_at=None, now=now)
    )
    client = httpx.AsyncClient(transport=toy.client._transport, base_url=BASE, headers={"X-API-Key": made[1]})
    new = await Tenant(toy, one.project_id, made[0], client).begin()
    assert (await new.state("sampling_token_budget", "key"))["used"] == 7
    await new.outcome(await new.sample(tokens=8, prompt=2))
    for each in (one, new):
        assert (await each.state("sampling_token_budget", "key"))["used"] == 17
        assert "live_runs of this key is 1" in refusal(await each.ask_model())[1]
    await new.limit("keys", live_runs=3)
    assert (await one.state("live_runs", "key"))["value"] == 3


async def test_a_budget_counts_what_was_drawn_and_a_failure_gives_back(toy: Edge) -> None:
    one = await tenant(toy, "budget")
    model = await one.model()
    await one.limit(training_token_budget=100, sampling_token_budget=1000)
    bad = {**DATUM, "model_input": [BAD, 6, 7, 8]}
    assert "error" in await one.outcome(await one.train(model, 1, data=[bad] * 5))
    state = await one.state("training_token_budget")
    assert (state["used"], state["remaining"]) == (0, 100)
    repeated = {(await one.train(model, 2, datums=2)).json()["request_id"] for _ in range(3)}
    assert len(repeated) == 1
    await one.outcome(await one.train(model, 2, datums=2))
    assert (await one.state("training_token_budget"))["used"] == 2 * TOKENS
    await one.outcome(await one.sample(tokens=5, prompt=7, num_samples=3))
    assert (await one.state("sampling_token_budget"))["used"] == 7 + 3 * 5
    await one.limit(training_token_budget=10)
    assert (await one.state("training_token_budget"))["used"] == 0, "a budget that is set again begins anew"


async def test_samples_wait_for_what_unfinished_ones_may_use_of_a_budget(
    make_settings: Callable[..., Settings],
) -> None:
    async with toy_edge(make_settings()) as edge:
        one = await tenant(edge, "reserved")
        await one.limit(sampling_token_budget=30, requests_per_second=0.01, requests_burst=1)
        first, second = await one.sample(tokens=8), await one.sample(tokens=8)
        refused = await one.sample(tokens=8)
        assert refusal(refused, 429)[0] == "rate_limited"
        assert "unfinished samples may use" in refused.json()["detail"]
        await one.limit(requests_per_second="unlimited")
        for answer in (first, second):
            await one.outcome(answer)
        one._samples = 2
        assert refusal(await one.sample(tokens=8))[0] == "budget_spent", "8 of 30 are left"


async def test_checkpoints_never_take_more_than_their_bytes(toy: Edge) -> None:
    one = await tenant(toy, "bytes")
    model = await one.model()

    async def save(name: str) -> httpx.Response:
        return await one.client.post("save_weights", json={"model_id": model, "path": name})

    path = (await one.outcome(await save("first")))["path"]
    size = (await one.client.get("billing/usage/checkpoints/current")).json()["data"][0]["size_bytes"]
    await one.limit(checkpoint_bytes=size + 1)
    failed = await one.outcome(await save("second"))
    assert failed["code"] == "storage_full"
    await one.limit(checkpoint_bytes=size)
    code, detail, _ = refusal(await save("third"))
    assert code == "storage_full"
    assert f"checkpoint_bytes of this project is {size}" in detail
    state = await one.state("checkpoint_bytes")
    assert (state["used"], state["remaining"]) == (size, 0)
    copy = {"source_path": path, "destination_project_id": one.project_id}
    assert refusal(await one.client.post("copy_weights", json=copy))[0] == "storage_full"
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    assert (await one.client.delete(f"training_runs/{run}/checkpoints/{checkpoint}")).status_code in (200, 204)
    assert "path" in await one.outcome(await save("fourth"))


async def test_server_defaults_apply_until_a_project_has_its_own(make_settings: Callable[..., Settings]) -> None:
    async with toy_edge(make_settings(limit_live_runs=1, max_rank=64)) as edge:
        one = await tenant(edge, "defaults")
        await one.model()
        assert "live_runs of every project is 1" in refusal(await one.ask_model())[1]
        state = await one.state("live_runs", "server")
        assert (state["value"], state["used"], state["remaining"]) == (1, 1, 0)
        assert (await one.state("lora_rank", "server"))["value"] == 64
        await one.limit(live_runs=2)
        assert (await one.ask_model()).status_code == 200
        await one.limit(live_runs="unlimited")
        assert (await one.state("live_runs"))["value"] == "unlimited"
        assert (await one.ask_model()).status_code == 200
        cleared = await edge.client.delete(f"admin/projects/{one.project_id}/limits", params={"name": "live_runs"})
        assert cleared.status_code == 200
        assert refusal(await one.ask_model())[0] == "over_limit"


async def test_only_the_operator_sets_limits_and_mistakes_are_named(toy: Edge) -> None:
    one = await tenant(toy, "mine")
    address = f"admin/projects/{one.project_id}/limits"
    assert refusal(await one.client.put(address, json={"lora_rank": 1}), 403)[0] == "forbidden"
    assert refusal(await one.client.delete(address), 403)[0] == "forbidden"
    assert refusal(await one.client.get(address), 403)[0] == "forbidden"
    assert refusal(await toy.client.put("admin/projects/nobody/limits", json={"lora_rank": 1}), 404)[2] == "project_id"
    assert refusal(await toy.client.put("admin/keys/nobody/limits", json={"lora_rank": 1}), 404)[2] == "key_id"
    for body, field in (
        ({}, None),
        ({"lora_rank": 0}, "lora_rank"),
        ({"lora_rank": True}, "lora_rank"),
        ({"requests_per_second": -1.0}, "requests_per_second"),
        ({"requests_per_second": 1e-300}, "requests_per_second"),
        ({"nonsense": 1}, "nonsense"),
        ({"requests_burst": 5}, "requests_burst"),
        ({"live_runs": "none"}, "live_runs"),
    ):
        found = refusal(await toy.client.put(address, json=body))[2]
        assert (found or "").split(".")[0] == (field or ""), body
    wrong = await toy.client.delete(address, params={"name": "nonsense"})
    assert wrong.status_code == 400
    assert [item["name"] for item in (await one.client.get("limits")).json()["limits"]] == ["lora_rank"]
    await one.limit("keys", lora_rank=3)
    day = await one.client.get("audit", params={"event_type": "all"})
    [event] = [entry for entry in day.json()["entries"] if entry["event"] == "key_limits_changed"]
    assert event["event_details"]["set"] == {"lora_rank": 3}


async def test_held_work_goes_on_after_a_restart_and_nothing_is_counted_twice(
    make_settings: Callable[..., Settings],
) -> None:
    settings = make_settings(poll_hold=5.0)
    async with toy_edge(settings) as edge:
        one = await tenant(edge, "restart")
        await one.limit(requests_per_second=1, requests_burst=1, sampling_token_budget=100, unfinished_operations=1)
        taken = [await one.sample() for _ in range(3)]
        key = one.client.headers["X-API-Key"]
    async with toy_edge(settings) as edge:
        one.edge = edge
        one.client = httpx.AsyncClient(transport=edge.client._transport, base_url=BASE, headers={"X-API-Key": key})
        for answer in taken:
            assert "sequences" in await one.outcome(answer)
        assert (await one.state("sampling_token_budget"))["used"] == 3 * 7
        state = await one.state("unfinished_operations")
        assert (state["used"], state["held"]) == (0, 0)
