"""Commits of the database fail once: what was not committed is sent again, and nothing is done twice.

Every single one with `-m exhaustive`, every third in the ordinary suite.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.disk_program import calm_settings, every, fail_calls
from tests.support.tiny_model import make_tiny_model

KINDS = frozenset({"commit"})


@pytest.mark.parametrize(
    "step",
    [pytest.param(3, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)],
    ids=["every third", "every one"],
)
async def test_commits_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    settings = calm_settings(tmp_path / "data", make_tiny_model(tmp_path / "tiny"))
    failed, told = await fail_calls(settings, KINDS, monkeypatch, lambda calls: every(calls)[::step])
    assert len(failed) * step >= 30, failed
    assert told
