"""The client that openapi-python-client makes of openapi.yaml, in an environment of its own."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from tests.clients.process import DESCRIPTION, ROOT, is_installed, run

SOURCES = Path(__file__).with_name("python")
FOLDER = ROOT / ".compat/openapi-python"
PACKAGE = FOLDER / "tinsmith_client"
PYTHON = FOLDER / "bin/python"

WARNINGS = {"POST /api/v1/forward_backward": "Unsupported content type application/x-protobuf"}
"""What the generator says that it leaves out: it knows no protobuf, and makes the JSON form of that request alone."""


def build() -> None:
    """Install, generate, and check the types, also those that the training step uses. Raises ValueError."""
    wanted, stamp = SOURCES / "requirements.txt", FOLDER / "installed.txt"
    if not is_installed(stamp, wanted):
        run([sys.executable, "-m", "venv", "--clear", FOLDER])
        run([PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement", wanted])
        shutil.copy(wanted, stamp)
    line: list[str | Path] = [
        "generate",
        "--path",
        DESCRIPTION,
        "--config",
        SOURCES / "config.yaml",
        "--meta",
        "none",
        "--overwrite",
    ]
    said = run([FOLDER / "bin/openapi-python-client", *line, "--output-path", PACKAGE]).stderr
    warned = dict(re.findall(r"^(?:WARNING|ERROR) parsing (.+?) within .+?\.\n+(.+)$", said, re.MULTILINE))
    if warned != WARNINGS or len(re.findall(r"^(?:WARNING|ERROR)", said, re.MULTILINE)) != len(WARNINGS):
        raise ValueError(f"the generator left something out:\n{said}")
    run([PYTHON, "-W", "error", "-m", "compileall", "-q", "-f", PACKAGE])
    checker: list[str | Path] = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        SOURCES / "mypy.ini",
        "--cache-dir",
        FOLDER / "mypy",
    ]
    files = [PACKAGE, SOURCES / "training_step.py"]
    run([*checker, "--python-executable", PYTHON, *files], extra={"MYPYPATH": str(FOLDER)})


def train(url: str, key: str, model: str) -> str:
    """What the training step printed. Raises ValueError."""
    return run([PYTHON, SOURCES / "training_step.py", url, key, model], extra={"PYTHONPATH": str(FOLDER)}).stdout
