"""docs/http.md is executable: its shell blocks run in order, in one shell, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.support.server import RunningServer

PAGE = Path(__file__).parents[2] / "docs" / "http.md"


def test_every_block_of_the_page_runs(real_server: RunningServer) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 8
    # After each block a marker, so that a failure tells which block it was.
    script = "set -euo pipefail\n" + "".join(f"{block}\necho '--- block {i} done'\n" for i, block in enumerate(blocks))
    locale = {"LC_ALL": "C.UTF-8"}  # of one that is not installed, some programs complain
    environment = {**os.environ, **locale, "TINSMITH_URL": real_server.url, "TINSMITH_KEY": real_server.key}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"--- block {len(blocks) - 1} done" in done.stdout
    assert done.stderr == "", "a reader's terminal shows only what the page is about"
    assert '"logprobs"' in done.stdout
    assert '"grad_norm"' in done.stdout
    assert "tokens/s:" in done.stdout
    assert '"field":"model_id"' in done.stdout.replace(" ", "")
