"""The types that openapi-typescript makes of openapi.yaml, used through openapi-fetch. Needs node 20 or newer."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.clients.process import DESCRIPTION, is_installed, run

FOLDER = Path(__file__).with_name("typescript")
PROGRAMS = FOLDER / "node_modules/.bin"


def build() -> None:
    """Install, generate, and compile strictly. Raises ValueError."""
    wanted, stamp = FOLDER / "package-lock.json", FOLDER / "node_modules/installed.json"
    if not is_installed(stamp, wanted):
        run(["npm", "ci", "--no-audit", "--no-fund"], folder=FOLDER)
        shutil.copy(wanted, stamp)
    # A field with a default need not be in a request; the generator takes it for one that must be.
    line: list[str | Path] = [PROGRAMS / "openapi-typescript", DESCRIPTION, "--default-non-nullable", "false"]
    run([*line, "--output", FOLDER / "schema.d.ts"], folder=FOLDER)
    run([PROGRAMS / "tsc", "--project", FOLDER], folder=FOLDER)


def train(url: str, key: str, model: str) -> str:
    """What the training step printed. Raises ValueError."""
    return run(["node", FOLDER / "build/training_step.js", url, key, model], folder=FOLDER).stdout
