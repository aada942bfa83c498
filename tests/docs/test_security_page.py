"""docs/security.md: every test that it names exists, and every promise names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_named_test_exists(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    there = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {name for named, name in NAMED if named == file} <= there


def test_every_promise_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise |")]
    assert len(rows) > 30
    assert [row for row in rows if not re.search(r"\| (`tests/[\w/.]+::test_\w+` ?)+\|$", row)] == []
