"""What uploaded losses may take: so much for a project, until their sessions have been over for long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import httpx
from sqlalchemy import delete

from app.settings import Settings
from schemas.custom_loss import MAX_ARGUMENTS
from store.tables import CustomLoss
from tests.app.conftest import Edge, running
from tests.support.api import DATA, serving


def large(session: str, number: int) -> dict[str, Any]:
    """An upload of about 220 KB: the log-likelihood, and constants that nobody reads."""
    return small(session, number, [1 / (count + 3) for count in range(MAX_ARGUMENTS // 2)])


def small(session: str, number: int, values: Sequence[float] = (1.0,)) -> dict[str, Any]:
    """An upload of the log-likelihood, with constants that nobody reads."""
    logprobs = {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}}
    constant = {"op": "call_function", "name": "c", "target": "torch.tensor", "args": [list(values)], "kwargs": {}}
    summed = {"op": "call_method", "name": "sum", "target": "sum", "args": [{"ref": "logprobs"}], "kwargs": {}}
    returned = {"tuple": [{"ref": "sum"}, {"dict": {}}]}
    output = {"op": "output", "name": "output", "target": "output", "args": [returned], "kwargs": {}}
    return {
        "session_id": session,
        "custom_loss_seq_id": number,
        "name": "likelihood",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"nodes": [logprobs, constant, summed, output]},
    }


async def begin(client: httpx.AsyncClient) -> str:
    answer = await client.post("create_session", json={"sdk_version": "test"})
    return str(answer.json()["session_id"])


async def fill(client: httpx.AsyncClient, session: str) -> httpx.Response:
    """Upload until one is refused."""
    for number in range(8):
        answer = await client.post("create_custom_loss", json=large(session, number))
        if answer.status_code != 200:
            return answer
    raise AssertionError("nothing was refused")


async def test_a_project_has_room_for_so_much_and_gets_it_back(make_settings: Callable[..., Settings]) -> None:
    async with running(make_settings(max_custom_loss_mib=1, log_retention=600)) as edge:
        session = await begin(edge.client)
        refused = await fill(edge.client, session)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "over_limit")
        for words in ("limit max_custom_loss_mib of every project is 1", "finish sessions", "log_retention"):
            assert words in refused.json()["detail"]
        again = await edge.client.post("create_custom_loss", json=large(session, 0))
        assert again.status_code == 200, "a repeat of what is kept takes nothing"
        another = await begin(edge.client)
        answer = await edge.client.post("create_custom_loss", json=large(another, 0))
        assert answer.status_code == 400, "another session of the project has no room of its own"
        other = await edge.other_project()
        answer = await other.post("create_custom_loss", json=large(await begin(other), 0))
        assert answer.status_code == 200, "another project has"
        assert (await edge.client.post(f"sessions/{session}/finish", json={})).status_code == 200
        await swept_later(edge)
        answer = await edge.client.post("create_custom_loss", json=large(another, 0))
        assert answer.status_code == 200, answer.text


async def test_a_batch_is_executed_again_when_its_loss_is_gone(tiny_settings: Callable[..., Settings]) -> None:
    async with serving(tiny_settings(snapshot_operations=1_000_000)) as api:
        session = await api.session()
        used, undisturbed = await api.model(session, 0), await api.model(session, 1)
        loss_id = (await api.do("create_custom_loss", **small(session, 0)))["loss_id"]
        use = {"data": DATA, "loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}}
        for model in (used, undisturbed):
            await api.do("forward_backward", model_id=model, **use)
            await api.do("optim_step", model_id=model, adam_params={"learning_rate": 1e-2})
        before = await api.scores(used)
        await api.edge.app.state.store.write(lambda db: db.execute(delete(CustomLoss)))
        api.groups.made[-1].die()
        assert await api.scores(used) == before == await api.scores(undisturbed)
        answer = await api.post("forward_backward", model_id=used, **use)
        assert (answer.status_code, answer.json()["error"]["field"]) == (404, "loss_fn_config.loss_id")


async def swept_later(edge: Edge) -> None:
    """Housekeeping as it is done ten days later, without the end of those who were silent until then."""
    housekeeping = edge.app.state.services.housekeeping
    clock = housekeeping._clock
    housekeeping._clock = lambda: clock() + timedelta(days=10)
    await housekeeping._expire_results()
    await housekeeping._forget_operations()
    housekeeping._clock = clock
