"""What both clients need: a command run to its end, and a look at what the training step reported."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.server import environment

ROOT = Path(__file__).parents[2]
DESCRIPTION = ROOT / "openapi.yaml"
SECONDS = 300


def run(
    line: Sequence[str | Path], *, folder: Path = ROOT, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command; what it printed. Raises ValueError, with all that it said, unless it succeeded in time."""
    command = [str(word) for word in line]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment(extra), capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except FileNotFoundError:
        raise ValueError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"{' '.join(command)} took more than {SECONDS} s") from None
    if done.returncode != 0:
        raise ValueError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done


def check(printed: str) -> Mapping[str, Any]:
    """The report of a training step. Raises ValueError if a number in it cannot be right."""
    report: dict[str, Any] = json.loads(printed)
    logprobs = report["logprobs"]
    right = {
        "refused": report["refused"] == "loss_fn",
        "loss": math.isclose(report["loss"], -sum(logprobs), rel_tol=1e-5) and report["loss"] > 0,
        "logprobs": len(logprobs) == 5,
        "grad_norm": report["grad_norm"] > 0,
        "tokens": len(report["tokens"]) == 6,
    }
    if not all(right.values()):
        raise ValueError(f"wrong: {', '.join(name for name, is_right in right.items() if not is_right)} of {report}")
    return report


def is_installed(stamp: Path, wanted: Path) -> bool:
    """Whether `stamp` was left by an installation of what `wanted` lists now."""
    return stamp.is_file() and stamp.read_bytes() == wanted.read_bytes()
