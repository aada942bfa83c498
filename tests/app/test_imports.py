"""Imports go one way, and the edge starts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("app", "workers", "engines", "schemas", "store")
MAY_IMPORT = {
    "schemas": {"schemas"},
    "engines": {"engines", "schemas"},
    "workers": {"workers", "engines", "schemas"},
    "store": {"store", "schemas"},
    "app": {"app", "workers", "engines", "store", "schemas"},
}
FORBIDDEN_LIBRARIES = {
    "schemas": {"torch", "transformers", "peft", "fastapi", "starlette", "sqlalchemy", "ray", "httpx"},
    "engines": {"fastapi", "starlette", "uvicorn", "sqlalchemy", "ray", "httpx"},
    "workers": {"fastapi", "starlette", "uvicorn", "sqlalchemy", "httpx"},
    "store": {"torch", "transformers", "peft", "fastapi", "starlette", "ray"},
    "app": {"torch", "transformers", "peft"},
}

EXCEPTIONS = {"engines/sampling/external.py": {"httpx"}}
"""A sampler that is itself a client of another server."""


def imported(file: Path) -> Iterator[str]:
    """The first part of every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room: str) -> None:
    files = list((ROOT / room).rglob("*.py"))
    assert files
    wrong = []
    for file in files:
        for name in set(imported(file)) - EXCEPTIONS.get(str(file.relative_to(ROOT)), set()):
            if (name in ROOMS and name not in MAY_IMPORT[room]) or name in FORBIDDEN_LIBRARIES[room] or name == "tests":
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_the_edge_starts_without_torch() -> None:
    code = "import app.main, app.serve, sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
