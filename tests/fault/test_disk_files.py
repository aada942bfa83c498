"""Every single file operation fails once (no room, quota, read-only, broken): a request suffers, nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.disk_program import calm_settings, fail_every_call
from tests.support.tiny_model import make_tiny_model

KINDS = frozenset({"open", "write", "fsync", "rename", "link", "mkdir"})


async def test_every_file_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = calm_settings(tmp_path / "data", make_tiny_model(tmp_path / "tiny"))
    calls, told = await fail_every_call(settings, KINDS, monkeypatch)
    assert {call.split()[0] for call in calls} == KINDS
    assert len(calls) >= 60, calls
    assert told
