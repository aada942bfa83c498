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


def test_a_victim_that_is_not_there_is_waited_for(tmp_path: Path) -> None:
    """This server has no worker."""
    for victim in ("worker", "tree"):
        assert _run(f"{PLACE},1,{tmp_path / victim},{victim}") == 0
    assert list(tmp_path.iterdir()) == []
    assert _run(f"{PLACE},1,{tmp_path / 'edge'},edge") == -9


def test_an_unknown_victim_is_refused() -> None:
    with pytest.raises(ValueError, match="'nobody' is none of self, edge, worker, tree"):
        fail_points._armed(f"{PLACE},1,/nowhere,nobody")
