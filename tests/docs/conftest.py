"""One server with the real default model, and one with a tiny one, for all the documentation tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import RunningServer, serve
from tests.support.tiny_model import make_tiny_model

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


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a tiny model, for code whose result does not depend on what the model says."""
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(folder / "model")
    arguments = ["--base-model", f"acme/tiny={model}", "--threads", "1", "--shutdown-grace", "2"]
    with serve(folder / "data", arguments) as server:
        yield server
