"""What `make setup` says while pip works."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[2] / "docker" / "pip_progress.py"


def test_packages_are_counted_and_large_files_are_named() -> None:
    spec = importlib.util.spec_from_file_location("pip_progress", FILE)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    lines = [
        *(f"Collecting p{number}==1 (from -r requirements.lock)\n" for number in range(41)),
        "  Downloading torch-2.13.0-cp311.whl (190.4 MB)\n",
        "  Downloading small-1-py3.whl (11 kB)\n",
        "  Downloading other-1-py3.whl (1.5 MB)\n",
        "Installing collected packages: p0, p1\n",
        "Successfully installed p0-1\n",
    ]
    told = list(program.steps(lines, 41))
    assert len(told) == 43
    assert [text for text, own_line in told if own_line] == [
        "40 of 41 packages",
        "fetching torch-2.13.0-cp311.whl (190.4 MB)",
        "unpacking what was fetched",
    ]
    lock = ["install", "--requirement", str(FILE.parents[1] / "requirements.lock")]
    assert program._wanted([*lock, "--no-deps"]) > 100
    assert program._wanted(lock) is None  # others may come with them
