"""`make bench`: start a server on a temporary data folder, run the measurements, print a table and JSON."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from app.settings import DEFAULT_BASE_MODEL
from benchmarks import heartbeats
from tests.support.server import serve


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder) / "data", ["--log-level", "warning"]) as server:
        sys.stdout.write(
            heartbeats.table(heartbeats.run(f"{server.url}/api/v1", server.key, DEFAULT_BASE_MODEL)) + "\n"
        )


if __name__ == "__main__":
    main()
