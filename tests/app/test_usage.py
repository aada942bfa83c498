"""Usage: every token and every byte once, in its hour, for its project."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from app.services.settling import Settling
from app.services.usage import HOUR, Usage, batch_tokens, sample_tokens
from app.settings import Settings
from schemas.operations import SampledSequence, SampleResult, StepResult, TrainResult
from store.database import Store
from store.keys import ensure_project
from store.usage import add_tokens, begin_storage, end_storage
from tests.app.conftest import MODEL, Edge
from tests.support.api import Api, datum, serving

NOON = datetime(2026, 7, 13, 12, tzinfo=UTC)
DATA = [datum(5, 6, 7, 8), datum(9, 10, 11)]
TOKENS = 3 + 2
"""A datum of n tokens has n - 1 positions."""


async def usage(client: Any, hours: int = 2) -> dict[str, Any]:
    """The usage of the last hours, up to the end of this one."""
    end = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + HOUR
    params = {"starting_on": (end - hours * HOUR).isoformat(), "ending_before": end.isoformat()}
    answer = await client.get("billing/usage/events", params=params)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def totals(client: Any) -> dict[str, float]:
    """Quantity by kind, whatever the hour."""
    found: dict[str, float] = {}
    for row in (await usage(client))["data"]:
        info = dict(row["event_info"])
        kind = info.pop("type") + ("_cached" if info.pop("cached", False) else "")
        info.pop("free", None)
        [quantity] = info.values()
        found[kind] = found.get(kind, 0) + quantity
    return found


async def sample(api: Api, sampler: str, seq_id: int, **more: Any) -> dict[str, Any]:
    body = {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": [5, 6, 7, 8, 9],
        "num_samples": 2,
        "sampling_params": {"max_tokens": 3, "seed": 1, "stop": []},
    }
    return await api.do("asample", **{**body, **more})


async def test_tokens_of_training_and_sampling(api: Api) -> None:
    session_id = await api.session()
    model_id = await api.model(session_id)
    assert await totals(api.client) == {}
    for _ in range(2):
        await api.do("forward_backward", model_id=model_id, data=DATA, loss_fn="cross_entropy")
    await api.do("forward", model_id=model_id, data=DATA, loss_fn="cross_entropy")
    await api.do("optim_step", model_id=model_id, adam_params={"learning_rate": 1e-3})
    opened = await api.post(
        "create_sampling_session", session_id=session_id, sampling_session_seq_id=0, base_model=MODEL
    )
    drawn = await sample(api, opened.json()["sampling_session_id"], 0)
    tokens = sum(len(sequence["tokens"]) for sequence in drawn["sequences"])
    assert tokens == 6
    answer = await usage(api.client)
    rows = {row["event_info"]["type"]: row for row in answer["data"]}
    assert {kind: row["event_info"] for kind, row in rows.items()} == {
        "training": {"type": "training", "token_count": 3 * TOKENS},
        "sampling_prefill": {"type": "sampling_prefill", "cached": False, "token_count": 5},
        "sampling_sample": {"type": "sampling_sample", "token_count": tokens},
    }
    project_id = (await api.edge.app.state.authenticator.principal(api.edge.app.state.dev_key)).project_id
    for row in rows.values():
        assert (row["base_model"], row["session_id"], row["project_id"]) == (MODEL, session_id, project_id)
        assert row["user_id"] == f"tml:user:{project_id}"
        begin, end = (datetime.fromisoformat(row[name]) for name in ("bucket_start", "bucket_end"))
        assert (end - begin, begin.minute, begin.second, begin.microsecond) == (HOUR, 0, 0, 0)
        assert row["estimated_cost_usd"] is None
    assert answer["sessions"] == {session_id: {"user_metadata": None}}
    assert answer["cost_data_through"] is None
    assert (await usage((await api.other()).client))["data"] == []


async def test_a_repeat_and_a_failure_use_nothing(api: Api) -> None:
    model_id = await api.model()
    body = {"model_id": model_id, "data": DATA, "loss_fn": "cross_entropy", "seq_id": 1}
    ids = {await api.submit("forward_backward", **body) for _ in range(3)}
    assert len(ids) == 1
    for _ in range(2):
        await api.result(ids.copy().pop())
    wrong = [datum(5, 6, weight=1e38), datum(7, 8, 9, weight=1e38)]
    failed = await api.result(
        await api.submit("forward_backward", model_id=model_id, seq_id=2, data=wrong, loss_fn="cross_entropy")
    )
    expected = TOKENS if "error" in failed else TOKENS + 3
    refused = await api.post("forward_backward", model_id=model_id, seq_id=3, data=DATA, loss_fn="nonsense")
    assert refused.status_code == 400
    assert await totals(api.client) == {"training": expected}


async def test_an_outcome_that_comes_twice_is_counted_once(
    tiny_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = Settling.settle
    twice: list[int] = []

    async def again(self: Settling, *arguments: Any) -> None:
        await settle(self, *arguments)
        await settle(self, *arguments)
        twice.append(1)

    monkeypatch.setattr(Settling, "settle", again)
    async with serving(tiny_settings()) as api:
        model_id = await api.model()
        await api.do("forward_backward", model_id=model_id, data=DATA, loss_fn="cross_entropy")
        await api.do("forward_backward", model_id=model_id, data=DATA, loss_fn="cross_entropy")
        while len(twice) < 3:  # the second time goes on after its client was answered
            await api.do("zero_grad", model_id=model_id)
        assert await totals(api.client) == {"training": 2 * TOKENS}


async def test_checkpoints_and_their_storage(api: Api) -> None:
    model_id = await api.model()
    await api.do("save_weights", model_id=model_id, path="one")
    await api.do("save_weights_for_sampler", model_id=model_id, path="two")
    await api.do("save_weights_for_sampler", model_id=model_id, sampling_session_seq_id=0)  # has no name
    listed = (await api.client.get("checkpoints")).json()["checkpoints"]
    found = await totals(api.client)
    assert found["checkpoint"] == 3
    assert 0 < found["storage"] < 1e-3
    current = (await api.client.get("billing/usage/checkpoints/current")).json()
    [item] = current["data"]
    project_id = (await api.edge.app.state.authenticator.principal(api.edge.app.state.dev_key)).project_id
    assert item["size_bytes"] > sum(each["size_bytes"] for each in listed)
    assert item == {
        "project_id": project_id,
        "org_user_urn": f"tml:user:{project_id}",
        "user_email": None,
        "user_name": None,
        "checkpoint_count": 3,
        "size_bytes": item["size_bytes"],
        "size_gigabytes": item["size_bytes"] / 1e9,
        "estimated_monthly_cost_usd": None,
    }
    assert current["effective_rate_usd_per_gigabyte_month"] is None
    path = "billing/usage/checkpoints/current"
    assert (await api.client.get(path, params={"project_id": project_id})).json() == current
    assert (await api.client.get(path, params={"project_id": "other"})).status_code == 404
    await api.client.delete(f"training_runs/{model_id}/checkpoints/weights/one")
    [item] = (await api.client.get(path)).json()["data"]
    assert item["checkpoint_count"] == 2
    assert (await totals(api.client))["checkpoint"] == 3  # saved is saved
    assert (await (await api.other()).client.get(path)).json()["data"] == []


# -- sums, on a store whose clock we hold ----------------------------------------------------------------------------
async def quantities(store: Store, project_id: str, now: datetime, hours: int) -> list[tuple[int, str, float]]:
    """(hour after noon, kind, quantity) of a window of `hours` from noon."""
    report = await Usage(store, lambda: now).report(project_id, NOON, NOON + hours * HOUR)
    return [(round((row.bucket_start - NOON) / HOUR), row.kind, row.quantity) for row in report.rows]


async def store_one(
    store: Store, project_id: str, name: str, size: int, begin: datetime, end: datetime | None, model: str = "m"
) -> None:
    async def rows(db: Any) -> None:
        await begin_storage(
            db,
            checkpoint_id=name,
            project_id=project_id,
            session_id="s",
            base_model=model,
            size_bytes=size,
            now=begin,
        )
        if end is not None:
            await end_storage(db, name, end)
            await end_storage(db, name, end + HOUR)  # the first end stands

    await store.write(rows)


async def test_storage_is_size_times_time(edge: Edge) -> None:
    store, gigabyte, minute = edge.app.state.store, 10**9, timedelta(minutes=1)
    project_id = await store.write(lambda db: ensure_project(db, "storage"))
    await store_one(store, project_id, "before", gigabyte, NOON - 100 * HOUR, NOON - HOUR)
    await store_one(store, project_id, "through", 2 * gigabyte, NOON - 100 * HOUR, None)
    await store_one(store, project_id, "inside", gigabyte, NOON + 15 * minute, NOON + 45 * minute)
    await store_one(store, project_id, "across", 4 * gigabyte, NOON + 90 * minute, NOON + 3 * HOUR + 15 * minute)
    await store_one(store, project_id, "after", gigabyte, NOON + 9 * HOUR, None)
    now = NOON + 4 * HOUR + 30 * minute
    found = await quantities(store, project_id, now, 8)
    assert [row for row in found if row[1] == "storage"] == [
        (0, "storage", pytest.approx(2.5)),
        (1, "storage", pytest.approx(2 + 2)),
        (2, "storage", pytest.approx(2 + 4)),
        (3, "storage", pytest.approx(2 + 1)),
        (4, "storage", pytest.approx(1)),  # half of this hour is over
    ]
    assert [row for row in found if row[1] == "checkpoint"] == [(0, "checkpoint", 1), (1, "checkpoint", 1)]
    assert [row[0] for row in await quantities(store, project_id, now, 1)] == [0, 0]


async def test_storage_agrees_with_a_sum_over_every_hour_of_every_checkpoint(edge: Edge) -> None:
    store, random = edge.app.state.store, np.random.default_rng(0)
    project_id = await store.write(lambda db: ensure_project(db, "random"))
    hours, now = 12, NOON + 10.25 * HOUR
    expected: dict[tuple[int, str], float] = {}
    for number in range(60):
        begin = NOON + float(random.uniform(-6, 10)) * HOUR
        end = None if random.random() < 0.3 else begin + float(random.exponential(3)) * HOUR
        size, model = int(random.integers(1, 10**10)), str(random.choice(["a", "b"]))
        await store_one(store, project_id, f"c{number}", size, begin, end, model)
        for hour in range(hours):
            low, high = NOON + hour * HOUR, NOON + (hour + 1) * HOUR
            overlap = min(high, end or now, now) - max(low, begin)
            if overlap > timedelta(0):
                expected[(hour, model)] = expected.get((hour, model), 0.0) + size / 1e9 * (overlap / HOUR)
    report = await Usage(store, lambda: now).report(project_id, NOON, NOON + hours * HOUR)
    found = {
        (round((row.bucket_start - NOON) / HOUR), row.base_model): row.quantity
        for row in report.rows
        if row.kind == "storage"
    }
    assert found == pytest.approx(expected)


async def test_tokens_add_up_in_the_hour_in_which_they_finished(edge: Edge) -> None:
    store = edge.app.state.store
    project_id = await store.write(lambda db: ensure_project(db, "tokens"))
    micro = timedelta(microseconds=1)
    for at, session, count in (
        (NOON - micro, "s", 1),
        (NOON, "s", 10),
        (NOON + HOUR - micro, "s", 100),
        (NOON + HOUR - micro, "t", 1000),
        (NOON + HOUR, "s", 10_000),
    ):
        await store.write(
            lambda db, t=at, s=session, c=count: add_tokens(
                db,
                project_id=project_id,
                session_id=s,
                base_model="m",
                tokens={"training": c, "sampling_prefill_cached": 0},
                now=t,
            )
        )
    assert await quantities(store, project_id, NOON + 5 * HOUR, 1) == [(0, "training", 1000), (0, "training", 110)]
    assert await quantities(store, project_id, NOON + 5 * HOUR, 2) == [
        (0, "training", 1000),
        (0, "training", 110),
        (1, "training", 10_000),
    ]


async def test_what_fails_with_its_transaction_is_not_counted(edge: Edge) -> None:
    store = edge.app.state.store
    project_id = await store.write(lambda db: ensure_project(db, "fails"))

    async def fails(db: Any) -> None:
        await add_tokens(db, project_id=project_id, session_id="s", base_model="m", tokens={"training": 7}, now=NOON)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError):
        await store.write(fails)
    assert await quantities(store, project_id, NOON, 1) == []


def test_what_counts_as_a_token() -> None:
    wide, narrow = np.zeros((4, 9), np.float32), np.zeros(3, np.float32)
    assert batch_tokens(TrainResult((wide, narrow), {})) == {"training": 7}
    assert batch_tokens(StepResult({})) == {}
    sequences = tuple(
        SampledSequence(np.zeros(count, np.int32), np.zeros(count, np.float32), "stop") for count in (2, 5)
    )
    assert sample_tokens(9, SampleResult(sequences, prompt_cache_hit_tokens=4)) == {
        "sampling_prefill": 5,
        "sampling_prefill_cached": 4,
        "sampling_sample": 7,
    }
    assert sample_tokens(9, None) == {}


async def test_cached_prompts_are_shown_apart(edge: Edge) -> None:
    store = edge.app.state.store
    project_id = (await edge.app.state.authenticator.principal(edge.app.state.dev_key)).project_id
    tokens = sample_tokens(9, SampleResult((), prompt_cache_hit_tokens=4))
    now = datetime.now(UTC)
    await store.write(
        lambda db: add_tokens(db, project_id=project_id, session_id="s", base_model="m", tokens=tokens, now=now)
    )
    assert [row["event_info"] for row in (await usage(edge.client))["data"]] == [
        {"type": "sampling_prefill", "cached": False, "token_count": 5},
        {"type": "sampling_prefill", "cached": True, "token_count": 4},
    ]


@pytest.mark.parametrize(
    ("start", "end", "field"),
    [
        (None, "2026-07-13T01:00:00Z", "starting_on"),
        ("2026-07-13T00:00:00Z", None, "ending_before"),
        ("2026-07-13T00:00:00", "2026-07-13T01:00:00Z", "starting_on"),
        ("2026-07-13", "2026-07-13T01:00:00Z", "starting_on"),
        ("1783900800", "2026-07-13T01:00:00Z", "starting_on"),
        ("2026-07-13T00:30:00Z", "2026-07-13T01:00:00Z", "starting_on"),
        ("2026-07-13T00:00:00+05:30", "2026-07-13T01:00:00Z", "starting_on"),
        ("2026-07-13T00:00:00Z", "2026-07-13T01:00:00.000001Z", "ending_before"),
        ("2026-07-13T01:00:00Z", "2026-07-13T01:00:00Z", "ending_before"),
        ("2026-07-13T02:00:00Z", "2026-07-13T01:00:00Z", "ending_before"),
        ("2026-07-13T00:00:00Z", "2026-07-27T01:00:00Z", "ending_before"),
        ("2126-07-13T00:00:00Z", "2126-07-14T00:00:00Z", "starting_on"),
        ("0001-01-01T00:00:00+14:00", "2026-07-13T01:00:00Z", "starting_on"),
        ("2026-07-13T00:00:00Z", "9999-12-31T23:00:00-14:00", "ending_before"),
    ],
)
async def test_windows_that_are_refused(edge: Edge, start: str | None, end: str | None, field: str) -> None:
    params = {"starting_on": start, "ending_before": end}
    given = {name: value for name, value in params.items() if value is not None}
    answer = await edge.client.get("billing/usage/events", params=given)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field), answer.text


async def test_windows_that_are_accepted(edge: Edge) -> None:
    for start, end in (
        ("2026-07-13T00:00:00Z", "2026-07-27T00:00:00Z"),
        ("2026-07-13T05:00:00+05:00", "2026-07-13T01:00:00Z"),
    ):
        answer = await edge.client.get("billing/usage/events", params={"starting_on": start, "ending_before": end})
        assert answer.json() == {"data": [], "sessions": {}, "cost_data_through": None}
