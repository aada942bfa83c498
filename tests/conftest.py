"""How the tests are shared by processes (`pytest -n 2 --dist loadgroup`): files stay whole, and so do the folders whose
tests share one server, or one cluster, unless a test names a group of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent
TOGETHER = {"docs", "e2e", "ray"}


def pytest_itemcollected(item: pytest.Item) -> None:
    """At once: pytest-xdist reads the groups before any other look at the whole collection."""
    place = item.path.relative_to(ROOT) if item.path.is_relative_to(ROOT) else item.path
    folder = place.parts[0]
    if item.get_closest_marker("xdist_group") is None:
        item.add_marker(pytest.mark.xdist_group(folder if folder in TOGETHER else str(place)))
