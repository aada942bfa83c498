"""docs/errors.md lists every code that the server can answer with, and no other, with meaning, cause and what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from app.errors import _STATUS_CODES
from schemas import errors

ROOT = Path(__file__).parents[2]
ROOMS = ("app", "workers", "engines", "schemas", "store")


def codes_in(tree: ast.Module) -> Iterator[str]:
    """`code="..."` arguments (or a constant of `schemas.errors`), and `default_code` of error classes (alone or in a
    tuple assignment)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "code" and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
        if (
            isinstance(node, ast.keyword)
            and node.arg == "code"
            and isinstance(node.value, ast.Name)
            and node.value.id.isupper()
        ):
            yield str(getattr(errors, node.value.id))
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "default_code":
            assert isinstance(node.value, ast.Constant)
            yield str(node.value.value)
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            names = [getattr(item, "id", "") for item in (target.elts if isinstance(target, ast.Tuple) else [target])]
            if "default_code" in names:
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                yield str(ast.literal_eval(values[names.index("default_code")]))


def rows() -> list[list[str]]:
    """The cells of the table's rows."""
    text = (ROOT / "docs" / "errors.md").read_text()
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in re.findall(r"^\| `[a-z_]+` \|.*$", text, flags=re.MULTILINE)
    ]


def test_every_code_has_one_row_with_every_cell() -> None:
    codes = [row[0] for row in rows()]
    assert len(codes) == len(set(codes))
    assert [row[0] for row in rows() if len(row) != 5 or not all(row)] == []


def test_the_table_and_the_code_name_the_same_codes() -> None:
    raised = set(_STATUS_CODES.values())
    for room in ROOMS:
        for file in (ROOT / room).rglob("*.py"):
            if file.name == "cli.py" or file.parent.name == "commands":
                continue  # their codes are those with which a command ends
            raised |= set(codes_in(ast.parse(file.read_text())))
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", (ROOT / "docs" / "errors.md").read_text(), flags=re.MULTILINE))
    assert documented == raised
