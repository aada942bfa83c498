"""Laboratories are made once per session, when a test first asks for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.properties.lab import ARCHITECTURES, Lab

Labs = Callable[..., Lab]


@pytest.fixture(scope="session")
def labs(tmp_path_factory: pytest.TempPathFactory) -> Labs:
    """The laboratory of an architecture, a number of threads, and whether numbers must not depend on company."""
    made: dict[tuple[str, int, bool], Lab] = {}
    folder = tmp_path_factory.mktemp("labs")

    def lab(name: str, threads: int = 1, exact: bool = True) -> Lab:
        key = (name, threads, exact)
        if key not in made:
            (folder / name).mkdir(exist_ok=True)
            made[key] = Lab(name, folder / name, threads, exact)
        return made[key]

    return lab


@pytest.fixture(params=ARCHITECTURES)
def lab(request: pytest.FixtureRequest, labs: Labs) -> Lab:
    """Each architecture, one thread, batch invariant."""
    return labs(request.param)
