"""The switch that kills: what its text means. What the kills do is tested in `tests/fault`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas import fail_points
from schemas.fail_points import POINTS, VARIABLE

PROGRAM = """
from schemas.fail_points import fail_point
for kind in ("a", "b", "b"):
    fail_point("accept.after_row", kind)
"""
PLACE = POINTS.index("accept.after_row")


def _run(text: str) -> int:
    variables = {**os.environ, VARIABLE: text}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=variables, timeout=30, check=False).returncode


def test_the_process_dies_once_at_its_time_and_kind(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    text = f"{PLACE}:b,2,{marker}"
    assert [_run(text), marker.exists(), _run(text)] == [-9, True, 0]
    assert _run(f"{PLACE}:a,2,{tmp_path / 'other'}") == 0


def test_who_dies_of_a_server_without_a_worker(tmp_path: Path) -> None:
    for victim, code in {"worker": 0, "tree": -9, "edge": -9}.items():
        assert _run(f"{PLACE},1,{tmp_path / victim},{victim}") == code
        assert (tmp_path / victim).exists()


def test_an_unknown_victim_is_refused() -> None:
    with pytest.raises(ValueError, match="'nobody' is none of self, edge, worker, tree"):
        fail_points._armed(f"{PLACE},1,/nowhere,nobody")
