"""Clients generated from openapi.yaml, in front of one real server: `python -m tests.clients`.

Each must be generated without leaving anything out, pass its type checker, and do one training step with the same
numbers as the other. Not responsible for whether openapi.yaml is current (`tests/app/test_openapi.py`).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.clients import python_client, typescript_client
from tests.clients.process import check
from tests.support.server import RunningServer, serve
from tests.support.tiny_model import make_tiny_model

MODEL = "acme/tiny"
CLIENTS: Mapping[str, tuple[Callable[[], None], Callable[[str, str, str], str]]] = {
    "python": (python_client.build, python_client.train),
    "typescript": (typescript_client.build, typescript_client.train),
}


def walk(server: RunningServer, name: str) -> Mapping[str, Any] | None:
    """Build one client and train with it; what it reported, or None (and why is printed) if it failed."""
    build, train = CLIENTS[name]
    begun = time.monotonic()
    try:
        build()
        built = time.monotonic()
        report = check(train(server.url, server.key, MODEL))
    except ValueError as error:
        sys.stdout.write(f"{name}: failed\n{error}\n")
        return None
    sys.stdout.write(f"{name}: built in {built - begun:.1f} s, one step in {time.monotonic() - built:.1f} s\n")
    return report


def main() -> int:
    """Build and run every client, and compare their numbers; 1 if anything failed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        tiny = make_tiny_model(Path(scratch) / "tiny")
        served = ["--base-model", f"{MODEL}={tiny}", "--threads", "1", "--shutdown-grace", "2"]
        with serve(Path(scratch) / "data", served) as server:
            reports = [walk(server, name) for name in CLIENTS]
    failed = reports.count(None)
    if not failed and any(report != reports[0] for report in reports):
        failed += 1
        sys.stdout.write(f"the numbers differ: {reports}\n")
    sys.stdout.write(f"{len(reports) - failed} passed, {failed} failed in {time.monotonic() - begun:.0f} s\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
