"""One server with the real default model for all the documentation tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server import RunningServer, serve


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`tinsmith serve` with nothing but a port and an empty data folder: SmolLM2-135M-Instruct."""
    with serve(tmp_path_factory.mktemp("documented") / "data") as server:
        yield server
