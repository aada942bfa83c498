"""One server with the real default model for all the documentation tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import RunningServer, serve

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`make serve` with nothing but a port and an empty data folder: SmolLM2-135M-Instruct."""
    folder = tmp_path_factory.mktemp("documented")
    wrapper = folder / "serve.sh"
    # `make` takes the options of the command in ARGS; the wrapper only moves them there. The environment is there (-o).
    wrapper.write_text(f'#!/bin/sh\ncd "{ROOT}" && exec make --no-print-directory -o .venv/.ready serve ARGS="$*"\n')
    with serve(folder / "data", command=["sh", wrapper]) as server:
        yield server
