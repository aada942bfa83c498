"""Every notebook runs on a server with a tiny model, and shows what its script draws."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from examples.notebooks import NAMES
from tests.support.server import RunningServer

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".site" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON.exists(), reason="no environment for notebooks (make site)")
def test_they_run_from_the_first_cell_to_the_last(tiny_server: RunningServer, tmp_path: Path) -> None:
    server = {"TINKER_BASE_URL": tiny_server.url, "TINKER_API_KEY": tiny_server.key, "TINKER_MODEL": "acme/tiny"}
    environment = {**os.environ, **server, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, "-m", "examples.notebooks", "--folder", tmp_path, "--seconds", "240"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for name in NAMES:
        cells = [
            cell
            for cell in json.loads((tmp_path / f"{name}.ipynb").read_text())["cells"]
            if cell["cell_type"] == "code"
        ]
        assert cells, name
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), name
        drawn = any("image/png" in each.get("data", {}) for cell in cells for each in cell["outputs"])
        assert drawn == ("plot" in (ROOT / "examples" / f"{name}.py").read_text()), name
