"""The quickstart, with the unmodified SDK, teaches the real model something within 20 steps.

The ordinary suite takes three of them (`test_readme.py`)."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from examples import quickstart
from tests.support.peft_adapter import assert_loads_in_peft
from tests.support.server import RunningServer

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def report(real_server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> quickstart.Report:
    console = Console(file=io.StringIO())
    output = tmp_path_factory.mktemp("adapter")
    return quickstart.run(base_url=real_server.url, api_key=real_server.key, output=output, console=console)


def test_the_loss_falls_by_more_than_half_in_twenty_steps(report: quickstart.Report) -> None:
    assert len(report.losses) == 20
    assert report.losses[-1] < report.losses[0] / 2


def test_the_model_recites_what_it_was_taught(report: quickstart.Report) -> None:
    first_line = json.loads(quickstart.VERSES.read_text().splitlines()[0])["text"].splitlines()[0]
    assert first_line in report.after
    assert first_line not in report.before


def test_the_exported_adapter_loads_in_peft(report: quickstart.Report, real_server: RunningServer) -> None:
    assert_loads_in_peft(report.exported[0].parent, real_server)


def test_the_checkpoint_path_is_a_training_checkpoint(report: quickstart.Report) -> None:
    kind = Path(report.checkpoint.removeprefix("tinker://")).parts[1]
    assert kind == "weights"
