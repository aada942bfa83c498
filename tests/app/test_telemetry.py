"""Telemetry: taken at once, and nothing of it kept, for it may hold credentials."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from app.settings import Settings
from tests.app.conftest import running

SECRET = "tml-a-secret-of-the-client-0123456789"


def batch(**event: Any) -> dict[str, Any]:
    """What the SDK sends after a failed future."""
    return {
        "events": [
            {
                "event": "GENERIC_EVENT",
                "event_id": SECRET,
                "event_session_index": 3,
                "severity": "ERROR",
                "timestamp": "2026-07-13T00:00:00Z",
                "event_name": "APIFuture.result_async",
                "event_data": {"headers": {"x-api-key": SECRET}, "traceback": SECRET},
                **event,
            }
        ],
        "platform": SECRET,
        "sdk_version": "0.38.0",
        "session_id": f"sessionless-{SECRET}",
        "process_uuid": SECRET,
    }


async def test_nothing_of_it_is_written_anywhere(
    make_settings: Callable[..., Settings], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(log_level="debug")
    with caplog.at_level(logging.DEBUG):
        async with running(settings) as edge:
            assert (await edge.client.post("telemetry", json=batch())).json() == {"status": "accepted"}
            refused = await edge.client.post("telemetry", json={**batch(), "unknown": SECRET})
            assert refused.status_code == 400
            half = await edge.client.post(
                "telemetry", content=f'{{"events": "{SECRET}'.encode(), headers={"Content-Type": "application/json"}
            )
            assert half.status_code == 400
            await edge.app.state.services.housekeeping.sweep()
    files = [path for path in settings.data_dir.rglob("*") if path.is_file()]
    assert any(path.name == "tinsmith.db" for path in files)
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path.name
    assert SECRET not in caplog.text
    assert SECRET not in "".join(capfd.readouterr())
