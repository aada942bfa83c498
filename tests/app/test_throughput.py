"""What the server tells of its work: the numbers of each base model, and what a client who waits is told."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings
from tests.app.conftest import MODEL, Edge
from tests.support.api import Api, datum, serving
from tests.support.tiny_model import make_tiny_model


async def numbers(api: Api | Edge) -> dict[str, Any]:
    answer = await api.client.get("throughput")
    assert answer.status_code == 200, answer.text
    [model] = answer.json()["models"]
    assert model["model_name"] == MODEL
    return dict(model)


async def test_before_any_work_everything_is_zero_or_unknown(edge: Edge) -> None:
    read = await numbers(edge)
    for name in ("tokens", "rows", "sequences", "passes", "turns", "steps", "flops", "padding_waste", "turn_fill"):
        assert read[name] == 0, name
    assert (read["mfu"], read["peak_flops"], read["memory"]) == (None, None, None)
    assert read["waiting"] == {"training": 0, "samples": 0, "adapters": 0}


async def test_the_numbers_are_those_of_what_was_computed(api: Api) -> None:
    models = [await api.model(number=0), await api.model(number=1)]
    batches = [
        await api.submit(
            "forward_backward", model_id=model_id, data=[datum(*range(5, 30))] * 3, loss_fn="cross_entropy"
        )
        for model_id in models
    ]
    for request_id in batches:
        assert "error" not in await api.result(request_id)
    await api.do("optim_step", model_id=models[0], adam_params={"learning_rate": 0.01})
    read = await numbers(await api.other())
    assert (read["state"], read["tokens"], read["sequences"], read["steps"]) == ("ready", 2 * 3 * 24, 6, 1)
    assert read["rows"] % 4 == 0
    assert read["rows"] >= read["tokens"]
    assert read["padding_waste"] == pytest.approx(1 - read["tokens"] / read["rows"])
    assert 0 < read["turn_fill"] <= 1
    assert read["turn_tokens"] == 512
    assert 2 <= read["turns"] <= 3
    assert 0 < read["busy_seconds"] <= read["wall_seconds"]
    assert set(read["seconds"]) == {"base", "lora", "head", "optimizer"}
    assert 0 < sum(read["seconds"].values()) <= read["busy_seconds"]
    assert read["tokens_per_second"] == pytest.approx(read["tokens"] / read["wall_seconds"], rel=0.5)
    assert read["flops"] > 2 * read["rows"] * 1000
    assert read["mfu"] == pytest.approx(read["flops"] / read["busy_seconds"] / read["peak_flops"])
    assert read["waiting"] == {"training": 0, "samples": 0, "adapters": 2}
    memory = read["memory"]
    assert 0 < memory["training_pass_checkpointed"] < memory["training_pass"] < memory["free"] <= memory["total"]


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model whose turns take long enough to be watched."""
    return make_tiny_model(tmp_path_factory.mktemp("slow") / "slow", hidden=256, layers=4)


@pytest.mark.slow
async def test_a_small_batch_waits_one_turn_of_a_huge_one_and_is_told_why(
    make_settings: Callable[..., Settings], slow_folder: Path
) -> None:
    settings = make_settings(base_model=[f"{MODEL}={slow_folder}"], poll_hold=0.0)
    async with serving(settings) as api:
        other = await api.other()
        huge_model, small_model = await api.model(), await other.model()
        turns = api.groups.made[0].turns
        data = [datum(*((position * 7 + index) % 250 + 3 for position in range(101))) for index in range(200)]
        huge = await api.submit("forward_backward", model_id=huge_model, data=data, loss_fn="cross_entropy")
        async with asyncio.timeout(60):
            while len(turns) < 3:  # noqa: ASYNC110 (a test, not the product)
                await asyncio.sleep(0.002)

        reasons: list[str] = []
        for round_ in range(3):
            before = len(turns)
            batch = await other.submit(
                "forward_backward", model_id=small_model, seq_id=1 + 2 * round_, data=data[:2], loss_fn="cross_entropy"
            )
            step = await other.submit(
                "optim_step", model_id=small_model, seq_id=2 + 2 * round_, adam_params={"learning_rate": 0.01}
            )
            first = await other.post("retrieve_future", request_id=batch)
            if first.status_code == 408:
                assert first.json()["queue_state"] == "active"
                reasons.append(first.json()["queue_state_reason"])
            assert "error" not in await other.result(batch)
            assert "error" not in await other.result(step)
            assert len(turns) - before <= 4, "the turn that ran, that of the batch, at most one more for the step"
        waited = [
            reason
            for reason in reasons
            if re.fullmatch(r"waiting for its turn: 1 other project is training, about [\d,]+ tokens ahead", reason)
        ]
        assert waited, reasons
        assert all(int(reason.split()[-3].replace(",", "")) <= 2 * 512 for reason in waited)

        running = (await api.post("retrieve_future", request_id=huge)).json()
        matched = re.fullmatch(r"running: (\d+) of 200 datums", running["queue_state_reason"])
        assert matched, running
        assert 0 < int(matched[1]) < 200
        assert (await numbers(api))["waiting"]["adapters"] == 2
        assert len((await api.result(huge))["loss_fn_outputs"]) == 200
