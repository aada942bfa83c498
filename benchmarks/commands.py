"""How long commands take to answer, each as a new process: what docs/cli.md says.

The best of many runs, since other work on the machine only ever adds.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from tests.support.server import TINSMITH, environment, serve
from tests.support.tiny_model import make_tiny_model

COMMANDS = (("--help",), ("runs", "--help"), ("runs", "list"))


def arguments(parser: ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("--runs", type=int, default=20, help="processes for each command")


def run(given: Namespace) -> None:
    """Measure and print, with a server on a tiny model for the command that asks one."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "tiny")
        options = ["--base-model", f"acme/tiny={model}", "--threads", "1", "--log-level", "warning"]
        with serve(Path(folder) / "data", options) as server:
            variables = environment({"TINSMITH_URL": server.url, "TINSMITH_KEY": server.key})
            say("python -c pass", best([sys.executable, "-c", "pass"], variables, given.runs))
            for command in COMMANDS:
                say(f"tinsmith {' '.join(command)}", best([str(TINSMITH), *command], variables, given.runs))


def best(command: Sequence[str], variables: dict[str, str], runs: int) -> float:
    """Milliseconds of the fastest run."""
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run(command, env=variables, check=True, capture_output=True)
        times.append(time.perf_counter() - began)
    return min(times) * 1000


def say(name: str, milliseconds: float) -> None:
    """A line of the result."""
    sys.stdout.write(f"{name:<24} {milliseconds:6.0f} ms\n")
