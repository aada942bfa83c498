"""`make bench`: measurements on this machine, each a table and JSON. Heartbeats, if none is named."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.settings import DEFAULT_BASE_MODEL
from benchmarks import attacks, commands, fairness, fuzz, heartbeats, limits, ray, soak
from benchmarks.sampling import cases as sampling_cases
from benchmarks.sampling import command as sampling
from benchmarks.scale import command as scale
from benchmarks.training import cases as training_cases
from benchmarks.training import command as training
from tests.support.server import serve


@dataclass(frozen=True, slots=True)
class Measurement:
    """One of them. `run` returns True, or nothing, if what was measured is as it should be."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Any]


def measure_heartbeats(_given: argparse.Namespace) -> None:
    """On a server of its own with a temporary data folder."""
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "data", ["--log-level", "warning"]) as server:
        sys.stdout.write(
            heartbeats.table(heartbeats.run(f"{server.url}/api/v1", server.key, DEFAULT_BASE_MODEL)) + "\n"
        )


def stays_flat(given: argparse.Namespace) -> bool:
    """Whether nothing grew."""
    return all(figure.flat for figure in soak.run(given))


MEASUREMENTS = {
    "heartbeats": Measurement("heartbeats while large bodies arrive", lambda _: None, measure_heartbeats),
    "training": Measurement("training against transformers + peft", training_cases.arguments, training.run),
    "sampling": Measurement(
        "sampling against generate of transformers, with peft for adapters", sampling_cases.arguments, sampling.run
    ),
    "soak": Measurement(
        "what a server keeps that works for 20 minutes: descriptors, memory, disk, rows", soak.arguments, stays_flat
    ),
    "scale": Measurement(
        "the control plane with up to 1,000 training runs and 10,000 waiting futures", scale.arguments, scale.run
    ),
    "fairness": Measurement(
        "what flooding neighbours leave to a modest project: shares of tokens, latency",
        fairness.arguments,
        fairness.run,
    ),
    "limits": Measurement("what limits cost where operations are accepted", limits.arguments, limits.run),
    "commands": Measurement("how long commands take to answer", commands.arguments, commands.run),
    "attacks": Measurement(
        "hostile requests of every kind against a server that trains for somebody else", attacks.arguments, attacks.run
    ),
    "fuzz": Measurement("wild bodies for the decoders", fuzz.arguments, fuzz.run),
    "ray": Measurement(
        "what Ray costs: start, latency and memory on worker processes and on a cluster", ray.arguments, ray.run
    ),
}


def main() -> None:
    """Ends with 1 if a measurement says that something is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    chosen = parser.add_subparsers(dest="measurement", metavar="MEASUREMENT")
    for name, each in MEASUREMENTS.items():
        each.arguments(chosen.add_parser(name, help=each.help))
    given = parser.parse_args()
    if MEASUREMENTS[given.measurement or "heartbeats"].run(given) is False:
        sys.exit(1)


if __name__ == "__main__":
    main()
