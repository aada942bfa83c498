"""`tinsmith limits` against the application: what is shown, set and cleared, and how mistakes end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from app import cli
from app.settings import Settings
from tests.app.conftest import MODEL
from tests.support.idle_server import listening

runner = CliRunner()


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """A server on a socket, and the options by which a command finds it."""
    folder = tmp_path_factory.mktemp("served") / "data"
    settings = Settings(data_dir=folder, base_model=[f"{MODEL}=/nowhere"], limit_live_runs=9, shutdown_grace=1.0)
    with listening(settings) as server:
        yield ["--url", server.url, "--data-dir", str(folder)]


def run(*arguments: str) -> Any:
    return runner.invoke(cli.app, ["limits", *arguments], env={"TERMINAL_WIDTH": "200"})


def test_set_show_and_clear(options: list[str]) -> None:
    own = json.loads(run("show", "--json", *options).stdout)["data"]
    project, key = own["project_id"], own["key_id"]
    done = run("set", "--project", project, "requests_per_second=2.5", "lora_rank=16", "live_runs=unlimited", *options)
    assert done.exit_code == 0, done.stderr
    assert run("set", "--key", key, "training_token_budget=1_000_000", *options).exit_code == 0
    shown = run("show", *options).stdout
    lines = {tuple(line.split()[:3]) for line in shown.splitlines()[2:]}
    assert lines == {
        ("requests_per_second", "2.5", "project"),
        ("live_runs", "unlimited", "project"),
        ("lora_rank", "16", "project"),
        ("training_token_budget", "1,000,000", "key"),
    }
    assert "burst 150" in shown
    assert run("clear", "--project", project, "lora_rank", *options).exit_code == 0
    assert run("clear", "--key", key, *options).exit_code == 0
    left = json.loads(run("clear", "--project", project, "--json", *options).stdout)["data"]
    found = {item["name"]: item for item in left["limits"]}
    assert found["live_runs"] == {"name": "live_runs", "value": 9.0, "source": "server", "used": 0.0, "remaining": 9.0}
    assert found["lora_rank"]["source"] == "server"


def test_mistakes_are_named(options: list[str]) -> None:
    for arguments, code, words in (
        (("set", "lora_rank=1"), 2, "either --project or --key"),
        (("set", "--project", "a", "--key", "b", "lora_rank=1"), 2, "either --project or --key"),
        (("set", "--project", "a", "nonsense=1"), 2, "there are: requests_per_second"),
        (("set", "--project", "a", "lora_rank"), 2, "lora_rank=16"),
        (("set", "--project", "a", "lora_rank=many"), 2, "give a number"),
        (("set", "--project", "nobody", "lora_rank=1"), 1, "there is no project 'nobody'"),
        (("clear", "--key", "nobody", "nonsense"), 2, "there are"),
        (("show", "--key", "nobody"), 1, "there is no key 'nobody'"),
    ):
        done = run(*arguments, *options)
        assert done.exit_code == code, (arguments, done.stderr)
        assert words in done.stderr, arguments
