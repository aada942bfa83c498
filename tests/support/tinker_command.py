"""Running the official `tinker` command as a subprocess."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TINKER = Path(sys.executable).with_name("tinker")
CRASHES = 2
"""How often the command may die by a signal before that counts. Rarely (about one start in fifty) it ends without a
word, which no answer of a server can cause; everything that it says itself is a result at once."""


def run_tinker(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path, *, stdin: str = "", seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `tinker ARGUMENTS` in `folder`, with exactly this environment."""
    for _ in range(CRASHES + 1):
        done = subprocess.run(
            [TINKER, *arguments],
            env=dict(environment),
            cwd=folder,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode >= 0:
            break
    return done
