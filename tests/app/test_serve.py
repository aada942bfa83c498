"""The runner as a process: the ready line, the reason of a failed start, and signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
from app.main import create_app
from app.serve import run
from app.settings import Settings
from schemas.errors import InvalidRequest
from tests.app.conftest import idle_group
from tests.support.inline_group import InlineWorkerGroup

def broken(progress):
    raise InvalidRequest("the folder has no tokenizer", hint="add tokenizer.json")

groups = {"idle": idle_group, "broken": lambda name, source: InlineWorkerGroup(broken)}
settings = Settings(port=0, data_dir=Path(sys.argv[2]), base_model=["acme/tiny=/nowhere"], shutdown_grace=5)
sys.exit(run(settings, lambda s: create_app(s, group_factory=groups[sys.argv[1]])))
"""


def start(kind: str, data_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, kind, str(data_dir)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_ready_line_then_a_signal_ends_it_with_0(tmp_path: Path, number: signal.Signals) -> None:
    process = start("idle", tmp_path / "data")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        key = (tmp_path / "data" / "dev_key").read_text().strip()
        words = line.split()
        assert words[0] == "ready", line
        assert line.endswith(f"models: acme/tiny  key: {key}  (in {tmp_path / 'data' / 'dev_key'})\n")
        answer = httpx.get(f"{words[1]}/readyz")
        assert answer.status_code == 200
        assert "server" not in answer.headers
        assert httpx.get(f"{words[1]}/api/v1/sessions").status_code == 401
        second = start("idle", tmp_path / "data")
        out, err = second.communicate(timeout=60)
        assert (second.returncode, out) == (1, "")
        assert err.startswith("error: cannot start with data folder")
        assert err.splitlines()[1] == "help: stop that server, or give this one a data folder of its own"
        assert "Traceback" not in err
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "ready" not in out
    assert "stopping" in err
    assert "acme/tiny: memory: " in err, "what the base model needs is in the log"
    kept = (tmp_path / "data" / "server.log").read_text()
    assert "acme/tiny: memory: " in kept
    assert "GET /api/v1/sessions 401" in kept
    assert "GET /api/v1/sessions 401" not in err, "the terminal stays quiet"
    assert key not in kept


def test_a_model_that_cannot_load_ends_it_with_1_and_the_reason(tmp_path: Path) -> None:
    process = start("broken", tmp_path / "data")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ready" not in out
    told = "error: base model acme/tiny cannot be served: the folder has no tokenizer\nhelp: add tokenizer.json\n"
    assert told in err
    assert "Traceback" not in err
