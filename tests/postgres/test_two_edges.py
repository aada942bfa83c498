"""Two servers in one process on one PostgreSQL database and one data folder: one model, whichever is asked."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from app.backup import back_up
from app.doctor import check_data_folder
from app.services.leases import LeaseLost
from app.settings import Settings
from schemas.errors import Unavailable
from store.edges import leases_of
from tests.app.conftest import MODEL
from tests.support.api import DATA, Api, serving

STEPS = 4


@pytest.fixture
def lease() -> float:
    """Seconds that a server may be silent; on a busy machine it may be so for a few."""
    return 8.0


@pytest.fixture
def make_settings(tmp_path: Path, base: Path, database_url: str, lease: float) -> Callable[..., Settings]:
    def make(**values: Any) -> Settings:
        fixed = {
            "data_dir": tmp_path / "data",
            "database_url": database_url,
            "base_model": [f"{MODEL}={base}"],
            "shutdown_grace": 1.0,
            "poll_hold": 5.0,
            "edge_lease": lease,
            "port": 0,
        }
        return Settings(**{**fixed, **values})

    return make


@pytest.fixture
async def edges(make_settings: Callable[..., Settings]) -> AsyncIterator[tuple[Api, Api]]:
    async with AsyncExitStack() as closing:
        first = await closing.enter_async_context(serving(make_settings()))
        second = await closing.enter_async_context(serving(make_settings()))
        yield first, second


async def _train(model: str, first: Api, second: Api) -> None:
    """Numbered requests, at one server and the other in turn, all on their way before the first is waited for."""
    waiting = []
    for step in range(STEPS):
        one, other = (first, second) if step % 2 else (second, first)
        batch = {"model_id": model, "seq_id": 2 * step + 1, "data": DATA, "loss_fn": "cross_entropy"}
        waiting.append((other, await one.submit("forward_backward", **batch)))
        adam = {"model_id": model, "seq_id": 2 * step + 2, "adam_params": {"learning_rate": 1e-2}}
        waiting.append((one, await other.submit("optim_step", **adam)))
    for polled, request_id in waiting:
        assert "error" not in await polled.result(request_id)


async def _undisturbed(tmp_path: Path, make_settings: Callable[..., Settings]) -> list[list[float]]:
    async with serving(make_settings(data_dir=tmp_path / "alone", database_url=None)) as alone:
        model = await alone.model()
        await _train(model, alone, alone)
        return await alone.scores(model)


async def test_requests_at_either_server_train_one_model(
    tmp_path: Path, make_settings: Callable[..., Settings], edges: tuple[Api, Api]
) -> None:
    first, second = edges
    expected = await _undisturbed(tmp_path, make_settings)
    model = await first.model(await second.session())
    await _train(model, first, second)
    assert await second.scores(model) == expected
    assert second.groups.made[0].calls.count("optimizer_step") == 0, "one server executes a run"
    [saved] = [await second.do("save_weights", model_id=model, path="one")]
    assert (await first.post("weights_info", tinker_path=saved["path"])).status_code == 200


async def test_a_server_that_ends_leaves_its_runs_to_the_other(
    tmp_path: Path, make_settings: Callable[..., Settings]
) -> None:
    expected = await _undisturbed(tmp_path, make_settings)
    async with serving(make_settings()) as second:
        async with serving(make_settings()) as first:
            model = await first.model()
            await _train(model, first, second)
        assert await second.scores(model) == expected


@pytest.mark.parametrize("lease", [3.0])  # short: the test waits until it is over
async def test_a_server_that_was_asleep_cannot_write_for_a_run_that_was_taken(edges: tuple[Api, Api]) -> None:
    first, second = edges
    model = await first.model()
    asleep = first.edge.app.state.services
    awake = second.edge.app.state.services
    held = dict(asleep.operations._leases.held)
    for task in asleep.ownership._tasks:
        task.cancel()
    async with asyncio.timeout(30):
        while model not in awake.operations._leases.held:  # noqa: ASYNC110 (a test, not the product)
            await asyncio.sleep(0.1)
    assert asleep.operations._leases.held == held, "it does not know yet"
    with pytest.raises(LeaseLost):
        await asleep.store.write(lambda db: asleep.operations._leases.require(db, model))
    before = await second.scores(model)
    outcome = await first.do("forward", model_id=model, data=DATA, loss_fn="cross_entropy")
    assert [output["logprobs"]["data"] for output in outcome["loss_fn_outputs"]] == before
    await asleep.ownership._round()
    assert asleep.operations._leases.held == {}
    mine = await asleep.store.read(lambda db: leases_of(db, awake.operations._leases.edge_id))
    assert mine[model].fence == 2


async def test_samples_at_either_server_are_one_list_that_both_wake(edges: tuple[Api, Api]) -> None:
    first, second = edges
    session = await first.session()
    opened = await first.post(
        "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL
    )
    sampler = opened.json()["sampling_session_id"]
    sample = {
        "sampling_session_id": sampler,
        "num_samples": 1,
        "prompt": [5, 6, 7],
        "sampling_params": {"max_tokens": 4, "seed": 3},
    }
    submitted = [
        await (first if number % 2 else second).submit("asample", seq_id=number, **sample) for number in range(8)
    ]
    target = {"sampling_session_id": sampler, "cloned_sampler_id": 0}
    found: list[str] = []
    cursor = 0
    async with asyncio.timeout(60):
        while len(found) < len(submitted):
            at = second if len(found) % 2 else first
            answer = await at.post(
                "retrieve_futures", target=target, prev_cursor=cursor, retrieved_request_ids=[], timeout=5
            )
            assert answer.status_code == 200, answer.text
            page = answer.json()
            found += [one["request_id"] for one in page["completions"]]
            cursor = page["cursor"]
    assert sorted(found) == sorted(submitted)
    drawn = [(await second.result(request_id))["sequences"][0]["tokens"] for request_id in submitted]
    assert drawn == [drawn[0]] * 8


async def test_a_session_that_ends_at_one_server_frees_its_run_at_the_other(edges: tuple[Api, Api]) -> None:
    first, second = edges
    session = await first.session()
    model = await first.model(session)
    runtime = next(iter(first.edge.app.state.services.models.runtimes.values()))
    assert runtime.load().adapters == 1
    waiting = await second.submit("forward", model_id=model, seq_id=9, data=DATA, loss_fn="cross_entropy")
    ended = await second.post(f"sessions/{session}/finish", reason={"type": "success"})
    assert ended.status_code in (200, 204), ended.text
    assert "error" in await second.result(waiting), "it waited for requests that never came"
    async with asyncio.timeout(30):
        while runtime.load().adapters or first.edge.app.state.services.operations._leases.held:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_one_server_sweeps_and_doctor_looks_at_both(edges: tuple[Api, Api]) -> None:
    first = edges[0]
    await first.model()
    owners = [api.edge.app.state.services.ownership for api in edges]
    assert [await owner.sweeps() for owner in owners] == [True, False]
    assert [await owner.sweeps() for owner in owners] == [True, False]
    settings = first.edge.settings
    checks = await asyncio.to_thread(check_data_folder, settings.data_dir, database_url=settings.database_url)
    assert {check.status for check in checks} <= {"ok", "warn"}, checks
    assert any("servers" in check.detail for check in checks), checks
    with pytest.raises(Unavailable, match="its rows are in another database"):
        await asyncio.to_thread(back_up, settings.data_dir, settings.data_dir.parent / "backup")


@pytest.mark.slow
async def test_a_server_on_a_shared_cluster_must_be_the_only_one(make_settings: Callable[..., Settings]) -> None:
    async with serving(make_settings()) as first:
        with pytest.raises(Unavailable, match="must be the only one") as refused:
            async with serving(make_settings(ray="auto"), ready=False):
                raise AssertionError("it was let in")
        assert refused.value.code == "database_in_use"
        assert (await first.post("create_session", sdk_version="test")).status_code == 200


async def test_a_base_model_that_one_server_has_keeps_its_runs_while_that_one_restarts(
    make_settings: Callable[..., Settings], base: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(base, other)
    async with serving(make_settings()) as second:
        async with serving(make_settings()) as first:
            added = await first.client.post("admin/models", json={"name": "acme/added", "path": str(other)})
            assert added.status_code == 200, added.text
            session, lora = await first.session(), {"rank": 4, "seed": 1}
            made = await first.do(
                "create_model", session_id=session, model_seq_id=0, base_model="acme/added", lora_config=lora
            )
            model = made["model_id"]
            await first.train(model)
            before = await first.scores(model)
            refused = await second.post("forward", model_id=model, data=DATA, loss_fn="cross_entropy")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "base_model_unavailable")
        ownership = second.edge.app.state.services.ownership
        for _ in range(3):  # the first one has left
            await ownership._round()
        assert model not in second.edge.app.state.services.leases.held
    async with serving(make_settings()) as first:
        assert await first.scores(model) == before
        await first.train(model)


async def test_a_database_that_is_away_in_the_middle_of_a_takeover_costs_nothing(
    make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(make_settings()) as second:
        async with serving(make_settings()) as first:
            model = await first.model()
            await first.train(model)
            before = await first.scores(model)
        services, away, answers = second.edge.app.state.services, [2], []
        bring_back = services.recovery._bring_back

        async def slow(*args: Any) -> None:
            answers.append(
                (await second.post("forward", model_id=model, data=DATA, loss_fn="cross_entropy")).status_code
            )
            if away[0]:
                away[0] -= 1
                raise Unavailable("the server's database cannot be read right now")
            await bring_back(*args)

        monkeypatch.setattr(services.recovery, "_bring_back", slow)
        deadline = asyncio.get_running_loop().time() + 60
        while len(answers) < 3:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.1)
        assert set(answers) == {503}
        async with asyncio.timeout(30):
            while model in services.runs.unserved:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await second.scores(model) == before
