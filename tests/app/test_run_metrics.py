"""What a run measured: with each result, as steps, as a table, as it happens, and never without end."""

from __future__ import annotations

import asyncio
import csv
import io
import math
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from app.routes.run_metrics import safe_cell
from app.services.run_metrics import MOST_STREAMS, NEWEST, merge, steps_of, weight_of
from schemas.errors import TooManyRequests
from schemas.operations import Datum, TrainBatch
from store.records import MetricRecord
from tests.support.api import Api, datum

NOW = datetime(2026, 7, 13, tzinfo=UTC)


def rows(steps: int, first: int = 1) -> list[MetricRecord]:
    """`steps` times a batch and a step."""
    found = []
    for step in range(steps):
        seq_id, at = first + 2 * step, NOW + timedelta(seconds=step)
        batch = MetricRecord(seq_id, "forward_backward", at, 0.5, 1.0, tokens=10, loss=8.0 + step, weight=4.0, gap=0.1)
        found.append(batch)
        found.append(MetricRecord(seq_id + 1, "optim_step", at, 0.1, 0.2, steps=1, grad_norm=3.0, learning_rate=1e-3))
    return found


def _has_told(told: list[Any], step: int) -> bool:
    return any(each and each.steps and each.steps[-1].step == step and each.steps[-1].done for each in told)


def batch(loss: str, **inputs: list[float]) -> TrainBatch:
    """A batch of one example."""
    arrays: dict[str, Any] = {name: np.array(values, np.float32) for name, values in inputs.items()}
    return TrainBatch("m", (Datum(np.arange(3), {"target_tokens": np.arange(3), **arrays}),), loss)


async def test_every_step_tells_loss_per_token_norm_and_times(api: Api) -> None:
    model = await api.model()
    # Prompts have weight 0; two batches belong to one step.
    first = await api.do("forward_backward", model_id=model, data=[datum(5, 6, 7)], loss_fn="cross_entropy")
    half = datum(8, 9, 10, 11)
    half["loss_fn_inputs"]["weights"] = [0.0, 0.0, 1.0]
    second = await api.do("forward_backward", model_id=model, data=[half], loss_fn="cross_entropy")
    stepped = await api.do("optim_step", model_id=model, adam_params={"learning_rate": 0.25})
    await api.do("forward_backward", model_id=model, data=[datum(5, 6, 7)], loss_fn="cross_entropy")

    answer = await api.client.get(f"training_runs/{model}/metrics")
    assert answer.status_code == 200, answer.text
    one, two = answer.json()["points"]
    total = first["metrics"]["loss:sum"] + second["metrics"]["loss:sum"]
    assert (one["step"], one["done"], one["batches"], one["tokens"]) == (1, True, 2, 5)
    assert math.isclose(one["loss"], total, rel_tol=1e-6)
    assert math.isclose(one["loss_per_token"], total / 3, rel_tol=1e-6), "two and one positions count"
    norm = next(value for name, value in stepped["metrics"].items() if name.startswith("grad_norm"))
    assert one["grad_norm"] == norm > 0
    assert one["learning_rate"] == 0.25
    assert one["run_seconds"] > 0
    assert (two["step"], two["done"], two.get("grad_norm")) == (2, False, None)

    listed = (await api.client.get("training_runs", params={"include_metrics": True})).json()["training_runs"][0]
    assert listed["state"] == "ready"
    assert (listed["metrics"]["steps"], listed["metrics"]["tokens"]) == (1, 7)
    assert len(listed["metrics"]["losses"]) == 3
    plain = (await api.client.get("training_runs")).json()["training_runs"][0]
    assert "metrics" not in plain

    table = await api.client.get(f"training_runs/{model}/metrics", params={"format": "csv"})
    assert table.headers["content-type"].startswith("text/csv")
    lines = list(csv.DictReader(io.StringIO(table.text)))
    assert [line["step"] for line in lines] == ["1", "2"]
    assert float(lines[0]["loss_per_token"]) == one["loss_per_token"]
    assert lines[1]["grad_norm"] == ""

    other = await api.other()
    for route in ("metrics", "events"):
        assert (await other.client.get(f"training_runs/{model}/{route}")).status_code == 404
    refused = await api.client.get(f"training_runs/{model}/metrics", params={"format": "xml"})
    assert refused.status_code == 400


async def test_a_failed_batch_leaves_no_row_and_losses_for_sampled_tokens_tell_the_gap(api: Api) -> None:
    model = await api.model()
    inputs = {"target_tokens": [6, 7], "logprobs": [-1.0, -2.0], "advantages": [0.0, 1.0]}
    data = [{"model_input": [5, 6], "loss_fn_inputs": inputs}]
    done = await api.do("forward_backward", model_id=model, data=data, loss_fn="importance_sampling")
    await api.do("optim_step", model_id=model, adam_params={"learning_rate": 1e-3})
    [point] = (await api.client.get(f"training_runs/{model}/metrics")).json()["points"]
    assert point["logprob_gap"] == pytest.approx(done["metrics"]["logprob_gap_abs:mean"])
    assert point["kl"] == pytest.approx(done["metrics"]["kl_sample_train:mean"])
    assert point["loss_per_token"] == pytest.approx(done["metrics"]["loss:sum"])
    far = {"target_tokens": [6, 300], "weights": [1.0, 1.0]}
    failing = [{"model_input": [5, 6], "loss_fn_inputs": far}]
    refused = await api.post("forward_backward", model_id=model, data=failing, loss_fn="cross_entropy")
    assert refused.status_code == 400
    assert len((await api.client.get(f"training_runs/{model}/metrics")).json()["points"]) == 1


async def test_a_stream_tells_steps_as_they_come_and_ends_with_the_run(api: Api) -> None:
    model = await api.model()
    metrics = api.edge.app.state.services.run_metrics
    told: list[Any] = []

    async def listen() -> None:
        async with aclosing(metrics.follow("p", model)) as news:
            async for each in news:
                told.append(each)

    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    await api.train(model, steps=2)
    async with asyncio.timeout(10):
        while not _has_told(told, 2):  # noqa: ASYNC110 (a test, not the product)
            await asyncio.sleep(0.02)
    assert told[0].state == "ready"
    await api.do("unload_model", model_id=model)
    async with asyncio.timeout(20):
        await listening
    assert told[-1].state == "closed"
    steps = {step.step: step for each in told if each for step in each.steps}
    assert sorted(steps) == [1, 2]

    async with aclosing(metrics.follow("p", model, after=1)) as news:
        assert [step.step for step in (await anext(news)).steps] == [2]
    assert metrics._streams["p"] == 0
    metrics._streams["p"] = MOST_STREAMS
    with pytest.raises(TooManyRequests):
        await anext(metrics.follow("p", model))


async def test_a_stream_that_is_asked_for_while_the_server_stops_is_for_later(api: Api) -> None:
    model = await api.model()
    api.edge.app.state.services.run_metrics.close()
    refused = await api.client.get(f"training_runs/{model}/events")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    assert "Retry-After" in refused.headers


async def test_the_queue_says_who_waits_for_what_and_what_failed(api: Api) -> None:
    empty = (await api.client.get("queue")).json()
    assert (empty["waiting"], empty["total"], empty["failed"]) == ([], 0, [])
    assert empty["models"][0]["state"] == "ready"
    model = await api.model()
    await api.train(model)
    third = await api.submit("optim_step", model_id=model, seq_id=9, adam_params={"learning_rate": 1e-3})
    fourth = await api.submit("optim_step", model_id=model, seq_id=10, adam_params={"learning_rate": 1e-3})
    found = (await api.client.get("queue")).json()
    assert [one["request_id"] for one in found["waiting"]] == [third, fourth]
    one, two = found["waiting"]
    assert (one["kind"], one["training_run_id"], one["place"], two["place"]) == ("optim_step", model, 1, 2)
    assert "seq_id" in one["reason"]
    assert (one["running"], one["base_model"]) == (False, found["models"][0]["model_name"])
    assert 0 < one["seconds_left"] < two["seconds_left"], "a step was finished before, so there is an estimate"
    other = await api.other()
    assert (await other.client.get("queue")).json()["waiting"] == []

    broken = await api.model(number=0, session_id=await api.session())
    await api.do("forward_backward", model_id=broken, data=[datum(5, 6, 7)], loss_fn="cross_entropy")
    overflowing = {"learning_rate": 1000.0, "eps": 1e-40, "beta1": 0.999999999}
    await api.fails("optim_step", model_id=broken, adam_params=overflowing)
    [failed] = (await api.client.get("queue")).json()["failed"]
    assert (failed["training_run_id"], failed["kind"], failed["category"]) == (broken, "optim_step", "user")
    assert failed["message"]
    assert (await other.client.get("queue")).json()["failed"] == []


async def test_the_server_tells_its_limits_and_its_disk_to_the_operator_only(api: Api) -> None:
    mine = (await api.client.get("system")).json()
    assert mine["settings"]["max_rank"] == 256
    assert 0 < mine["disk"]["free"] <= mine["disk"]["total"]
    assert "/" not in str(mine["settings"])
    other = await api.other()
    assert "disk" not in (await other.client.get("system")).json()


async def test_texts_and_chats_become_tokens(api: Api) -> None:
    items = [
        {"prompt": "ab", "completion": "c"},
        {"messages": [{"role": "user", "content": "hi"}], "completion": "ho"},
    ]
    model = (await api.client.get("get_server_capabilities")).json()["supported_models"][0]["model_name"]
    answer = await api.post("tokenize", model=model, items=items)
    assert answer.status_code == 200, answer.text
    text, chat = answer.json()["items"]
    assert (len(text["prompt_tokens"]), len(text["completion_tokens"])) == (2, 1)
    assert len(chat["prompt_tokens"]) > 4
    assert len(chat["completion_tokens"]) == 2
    assert (await api.post("tokenize", model=model, items=[{"completion": "x"}])).status_code == 400
    assert (await api.post("tokenize", model="tinker://x:train:0/weights/y", items=items)).status_code == 404


def test_what_a_loss_is_divided_by() -> None:
    assert weight_of(batch("cross_entropy", weights=[0, 0.5, 1])) == 1.5
    assert weight_of(batch("cross_entropy", weights=[1, -1, 0])) == 2, "no positive sum: what counts is counted"
    assert weight_of(batch("ppo", advantages=[0, -2, 3])) == 2
    assert weight_of(batch("cross_entropy")) == 3


def test_rows_become_steps_whatever_is_missing() -> None:
    steps = steps_of(rows(3)[:-1])
    assert [(step.step, step.done) for step in steps] == [(1, True), (2, True), (3, False)]
    assert steps[0].loss_per_token == 2.0
    assert steps_of([]) == []
    lone = MetricRecord(1, "optim_step", NOW, 0, 0, steps=1, grad_norm=1.0)
    assert steps_of([lone])[0].loss_per_token is None


def test_long_runs_are_merged_without_losing_a_sum() -> None:
    before = rows(2000)
    for _ in range(2):
        gone, merged = merge(before, 1000)
        kept = sorted([row for row in before if row.seq_id not in set(gone)] + merged, key=lambda row: row.seq_id)
        assert len(kept) <= 1000 + 2 * NEWEST + 2
        assert kept[-2 * NEWEST :] == before[-2 * NEWEST :], "the newest stay"
        for name in ("tokens", "loss", "weight", "seconds", "steps"):
            assert sum(getattr(row, name) or 0 for row in kept) == pytest.approx(
                sum(getattr(row, name) or 0 for row in before)
            )
        assert steps_of(kept)[-1].step == 2000
        before = kept
    assert merge(rows(10), 4) == ([], []), "a short run is left alone"
    unknown = [replace(row, loss=None) if row.kind == "forward_backward" else row for row in rows(300)]
    assert all(row.loss is None for row in merge(unknown, 100)[1])


def test_no_cell_is_a_formula() -> None:
    assert safe_cell("=1+1") == "'=1+1"
    assert safe_cell("@x") == "'@x"
    assert safe_cell(-1.5) == "-1.5"
    assert safe_cell(None) == ""
