"""`make cookbook`: a server with the default model, the cookbook's programs, and a table in docs/cookbook.md."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.tokenizers import install
from benchmarks.cookbook import data, environment, report
from benchmarks.cookbook.execute import Failed, Outcome, Place, download, execute, last_checkpoint
from benchmarks.cookbook.recipes import MODEL, runs
from engines.base_models import DEFAULT_MODEL, prepare
from tests.support.server import serve

ROOT = Path(__file__).resolve().parents[2]
COMPAT = ROOT / ".compat"


@contextmanager
def place(python: Path, base_model: Path, folder: Path) -> Iterator[Place]:
    """A server with the model under two names, and a folder with data and tokenizer for the programs."""
    package = next((python.parents[1] / "lib").glob("python*/site-packages/tinker_cookbook"))
    conversations = package / "example_data" / "conversations.jsonl"
    data.prepare(folder, conversations)
    shutil.copy(conversations, folder)
    install(MODEL, base_model, folder / "huggingface" / "hub")
    names = [f"--base-model={name}={base_model}" for name in (DEFAULT_MODEL, MODEL)]
    with serve(folder / "server" / "data", [*names, "--log-level", "warning"]) as server:
        yield Place(python, folder, {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cookbook", description=__doc__)
    parser.add_argument("--only", help="run only what has this in its log folder's name; writes no page")
    options = parser.parse_args()
    python = environment.ensure(COMPAT / "cookbook")
    base_model = prepare(DEFAULT_MODEL, None, COMPAT / "data")
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="cookbook-") as folder, place(python, base_model, Path(folder)) as here:
        try:
            for run in runs():
                if options.only is None or options.only in run.log:
                    outcomes.append(execute(run, here))
                    sys.stdout.write(report.line(outcomes[-1]) + "\n")
                    sys.stdout.flush()
            fetched = download(last_checkpoint(here.folder / "logs" / runs()[0].log, "state_path"), here)
        except Failed as failure:
            sys.stderr.write(f"{failure}\n")
            return 1
    sys.stdout.write(report.download_line(*fetched) + "\n")
    if options.only is None:
        (ROOT / "docs" / "cookbook.md").write_text(report.page(outcomes, fetched), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
