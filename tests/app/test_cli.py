"""The command line: help, lock-step with the settings, clear failures."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from app import cli
from app.settings import Settings
from app.settings_docs import option_name

runner = CliRunner()


def test_every_setting_is_an_option_and_nothing_else() -> None:
    shown = runner.invoke(cli.app, ["serve", "--help"], env={"TERMINAL_WIDTH": "200"}).output
    options = set(re.findall(r"--[a-z][a-z-]+", shown))
    expected = {option_name(name) for name in Settings.model_fields}
    assert expected <= options
    # What help's own words mention beside the settings.
    assert options - expected == {"--config", "--help"}


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from app import cli\n"
        "try: cli.app(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'sqlalchemy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_options_reach_the_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import app.serve

    seen: list[Settings] = []

    def run(settings: Settings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(app.serve, "run", run)
    config = tmp_path / "c.toml"
    config.write_text("max_rank = 8\n")
    arguments = ["serve", "--config", str(config), "--port", "99", "--base-model", f"a={tmp_path}", "--base-model", "b"]
    done = runner.invoke(cli.app, arguments, env={"TINSMITH_MAX_ADAPTERS": "3"})
    assert done.exit_code == 0, done.output
    [settings] = seen
    assert (settings.max_rank, settings.port, settings.max_adapters) == (8, 99, 3)
    assert settings.base_models == {"a": str(tmp_path), "b": "b"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "many"], ["port = 'many'", "command line"]),
        (["--sample-logprobs", "both"], ["sample_logprobs", "'tempered' or 'plain'"]),
        (["--config", "/does/not/exist"], ["/does/not/exist"]),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_2(arguments: list[str], words: list[str]) -> None:
    done = runner.invoke(cli.app, ["serve", *arguments])
    assert done.exit_code == 2
    for word in words:
        assert word in done.output
    assert "Traceback" not in done.output


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = runner.invoke(cli.app, ["serve", "--port", str(port), "--data-dir", str(tmp_path / "d")])
    assert done.exit_code == 1
    assert done.output.strip() == (
        f"error: cannot listen on 127.0.0.1:{port}: the port is in use\n"
        "help: stop what uses it, or choose another with --port"
    )
    assert not (tmp_path / "d").exists()


def test_openapi_and_version(tmp_path: Path) -> None:
    done = runner.invoke(cli.app, ["openapi", "--output", str(tmp_path / "o.yaml")])
    assert done.exit_code == 0, done.output
    written: dict[str, Any] = yaml.safe_load((tmp_path / "o.yaml").read_text())
    version = runner.invoke(cli.app, ["version"]).output.strip()
    assert written["info"]["version"] == version


def test_the_demo_says_what_is_missing(tmp_path: Path) -> None:
    done = runner.invoke(cli.app, ["demo", "--data-dir", str(tmp_path)])
    assert done.exit_code == 4
    assert "dev_key" in done.output
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    done = runner.invoke(cli.app, ["demo", "--url", f"http://127.0.0.1:{port}", "--api-key", "tml-x"])
    assert done.exit_code == 3
    assert "tinsmith serve" in done.output
