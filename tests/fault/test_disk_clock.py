"""The clock jumps by an hour while clients work: no session ends, no result is dropped, nothing is lost."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import app.services
from app.settings import Settings
from tests.app.conftest import MODEL
from tests.support.api import DATA, Api, serving
from tests.support.disk_program import calm_settings
from tests.support.tiny_model import make_tiny_model

HOUR = timedelta(hours=1)


class Clock:
    """The time, and by how much it is wrong."""

    def __init__(self) -> None:
        self.off = timedelta()

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.off


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Sessions and results end sooner than the clock jumps."""
    folder = tmp_path_factory.mktemp("clock")
    calm = calm_settings(folder / "data", make_tiny_model(folder / "tiny"))
    return calm.model_copy(update={"session_timeout": 600.0, "result_retention_delivered": 600.0})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all services."""
    made = Clock()
    defaults: Any = app.services.core.Core.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "clock", made)
    return made


async def _sweep(api: Api) -> None:
    """What the sweeper does every half minute."""
    housekeeping = api.edge.app.state.services.housekeeping
    housekeeping.notice_clock()
    await housekeeping.sweep()


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_sessions_results_and_work_survive_a_jump(settings: Settings, clock: Clock, jump: timedelta) -> None:
    async with serving(settings) as api:
        session = await api.session()
        model = await api.model(session)
        await _sweep(api)
        delivered = await api.submit("forward_backward", model_id=model, seq_id=1, data=DATA, loss_fn="cross_entropy")
        result = await api.result(delivered)
        pending = await api.submit("optim_step", model_id=model, seq_id=3, adam_params={"learning_rate": 0.01})
        clock.off = jump
        await _sweep(api)
        await _sweep(api)
        assert (await api.post("session_heartbeat", session_id=session)).status_code == 200
        assert await api.result(delivered) == result
        await api.do("forward_backward", model_id=model, seq_id=2, data=DATA, loss_fn="cross_entropy")
        assert "error" not in await api.result(pending)
        clock.off = timedelta()  # and back
        await _sweep(api)
        await api.train(model)
        await api.do("save_weights", model_id=model, path="a")
        assert await api.result(delivered) == result


async def test_after_a_jump_a_silent_session_still_ends_in_its_time(settings: Settings, clock: Clock) -> None:
    async with serving(settings) as api:
        session = await api.session()
        clock.off = HOUR
        await _sweep(api)
        clock.off += timedelta(seconds=59)  # a small correction is none
        await _sweep(api)
        assert (await api.post("session_heartbeat", session_id=session)).status_code == 200
        housekeeping = api.edge.app.state.services.housekeeping
        await housekeeping.write_activity()
        clock.off += timedelta(seconds=700)
        await housekeeping.sweep()  # the clock went on by itself: nobody noticed a jump
        late = await api.post("create_model", session_id=session, model_seq_id=0, base_model=MODEL)
        assert (late.status_code, late.json()["error"]["code"]) == (410, "session_ended")


async def test_the_sweeper_itself_notices(settings: Settings, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    quick = settings.model_copy(update={"sweep_interval": 0.05})
    async with serving(quick) as api:
        session = await api.session()
        await asyncio.sleep(0.2)
        clock.off = HOUR
        async with asyncio.timeout(10):
            while "the clock jumped by 3600 s" not in caplog.text:  # noqa: ASYNC110 (a line of the log)
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        assert (await api.post("session_heartbeat", session_id=session)).status_code == 200
        assert (await api.model(session)) is not None
