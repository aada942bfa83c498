"""The README's commands are the commands of the project: each is run here as it is written, with a free port."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.peft_adapter import assert_loads_in_peft
from tests.support.server import RunningServer, environment
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"```bash\n(.*?)\n```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def outside_of_make(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without what `make test ARGS=...` hands down: another make would take it for its own."""
    handed_down = {"ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"}
    return {name: text for name, text in variables.items() if name not in handed_down}


def test_the_readme_has_two_commands_to_run_and_one_to_test() -> None:
    assert COMMANDS == ["make serve", "make demo", "make test"]


def test_make_help_lists_what_can_be_made() -> None:
    told = subprocess.check_output(["make", "--no-print-directory", "help"], cwd=ROOT, env=outside_of_make(), text=True)
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in told.splitlines()}
    assert listed["serve"] == "start the server on 127.0.0.1 with the default model"
    assert {"setup", "demo", "test", "site", "docs"} <= listed.keys()


def test_make_serve_says_where_the_server_is(real_server: RunningServer) -> None:
    assert real_server.key in ready_line(real_server.log)


def test_make_serve_needs_no_argument(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    settings = {"DATA_DIR": str(tmp_path / "data"), "BASE_MODEL": json.dumps([f"acme/tiny={model}"]), "PORT": "0"}
    variables = {**outside_of_make(), **{f"TINSMITH_{name}": value for name, value in settings.items()}}
    asked = ["make", "-n", "--no-print-directory", "-o", ".venv/.ready", "serve"]
    line = subprocess.check_output(asked, cwd=ROOT, env=variables, text=True)
    command = shlex.split(line.removeprefix("exec"))
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert any(line.startswith("ready ") for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err


@pytest.mark.exhaustive
def test_make_demo_trains_and_exports(tmp_path: Path, real_server: RunningServer) -> None:
    """Three steps; `test_quickstart.py` takes all twenty."""
    output = tmp_path / "adapter"
    arguments = f"--url {real_server.url} --data-dir {real_server.data_dir} --steps 3 --output {output}"
    demo = subprocess.run(
        ["make", "--no-print-directory", "-o", ".venv/.ready", "demo", f"ARGS={arguments}"],
        cwd=ROOT,
        env=outside_of_make(environment()),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    first, last = re.findall(r"loss per token: ([0-9.]+) -> ([0-9.]+)", demo.stdout)[0]
    assert float(last) < float(first)
    assert_loads_in_peft(output, real_server)


def test_the_python_example_runs(real_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)\n```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    for documented, here in {
        "http://127.0.0.1:8410": real_server.url,
        "~/.local/share/tinsmith": str(real_server.data_dir),
    }.items():
        assert documented in example
        example = example.replace(documented, here)
    exec(compile(example, "README.md", "exec"), {})
    losses = [float(line) for line in capsys.readouterr().out.split()]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


def ready_line(log: Path, seconds: float = 20) -> str:
    """The line that tells a person where the server is; it comes a moment after `readyz` says so."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        lines = [line for line in log.read_text().splitlines() if line.startswith("ready ")]
        if lines:
            return lines[0]
        time.sleep(0.2)
    raise AssertionError(f"no ready line:\n{log.read_text()[-2000:]}")


def test_make_test_runs_the_suite() -> None:
    listed = subprocess.run(
        ["make", "--no-print-directory", "-o", ".venv/.ready", "test", "ARGS=--collect-only -q tests/schemas"],
        cwd=ROOT,
        env=outside_of_make(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr


def test_ci_calls_the_test_command() -> None:
    assert COMMANDS[-1] in (ROOT / ".ci" / "run").read_text()
