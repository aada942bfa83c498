"""Losses that pass the look at the door and break when they run: each costs its own operation, and nothing else."""

from __future__ import annotations

import pytest

from tests.attacks.catalogue.losses import BREAKING, POISON, graph
from tests.attacks.conftest import Attacked
from tests.attacks.sweep import BATCH, Honest

pytestmark = pytest.mark.asyncio(loop_scope="module")
CUSTOM = {"data": BATCH, "loss_fn": "custom"}


async def _uploaded(attacked: Attacked, name: str) -> str:
    every = {**BREAKING, **POISON}
    body = graph(every[name], 100 + list(every).index(name))
    body["session_id"] = attacked.attacker.targets.session
    answer = await attacked.api.post("create_custom_loss", **body)
    assert answer.status_code == 200, answer.text
    return str((await attacked.api.result(answer.json()["request_id"]))["loss_id"])


@pytest.mark.parametrize("name", BREAKING)
async def test_a_loss_that_breaks_is_its_users_error(attacked: Attacked, name: str) -> None:
    loss_id = await _uploaded(attacked, name)
    model = attacked.attacker.targets.model
    outcome = await attacked.result("forward_backward", model_id=model, **CUSTOM, loss_fn_config={"loss_id": loss_id})
    assert (outcome["category"], outcome["code"]) == ("user", "custom_loss_failed")
    assert not list(attacked.attacker.leaks(str(outcome)))


@pytest.mark.parametrize("name", POISON)
async def test_a_gradient_that_is_not_finite_never_reaches_the_weights(attacked: Attacked, name: str) -> None:
    loss_id = await _uploaded(attacked, name)
    model = attacked.attacker.targets.model
    body = {"model_id": model, "data": BATCH, "loss_fn": "cross_entropy"}
    before = (await attacked.result("forward", **body))["loss_fn_outputs"]
    outcome = await attacked.result("forward_backward", model_id=model, **CUSTOM, loss_fn_config={"loss_id": loss_id})
    assert "error" not in outcome, outcome
    step = await attacked.result("optim_step", model_id=model, adam_params={"learning_rate": 0.1})
    assert (step["category"], step["code"]) == ("user", "non_finite_gradient")
    assert (await attacked.result("forward", **body))["loss_fn_outputs"] == before
    await attacked.result("forward_backward", **body)
    good = await attacked.result("optim_step", model_id=model, adam_params={"learning_rate": 0.0})
    assert good["metrics"]["grad_norm"] > 0, "the next good step works"


async def test_whoever_trained_meanwhile_noticed_nothing(attacked: Attacked) -> None:
    twin = await Honest.begin(await attacked.edge.other_project("twin"))
    assert await attacked.honest.ending() == await twin.ending()
