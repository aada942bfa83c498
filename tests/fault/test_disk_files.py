"""File operations fail once (no room, quota, read-only, broken): a request suffers, nothing else does.

Every single one, with every error, with `-m exhaustive`; one of each kind of operation on each kind of file in the
ordinary suite.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.support.disk_program import CODES, calm_settings, every, fail_calls, one_of_each
from tests.support.tiny_model import make_tiny_model

KINDS = frozenset({"open", "write", "fsync", "rename", "link", "mkdir"})


@pytest.mark.slow
async def test_one_of_each_kind_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = calm_settings(tmp_path / "data", make_tiny_model(tmp_path / "tiny"))
    failed, told = await fail_calls(settings, KINDS, monkeypatch, one_of_each)
    assert {call.split()[0] for call in failed} == KINDS
    assert len(set(failed)) >= 25, failed
    assert told


@pytest.mark.exhaustive
@pytest.mark.parametrize("code", CODES, ids=lambda code: errno.errorcode[code])
async def test_every_one_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    settings = calm_settings(tmp_path / "data", make_tiny_model(tmp_path / "tiny"))
    failed, told = await fail_calls(settings, KINDS, monkeypatch, lambda calls: every(calls, code))
    assert {call.split()[0] for call in failed} == KINDS
    assert len(failed) >= 80, failed
    assert told
