"""docs/openai.md is executable: its Python blocks, and its shell blocks in one shell, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.server import RunningServer

PAGE = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()


def test_the_python_examples_run(real_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"```python\n(.*?)\n```", PAGE, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        for documented, here in {
            "http://127.0.0.1:8410": real_server.url,
            "~/.local/share/tinsmith": str(real_server.data_dir),
        }.items():
            assert documented in example
            example = example.replace(documented, here)
        exec(compile(example, "openai.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Paris" in printed
    # Checkpoints that other pages left on this server stand behind it.
    assert printed.startswith("['HuggingFaceTB/SmolLM2-135M-Instruct'")
    assert printed.splitlines()[-1].isdigit() or re.search(r"\d+$", printed.strip())


def test_the_shell_examples_run(real_server: RunningServer) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    environment = {**os.environ, "TINSMITH_URL": real_server.url, "TINSMITH_KEY": real_server.key}
    script = "set -euo pipefail\n" + "\n".join(blocks)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"text":"Score this text."' in done.stdout
    assert '"stop_reason":"max_tokens"' in done.stdout
