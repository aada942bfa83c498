"""The server that is measured: everything real but the engine, which is scripted (`tests/support/toy_worker.py`).

Run as `python -m benchmarks.scale.server DATA_DIR PORT RUNS`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fastapi import FastAPI

from app import serve
from app.main import create_app
from app.settings import Settings
from workers.group import WorkerGroup
from workers.local import LocalWorkerGroup
from workers.spec import WorkerSpec

MODEL = "bench/scripted"
BUILDER = "tests.support.toy_worker:build"


def main(data_dir: Path, port: int, runs: int) -> int:
    """Serve until a signal."""

    def groups(name: str, source: str | None) -> WorkerGroup:
        return LocalWorkerGroup(WorkerSpec(name, source, str(data_dir), threads=1, builder=BUILDER))

    def make_app(settings: Settings) -> FastAPI:
        return create_app(settings, group_factory=groups)

    settings = Settings(
        data_dir=data_dir, port=port, base_model=(MODEL,), max_adapters=max(64, runs), log_level="warning"
    )
    return serve.run(settings, make_app)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
