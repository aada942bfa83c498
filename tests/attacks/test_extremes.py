"""Numbers at the ends of float32, and chunks in every order: an error of their user, or exactly what they mean."""

from __future__ import annotations

import asyncio
from itertools import permutations
from typing import Any

import pytest

from tests.attacks.catalogue.case import BASE_MODEL
from tests.attacks.conftest import Attacked
from tests.attacks.sweep import BATCH

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = {"model_input": [5, 6, 7, 8]}
TARGETS = [6, 7, 8, 9]


def _policy(**given: list[float]) -> dict[str, Any]:
    inputs = {"target_tokens": TARGETS, "logprobs": [-1.0] * 4, "advantages": [1.0] * 4, **given}
    return {**TOKENS, "loss_fn_inputs": inputs}


def _weighted(*weights: float) -> dict[str, Any]:
    return {**TOKENS, "loss_fn_inputs": {"target_tokens": TARGETS, "weights": list(weights)}}


EXTREMES: dict[str, tuple[str, dict[str, Any]]] = {
    "weights near the largest number": ("cross_entropy", _weighted(3e38, 3e38, 3e38, 3e38)),
    "weights that cancel near the largest number": ("cross_entropy", _weighted(3e38, -3e38, 3e38, -3e38)),
    "weights that are subnormal": ("cross_entropy", _weighted(1e-45, 1e-40, -1e-45, 1e-42)),
    "weights of a negative zero": ("cross_entropy", _weighted(-0.0, -0.0, -0.0, -0.0)),
    "advantages near the largest number": ("ppo", _policy(advantages=[3e38, -3e38, 3e38, -3e38])),
    "advantages that are subnormal": ("importance_sampling", _policy(advantages=[1e-45] * 4)),
    "logprobs that no model has": ("importance_sampling", _policy(logprobs=[-3e38] * 4)),
    "logprobs above nought": ("importance_sampling", _policy(logprobs=[3e38] * 4)),
    "logprobs of a negative zero": ("ppo", _policy(logprobs=[-0.0] * 4)),
    "logprobs far below nought": ("cispo", _policy(logprobs=[-1e4] * 4)),
}


async def _new(attacked: Attacked, session: str, number: int) -> str:
    body = {"session_id": session, "model_seq_id": number, "base_model": BASE_MODEL}
    return str((await attacked.result("create_model", **body, lora_config={"rank": 4, "seed": 3}))["model_id"])


async def _session(attacked: Attacked) -> str:
    return str((await attacked.api.client.post("create_session", json={})).json()["session_id"])


async def _scores(attacked: Attacked, model: str) -> Any:
    outcome = await attacked.result("forward", model_id=model, data=BATCH, loss_fn="cross_entropy")
    return [each["logprobs"]["data"] for each in outcome["loss_fn_outputs"]]


async def test_numbers_at_the_ends_of_float32(attacked: Attacked) -> None:
    session = await _session(attacked)
    for number, (what, (loss, datum)) in enumerate(EXTREMES.items()):
        model = await _new(attacked, session, number)
        before = await _scores(attacked, model)
        given = await attacked.result("forward_backward", model_id=model, data=[datum], loss_fn=loss)
        assert given.get("category") in (None, "user"), (what, given)
        step = await attacked.result("optim_step", model_id=model, adam_params={"learning_rate": 0.01})
        if "error" in step:
            assert (step["category"], step["code"]) == ("user", "non_finite_gradient"), (what, step)
            assert await _scores(attacked, model) == before, what
        good = await attacked.result("forward_backward", model_id=model, data=BATCH, loss_fn="cross_entropy")
        assert "error" not in good, (what, good)
        step = await attacked.result("optim_step", model_id=model, adam_params={"learning_rate": 0.01})
        assert step["metrics"]["grad_norm"] > 0, (what, step)
        assert all(-1e4 < value <= 0 for row in await _scores(attacked, model) for value in row), what


async def test_chunks_in_every_order_are_the_chunks_in_order(attacked: Attacked) -> None:
    session = await _session(attacked)
    chunks = [[_weighted(1.0, float(number), 0.5, 1.0)] for number in range(4)]
    orders = list(permutations(range(1, 5)))
    models = [await _new(attacked, session, number) for number in range(len(orders))]

    async def train(model: str, order: tuple[int, ...]) -> tuple[Any, Any]:
        late = await attacked.api.submit("optim_step", model_id=model, seq_id=5, adam_params={"learning_rate": 0.01})
        for seq_id in order:
            body = {"model_id": model, "seq_id": seq_id, "data": chunks[seq_id - 1], "loss_fn": "cross_entropy"}
            await attacked.api.submit("forward_backward", **body)
        return (await attacked.api.result(late))["metrics"], await _scores(attacked, model)

    results = await asyncio.gather(*(train(*each) for each in zip(models, orders, strict=True)))
    assert all(result == results[0] for result in results)
    assert results[0][0]["grad_norm"] > 0
