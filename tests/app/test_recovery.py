"""What a start does with what an earlier process left in the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from app.services import runs
from app.settings import Settings
from store.tables import Operation, Run, Session
from store.under_way import UnderWayFile
from tests.support.api import DATA, Api, serving

MakeSettings = Callable[..., Settings]


async def _set(api: Api, table: type, **values: object) -> None:
    await api.edge.app.state.store.write(lambda db: db.execute(update(table).values(**values)))


async def _delete(what: str, db: AsyncSession) -> None:
    await db.execute(text(f"DELETE FROM {what}"))


async def _unfinish(api: Api, *kinds: str) -> None:
    """As if the process had died before these were executed."""
    gone = {"result_inline": None, "result_ref": None, "settled_seq": None, "finished_at": None}
    pending = update(Operation).where(Operation.kind.in_(kinds)).values(state="pending", **gone)
    await api.edge.app.state.store.write(lambda db: db.execute(pending))


async def test_every_kind_of_request_is_finished_by_the_next_process(tiny_settings: MakeSettings) -> None:
    settings = tiny_settings()
    async with serving(settings) as api:
        session = await api.session()
        model = await api.model(session)
        await api.train(model, steps=2)
        await api.do("save_weights", model_id=model, path="kept")
        scores = await api.scores(model)
        promises = {
            "export": await api.submit("save_weights_external", model_id=model, path="out"),
            "sampler": await api.submit("save_weights_for_sampler", model_id=model, sampling_session_seq_id=0),
            "named": await api.submit("save_weights_for_sampler", model_id=model, path="named"),
            "unload": await api.submit("unload_model", model_id=model),
        }
        results = {name: await api.result(promise) for name, promise in promises.items()}
        await _unfinish(api, "save_weights_external", "save_weights_for_sampler", "unload_model")
        await _set(api, Run, state="ready")
        store = api.edge.app.state.store
        new = "WHERE checkpoint_id NOT IN (SELECT checkpoint_id FROM checkpoints WHERE name = 'kept')"
        for what in ("samplers", f"stored_checkpoints {new}", f"checkpoints {new}"):
            await store.write(partial(_delete, what))
    async with serving(settings) as api:
        for name, promise in promises.items():
            assert await api.result(promise) == results[name], name
        listed = (await api.client.get("audit", params={"event_type": "checkpoints"})).json()["entries"]
        asked = await api.edge.app.state.authenticator.principal(api.edge.app.state.dev_key)
        assert [entry["event_details"]["key_id"] for entry in listed] == [asked.key_id] * 5  # two were made twice
        sampler = results["sampler"]["sampling_session_id"]
        drawn = await api.do(
            "asample",
            sampling_session_id=sampler,
            prompt=[*DATA[0]["model_input"], 9],
            prompt_logprobs=True,
            sampling_params={"max_tokens": 1},
        )
        assert max(abs(a - b) for a, b in zip(scores[0], drawn["prompt_logprobs"][1:], strict=True)) < 1e-3
        answer = await api.post("optim_step", model_id=model, adam_params={})
        assert answer.json()["error"]["code"] == "model_unloaded"


async def test_creations_that_were_cut_off_are_made_by_the_next_process(tiny_settings: MakeSettings) -> None:
    settings = tiny_settings()
    async with serving(settings) as api:
        session = await api.session()
        model = await api.model(session)
        await api.train(model)
        path = (await api.do("save_weights", model_id=model, path="kept"))["path"]
        scores = await api.scores(model)
        load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
        made = await api.submit("load_weights", **load)
        assert "error" not in await api.result(made)
        await _unfinish(api, "create_model", "load_weights")
        await _set(api, Run, state="creating")
    async with serving(settings) as api:
        copy = (await api.result(made))["model_id"]
        assert await api.scores(copy) == scores
        assert await api.scores(model) == scores


async def test_runs_of_a_session_that_is_over_are_closed(tiny_settings: MakeSettings) -> None:
    settings = tiny_settings()
    async with serving(settings) as api:
        model = await api.model()
        await _set(api, Session, state="finished")
    async with serving(settings) as api:
        run = await api.edge.app.state.store.read(lambda db: db.get(Run, model))
        assert run.state == "closed"


async def test_a_session_ends_together_with_its_runs_and_weights(
    tiny_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies just when the session is over by its row: nothing of it is left for ever."""
    settings = tiny_settings()
    async with serving(settings) as api:
        session = await api.session()
        model, other = await api.model(session), await api.model(session, 1)
        await api.do("save_weights_for_sampler", model_id=model, sampling_session_seq_id=0)
        await api.do("unload_model", model_id=model)

        def die(point: str) -> None:
            raise KeyboardInterrupt(point)

        with monkeypatch.context() as patch:
            patch.setattr(runs, "fail_point", die)
            with pytest.raises(KeyboardInterrupt):
                await api.client.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}})

        async def states(db: AsyncSession) -> list[tuple[str, str]]:
            return [(row.model_id, row.state) for row in await db.execute(select(Run.model_id, Run.state))]

        found = dict(await api.edge.app.state.store.read(states))
        assert found == {model: "closed", other: "closed"}
    async with serving(settings) as api:
        await api.edge.app.state.services.housekeeping.sweep()
        assert list((settings.data_dir / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("before", [1, 2])
async def test_what_was_under_way_at_three_deaths_of_the_server_is_not_tried_again(
    tiny_settings: MakeSettings, before: int
) -> None:
    settings = tiny_settings()
    async with serving(settings) as api:
        model = await api.model()
        await api.train(model)
        deadly = await api.submit("zero_grad", model_id=model)
        assert "error" not in await api.result(deadly)
        await _unfinish(api, "zero_grad")
        await _set(api, Operation, deaths=before)
    file = UnderWayFile(settings.data_dir)  # as the process leaves it when it is killed
    file.write([deadly], [], False)
    file.close()
    async with serving(settings) as api:
        outcome = await api.result(deadly)
        assert outcome.get("code") == (None if before == 1 else "worker_died")
        await api.train(model)
        calls = [call for call in api.groups.made[0].calls if call == "optimizer_zero_grad"]
        assert len(calls) == (before == 1)


async def test_a_server_that_stops_in_order_leaves_nothing_to_count(tiny_settings: MakeSettings) -> None:
    settings = tiny_settings(shutdown_grace=0.0)
    async with serving(settings) as api:
        model = await api.model()
        many = [{**DATA[0], "model_input": [5] * 100, "loss_fn_inputs": {"target_tokens": [6] * 100}}] * 60
        await api.submit("forward_backward", model_id=model, data=many, loss_fn="cross_entropy")
        await api.edge.app.state.lifecycle.drain()
    file = UnderWayFile(settings.data_dir)
    assert file.take() == ([], [])
    file.close()
