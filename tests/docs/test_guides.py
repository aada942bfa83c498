"""The code of the guides runs as it is written, block after block, on one server with a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import RunningServer

DOCS = Path(__file__).parents[2] / "docs"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def python_of(page: str, server: RunningServer) -> str:
    """All Python of a page as one program, aimed at the server."""
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)\n```", text, flags=re.DOTALL)
    program = "\n".join(blocks)
    for documented, here in {
        "http://127.0.0.1:8410": server.url,
        "~/.local/share/tinsmith": str(server.data_dir),
        MODEL: "acme/tiny",
    }.items():
        assert documented in program
        program = program.replace(documented, here)
    return program


@pytest.fixture
def run(
    tiny_server: RunningServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> object:
    """Runs a page in an empty folder; returns its names and what it printed."""
    for name in [name for name in os.environ if name.startswith("TINKER_")]:
        monkeypatch.delenv(name)
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):  # so that what a page sets ends with it
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def execute(page: str) -> tuple[dict[str, object], str]:
        names: dict[str, object] = {"__name__": page}
        exec(compile(python_of(page, tiny_server), page, "exec"), names)
        return names, capsys.readouterr().out

    return execute


def test_quickstart(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    names, printed = run("quickstart.md")
    assert names["losses"][-1] < names["losses"][0]
    assert names["path"].endswith("/weights/quickstart")
    assert names["weights"].endswith("/sampler_weights/quickstart")
    assert "acme/tiny 256" in printed
    assert "['adapter_config.json', 'adapter_model.safetensors']" in printed
    assert (tmp_path / "quickstart-adapter" / "adapter_model.safetensors").stat().st_size > 1000


def test_sdk(run) -> None:  # type: ignore[no-untyped-def]
    names, printed = run("sdk.md")
    assert names["first"].metrics["loss:sum"] == pytest.approx(-sum(names["first"].loss_fn_outputs[0]["logprobs"].data))
    assert "then: [" in printed
    assert "cross_entropi" in printed.split("refused:")[1]
    assert names["saved"] in printed
    assert names["scores"].metrics["loss:sum"] < names["first"].metrics["loss:sum"]


def test_rl(run) -> None:  # type: ignore[no-untyped-def]
    names, printed = run("rl.md")
    ratios = [float(each) for each in re.findall(r"'ratio:mean': ([\d.]+)", printed)]
    assert len(ratios) == 3
    assert ratios == pytest.approx([1.0] * 3, abs=1e-3)
    drifts = [float(each) for each in re.findall(r"'kl_sample_train:mean': (-?[\d.]+)", printed)]
    assert drifts == pytest.approx([0.0] * 3, abs=1e-3)
    assert 0 <= float(re.findall(r"clipped: ([\d.e-]+)", printed)[0]) <= 1
    assert all(0 <= each <= 1 for each in names["rewards"])


def test_lora(run) -> None:  # type: ignore[no-untyped-def]
    sizes = run("lora.md")[0]["sizes"]
    # Proportional to the rank, but for the files' heads.
    assert 1.5 < sizes[8] / sizes[4] < 2.1


def test_operations(tiny_server: RunningServer, tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / "operations.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TINSMITH_URL": tiny_server.url,
        "TINSMITH_DATA_DIR": str(tiny_server.data_dir),
        "BACKUPS": str(tmp_path / "backups"),
        "TINSMITH_PORT": "0",  # doctor asks whether it is free
    }
    script = "set -euo pipefail\n" + "\n".join(blocks)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"status":"ready"' in done.stdout.replace(" ", "")
    assert "ok database: whole" in done.stdout
    assert (tmp_path / "backups" / "monday" / "tinsmith.db").exists()
    assert "ok checkpoints: " in done.stdout
