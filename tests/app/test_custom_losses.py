"""Uploaded losses through HTTP: kept once, owned by their project, run by name, refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from app.settings import Settings
from tests.app.conftest import running
from tests.support.api import DATA, Api, serving

INPUTS = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
OUTPUT = {"tuple": [{"ref": "neg"}, {"dict": {"custom/nll:sum": {"ref": "neg"}}}]}
NODES: list[dict[str, Any]] = [
    {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
    {"op": "placeholder", "name": "weights", "target": "weights", "args": [], "kwargs": {}},
    {"op": "call_function", "name": "mul", "target": "operator.mul", "args": [{"ref": "logprobs"}, {"ref": "weights"}]},
    {"op": "call_method", "name": "sum", "target": "sum", "args": [{"ref": "mul"}], "kwargs": {}},
    {"op": "call_function", "name": "neg", "target": "operator.neg", "args": [{"ref": "sum"}], "kwargs": {}},
    {"op": "output", "name": "output", "target": "output", "args": [OUTPUT], "kwargs": {}},
]


def loss(session: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    """The weighted negative log-likelihood, as an upload."""
    graph = {"format": 1, "nodes": NODES}
    body = {"session_id": session, "custom_loss_seq_id": number, "name": "nll", "inputs": INPUTS, "graph": graph}
    return {**copy.deepcopy(body), **changes}


def using(loss_id: str) -> dict[str, Any]:
    return {"loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}}


async def uploaded(api: Api, session: str) -> str:
    return str((await api.do("create_custom_loss", **loss(session)))["loss_id"])


async def test_an_uploaded_loss_trains_as_the_built_in_one(api: Api) -> None:
    session = await api.session()
    mine, theirs = await api.model(session, 0), await api.model(session, 1)
    loss_id = await uploaded(api, session)
    first: Any = copy.deepcopy(DATA[0])
    first["loss_fn_inputs"]["unread"] = [1.0]
    data = [first, *DATA]
    custom = await api.do("forward_backward", model_id=mine, data=data, **using(loss_id))
    plain = await api.do("forward_backward", model_id=theirs, data=[*DATA, *DATA], loss_fn="cross_entropy")
    assert custom["metrics"]["loss:sum"] == pytest.approx(plain["metrics"]["loss:sum"], rel=1e-5)
    assert custom["metrics"]["custom/nll:sum"] == pytest.approx(plain["metrics"]["loss:sum"], rel=1e-5)
    assert custom["loss_fn_outputs"] == plain["loss_fn_outputs"]
    steps = [await api.do("optim_step", model_id=m, adam_params={"learning_rate": 0.01}) for m in (mine, theirs)]
    assert steps[0]["metrics"]["grad_norm"] == pytest.approx(steps[1]["metrics"]["grad_norm"], rel=1e-4)
    one, two = (await api.scores(mine))[0], (await api.scores(theirs))[0]
    assert one == pytest.approx(two, abs=1e-3)
    forward = await api.do("forward", model_id=mine, data=DATA, **using(loss_id))
    assert forward["metrics"].keys() == {"loss:sum", "custom/nll:sum"}


async def test_a_repeated_upload_is_the_same_loss_and_another_one_is_refused(api: Api) -> None:
    session = await api.session()
    first = await api.submit("create_custom_loss", **loss(session))
    assert await api.submit("create_custom_loss", **loss(session)) == first
    answer = await api.post("create_custom_loss", **loss(session, name="another"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "seq_id_conflict")
    assert await api.submit("create_custom_loss", **loss(session, 1)) != first


async def test_another_project_does_not_see_a_loss(api: Api) -> None:
    session = await api.session()
    loss_id = await uploaded(api, session)
    other = await api.other()
    assert (await other.post("create_custom_loss", **loss(session, 7))).status_code == 404
    foreign = await other.model(await other.session())
    answers = [
        await other.post("forward_backward", model_id=foreign, data=DATA, **using(name)) for name in (loss_id, "none")
    ]
    assert [answer.status_code for answer in answers] == [404, 404]
    details = [answer.json()["detail"].replace(loss_id, "none") for answer in answers]
    assert details[0] == details[1]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"graph": {"nodes": [*NODES[:2], {**NODES[2], "target": "os.system"}, *NODES[3:]]}}, "graph.nodes[2]"),
        ({"graph": {"nodes": [*NODES[:3], {**NODES[3], "target": "item"}, *NODES[4:]]}}, "graph.nodes[3]"),
        ({"graph": {"nodes": NODES[:-1]}}, "graph.nodes"),
        ({"graph": {"nodes": NODES, "format": 2}}, "graph.format"),
        ({"graph": {"nodes": [{**NODES[0], "code": "x"}, *NODES[1:]]}}, "graph.nodes[0].code"),
        ({"inputs": [*INPUTS, {"name": "more", "rank": 1}]}, "graph.nodes"),
        ({"inputs": [{"name": "logprobs", "rank": 3}]}, "inputs[0].rank"),
        ({"inputs": [INPUTS[0], *({"name": f"i{i}", "rank": 1} for i in range(16))]}, "inputs"),
        ({"custom_loss_seq_id": -1}, "custom_loss_seq_id"),
        ({"extra": 1}, "extra"),
    ],
)
async def test_bad_uploads_are_refused_by_name(api: Api, changes: dict[str, Any], field: str) -> None:
    answer = await api.post("create_custom_loss", **loss(await api.session(), **changes))
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["field"] or "").startswith(field), answer.text


async def test_hostile_uploads_are_refused_quickly(api: Api) -> None:
    session = await api.session()
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    for args in ([deep], [{"tuple": [deep]}], ["x" * 10**6], [[1] * 10**6], [2**70]):
        whole = orjson.dumps(loss(session))
        body = whole.replace(orjson.dumps(NODES[2]["args"]), str(args).replace("'", '"').encode())
        assert body != whole
        answer = await api.client.post("create_custom_loss", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, (answer.status_code, answer.text[:200])
        assert len(answer.text) < 3000
    many = [*NODES[:2], *({**NODES[2], "name": f"m{i}"} for i in range(2000)), *NODES[2:]]
    answer = await api.post("create_custom_loss", **loss(session, graph={"nodes": many}))
    assert answer.json()["error"]["field"] == "graph.nodes"


async def test_a_batch_that_does_not_fit_its_loss_is_refused_by_name(api: Api) -> None:
    session = await api.session()
    model, loss_id = await api.model(session), await uploaded(api, session)
    bare = {"model_input": [5, 6], "loss_fn_inputs": {"target_tokens": [6, 7]}}
    flat = {"model_input": [5], "loss_fn_inputs": {"target_tokens": [6], "weights": [[1.0]]}}
    for data, config, field in (
        ([bare], {"loss_id": loss_id}, "data[0].loss_fn_inputs.weights"),
        ([*DATA, flat], {"loss_id": loss_id}, "data[1].loss_fn_inputs.weights"),
        (DATA, {}, "loss_fn_config.loss_id"),
        (DATA, {"loss_id": 3.0}, "loss_fn_config.loss_id"),
        (DATA, {"loss_id": loss_id, "beta": 1.0}, "loss_fn_config.loss_id"),
    ):
        answer = await api.post("forward_backward", model_id=model, data=data, loss_fn="custom", loss_fn_config=config)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, field), answer.text


async def test_a_graph_that_breaks_fails_its_operation_only(api: Api) -> None:
    session = await api.session()
    model = await api.model(session)
    grown = [{"op": "call_function", "name": "g0", "target": "torch.cat", "args": [[{"ref": "mul"}] * 2]}]
    for i in range(1, 40):
        grown.append({**grown[0], "name": f"g{i}", "args": [[{"ref": f"g{i - 1}"}] * 2]})
    nodes = [*NODES[:3], *grown, {**NODES[3], "args": [{"ref": "g39"}]}, *NODES[4:]]
    answer = await api.do("create_custom_loss", **loss(session, graph={"nodes": nodes}))
    await api.do("forward_backward", model_id=model, data=DATA, loss_fn="cross_entropy")
    failure = await api.fails("forward_backward", model_id=model, data=DATA, **using(answer["loss_id"]))
    assert failure["category"] == "user"
    assert "too large" in failure["error"]
    step = await api.do("optim_step", model_id=model, adam_params={"learning_rate": 0.01})
    assert step["metrics"]["grad_norm"] > 0


async def test_a_busy_machine_does_not_fail_a_loss_that_is_executed_again(
    tiny_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_settings(snapshot_operations=10**6)) as api:
        session = await api.session()
        model = await api.model(session)
        name = using(await uploaded(api, session))
        await api.do("forward_backward", model_id=model, data=DATA, **name)
        await api.do("optim_step", model_id=model, adam_params={"learning_rate": 0.01})
        before = await api.scores(model)
        monkeypatch.setattr("engines.custom_loss.SECONDS", -1.0)  # from now on, everything takes too long
        api.groups.made[-1].die()
        assert await api.scores(model) == before
        late = await api.fails("forward_backward", model_id=model, data=DATA, **name)
        assert "takes longer" in late["error"], "what is new is held to it"


async def test_clients_are_told_to_upload_unless_the_setting_is_off(make_settings: Callable[..., Settings]) -> None:
    for settings, expected in ((make_settings(), True), (make_settings(custom_loss_server_side=False), False)):
        async with running(settings) as edge:
            answer = await edge.client.post("client/config", json={"sdk_version": "x"})
            assert answer.json()["custom_loss_server_side"] is expected
