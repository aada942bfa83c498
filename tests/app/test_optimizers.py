"""The choice of an optimizer through HTTP: at creation, in every step, in checkpoints and resumed runs."""

from __future__ import annotations

from typing import Any

import pytest

from engines.capabilities import Capabilities
from tests.app.conftest import MODEL
from tests.support.api import DATA, Api

DIMUON = {"type": "dimuon", "version": 1}
STEP = {"type": "dimuon", "learning_rate": 0.02}


async def dimuon_model(api: Api, session: str, number: int = 0) -> str:
    outcome = await api.do(
        "create_model",
        session_id=session,
        model_seq_id=number,
        base_model=MODEL,
        lora_config={"rank": 4, "seed": 1},
        optimizer_config=DIMUON,
    )
    return str(outcome["model_id"])


async def train(api: Api, model: str, **step: Any) -> dict[str, Any]:
    await api.do("forward_backward", model_id=model, data=DATA, loss_fn="cross_entropy")
    return await api.do("optim_step", model_id=model, **step)


async def info(api: Api, model: str) -> Any:
    return (await api.post("get_info", model_id=model)).json()["optimizer_config"]


async def test_a_model_is_trained_by_the_optimizer_it_was_created_with(api: Api) -> None:
    session = await api.session()
    model, adam = await dimuon_model(api, session), await api.model(session, 1)
    assert await info(api, model) == DIMUON
    assert await info(api, adam) == {"type": "adamw"}
    before = await api.scores(model)
    metrics = (await train(api, model, optimizer_params=STEP))["metrics"]
    assert metrics["learning_rate"] == 0.02
    assert metrics["grad_norm"] > 0
    await api.train(adam)
    assert len({str(scores) for scores in (before, await api.scores(model), await api.scores(adam))}) == 3


async def test_every_hyperparameter_of_dimuon_counts(api: Api) -> None:
    session = await api.session()
    tried: list[dict[str, Any]] = [
        {},
        {"learning_rate": 0.04},
        {"beta1": 0.1},
        {"damping": 100.0},
        {"rank_lr_correction_exponent": 0.0},
        {"grad_clip_norm": 1e-3},
    ]
    seen = []
    for number, changes in enumerate(tried):
        model = await dimuon_model(api, session, number)
        for data in (DATA, [{**DATA[0], "model_input": [50, 51, 52, 53]}], DATA):
            await api.do("forward_backward", model_id=model, data=data, loss_fn="cross_entropy")
            changed = changes if data is DATA or "grad_clip_norm" not in changes else {}
            await api.do("optim_step", model_id=model, optimizer_params={**STEP, **changed})
        seen.append(await api.scores(model))
    assert all(seen.count(scores) == 1 for scores in seen)


@pytest.mark.parametrize(
    ("step", "field"),
    [
        ({"adam_params": {"learning_rate": 0.1}}, "adam_params"),
        ({"optimizer_params": {"type": "adamw"}}, "optimizer_params"),
        ({"learning_rate": 0.1}, "adam_params"),
        ({"optimizer_params": {"type": "sgd", "learning_rate": 0.1}}, "optimizer_params"),
        ({"optimizer_params": {"type": "dimuon"}}, "optimizer_params"),
        ({"optimizer_params": {**STEP, "beta2": 0.9}}, "optimizer_params"),
        ({"optimizer_params": {**STEP, "damping": 0}}, "optimizer_params"),
        ({"optimizer_params": {**STEP, "beta1": 1}}, "optimizer_params"),
        ({"optimizer_params": STEP, "adam_params": {}}, "adam_params"),
    ],
)
async def test_a_step_that_does_not_fit_is_refused_by_name_and_uses_up_its_number(
    api: Api, step: dict[str, Any], field: str
) -> None:
    model = await dimuon_model(api, await api.session())
    answer = await api.post("optim_step", model_id=model, seq_id=1, **step)
    assert answer.status_code == 400, answer.text
    assert field in answer.text
    await api.do("optim_step", model_id=model, seq_id=2, optimizer_params=STEP)


async def test_dimuon_parameters_on_an_adamw_model_are_refused(api: Api) -> None:
    model = await api.model()
    answer = await api.post("optim_step", model_id=model, optimizer_params=STEP)
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "optimizer_params.type"
    assert "adam_params" in answer.json()["detail"]


async def test_unknown_optimizers_are_refused_naming_the_known_ones(api: Api) -> None:
    session = await api.session()
    for config in ({"type": "lion"}, {"type": "dimuon", "version": 2}, {"type": "adamw", "version": 1}):
        answer = await api.post(
            "create_model", session_id=session, model_seq_id=0, base_model=MODEL, optimizer_config=config
        )
        assert answer.status_code == 400
        assert "optimizer_config" in answer.text
    answer = await api.post(
        "create_model", session_id=session, model_seq_id=0, base_model=MODEL, optimizer_config={"type": "lion"}
    )
    assert "adamw" in answer.json()["detail"]
    assert "dimuon" in answer.json()["detail"]


async def test_an_optimizer_that_the_engine_lacks_is_refused_before_any_work(api: Api) -> None:
    """At creation and when a checkpoint is loaded: no run is made, and the number in order is not used up."""
    session = await api.session()
    model = await dimuon_model(api, session)
    path = (await api.do("save_weights", model_id=model, path="saved"))["path"]
    services = api.edge.app.state.services
    for service in (services.training, services.loads):
        service._capabilities = Capabilities("small", optimizers=("adamw",))
    made = await api.post("create_model", session_id=session, model_seq_id=1, base_model=MODEL, optimizer_config=DIMUON)
    loaded = await api.post("load_weights", session_id=session, model_seq_id=1, path=path, optimizer=True)
    for answer, field in ((made, "optimizer_config.type"), (loaded, "optimizer")):
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["field"] == field
        assert "'dimuon'; engine 'small' accepts: adamw" in answer.json()["detail"]
    await api.model(session, 1)


async def test_checkpoints_and_resumed_runs_keep_the_optimizer(api: Api) -> None:
    session = await api.session()
    model = await dimuon_model(api, session)
    for _ in range(2):
        await train(api, model, optimizer_params=STEP)
    path = (await api.do("save_weights", model_id=model, path="half"))["path"]
    assert (await api.post("weights_info", tinker_path=path)).json()["optimizer_config"] == DIMUON

    async def load(number: int, optimizer: bool, **more: Any) -> str:
        outcome = await api.do(
            "load_weights", session_id=session, model_seq_id=number, path=path, optimizer=optimizer, **more
        )
        return str(outcome["model_id"])

    resumed = await load(1, True)
    again = await load(2, True, optimizer_config=DIMUON)
    fresh = await load(3, False, optimizer_config=DIMUON)
    adam = await load(4, False)
    assert [await info(api, m) for m in (resumed, again, fresh, adam)] == [DIMUON] * 3 + [{"type": "adamw"}]
    for each in (model, resumed, again, fresh):
        await train(api, each, optimizer_params=STEP)
    scores = [await api.scores(each) for each in (model, resumed, again, fresh)]
    assert scores[0] == scores[1] == scores[2] != scores[3]
    await api.train(adam)
    refused = await api.post(
        "load_weights",
        session_id=session,
        model_seq_id=5,
        path=path,
        optimizer=True,
        optimizer_config={"type": "adamw"},
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["field"] == "optimizer_config"


async def test_state_does_not_enter_a_live_model_of_another_optimizer(api: Api) -> None:
    session = await api.session()
    model, adam = await dimuon_model(api, session), await api.model(session, 1)
    await train(api, model, optimizer_params=STEP)
    path = (await api.do("save_weights", model_id=model, path="x"))["path"]
    answer = await api.post("load_weights", model_id=adam, path=path, optimizer=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "optimizer"
    await api.do("load_weights", model_id=adam, path=path, optimizer=False)
    assert await api.scores(adam) == await api.scores(model)
    await api.train(adam)
