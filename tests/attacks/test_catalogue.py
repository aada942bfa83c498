"""Every request of the catalogue is answered as it says, never by a 5xx, and leaves nothing behind."""

from __future__ import annotations

import logging
import pickle
import socket
import subprocess
from contextlib import suppress

import pytest

from app.logging import TextFormatter
from tests.attacks.catalogue import KINDS
from tests.attacks.conftest import Attacked
from tests.attacks.sweep import Honest, Report, footprint
from tests.attacks.watching import watched

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("kind", KINDS)
async def test_every_request_is_answered_as_stated(
    attacked: Attacked, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "app")
    before, calls = footprint(attacked.data_dir), list(attacked.api.groups.made[0].calls)
    report = Report()
    with watched() as seen:
        await attacked.attacker.sweep(kind, KINDS[kind](), report)
    assert not report.wrong, f"{len(report.wrong)} of {report.tried[kind]}:\n" + "\n".join(report.wrong)
    assert not seen, "an address was asked for, a program started or a pickle read"
    assert footprint(attacked.data_dir) == before
    assert attacked.api.groups.made[0].calls == calls, "something of it reached the engine"
    lines = [TextFormatter().format(record) for record in caplog.records if record.name.startswith(("app", "workers"))]
    assert len(lines) >= report.tried[kind]
    assert not [line for line in lines if "\n" in line or "\x1b" in line], "a line was forged, or holds a traceback"
    assert not [line for line in lines for leak in attacked.attacker.secrets[:2] if leak in line], "a key is in the log"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_whoever_trained_meanwhile_noticed_nothing(attacked: Attacked) -> None:
    twin = await Honest.begin(await attacked.edge.other_project("twin"))
    assert await attacked.honest.ending() == await twin.ending()


async def test_the_watch_sees_what_it_is_to_see() -> None:
    with watched() as seen:
        subprocess.run(["true"], check=True)  # noqa: ASYNC221 (a moment)
        with suppress(OSError), socket.socket() as caller:
            caller.connect(("127.0.0.1", 1))
        pickle.loads(pickle.dumps(Report))
    assert {each.split()[0] for each in seen} >= {"subprocess.Popen", "socket.connect", "pickle.find_class"}
