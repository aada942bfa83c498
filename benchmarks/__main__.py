"""`make bench`: measurements on this machine, each a table and JSON.

python -m benchmarks                     heartbeats while large bodies arrive
python -m benchmarks training --help     training against transformers + peft
python -m benchmarks sampling --help     sampling against generate of transformers, with peft for adapters
python -m benchmarks soak                what a server keeps that works for 20 minutes: descriptors, memory, disk, rows
python -m benchmarks scale               the control plane with up to 1,000 training runs and 10,000 waiting futures
python -m benchmarks ray                 what Ray costs: start, latency and memory on worker processes and on a cluster
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from app.settings import DEFAULT_BASE_MODEL
from benchmarks import heartbeats, ray, soak
from benchmarks.sampling import cases as sampling_cases
from benchmarks.sampling import command as sampling_command
from benchmarks.scale import command as scale
from benchmarks.training import cases, command
from tests.support.server import serve


def main() -> None:
    """Choose the measurement; heartbeats if none is named."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_subparsers(dest="measurement")
    chosen.add_parser("heartbeats", help="latency of heartbeats while large bodies arrive")
    cases.arguments(chosen.add_parser("training", help="training against transformers + peft"))
    sampling_cases.arguments(chosen.add_parser("sampling", help="sampling against generate of transformers"))
    soak.arguments(chosen.add_parser("soak", help="descriptors, threads, memory, disk and rows over 20 minutes"))
    scale.arguments(chosen.add_parser("scale", help="the control plane with up to 1,000 training runs"))
    ray.arguments(chosen.add_parser("ray", help="start, latency and memory on worker processes and on Ray"))
    given = parser.parse_args()
    if given.measurement == "training":
        command.run(given)
    elif given.measurement == "sampling":
        sampling_command.run(given)
    elif given.measurement == "soak":
        sys.exit(any(not figure.flat for figure in soak.run(given)))
    elif given.measurement == "scale":
        scale.run(given)
    elif given.measurement == "ray":
        ray.run(given)
    else:
        measure_heartbeats()


def measure_heartbeats() -> None:
    """On a server of its own with a temporary data folder."""
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "data", ["--log-level", "warning"]) as server:
        sys.stdout.write(
            heartbeats.table(heartbeats.run(f"{server.url}/api/v1", server.key, DEFAULT_BASE_MODEL)) + "\n"
        )


if __name__ == "__main__":
    main()
