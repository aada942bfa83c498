"""`make cookbook`: a server with the default model, the cookbook's programs, and a table in docs/cookbook.md."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from app.tokenizers import install
from benchmarks.cookbook import data, environment, report
from benchmarks.cookbook.execute import Failed, Outcome, Place, download, execute, last_checkpoint
from benchmarks.cookbook.recipes import MODEL, Run, runs
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


def run_all(chosen: Sequence[Run], here: Place) -> tuple[list[Outcome], list[Failed]]:
    """Run one after the other, each whatever became of the others, and say what each did as it ends."""
    outcomes: list[Outcome] = []
    failures: list[Failed] = []
    for run in chosen:
        try:
            outcomes.append(execute(run, here))
            sys.stdout.write(report.line(outcomes[-1]) + "\n")
        except Failed as failure:
            failures.append(failure)
            sys.stdout.write(f"{run.label:<44}failed\n")
        sys.stdout.flush()
    return outcomes, failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cookbook", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="LOG", help="run only these (sl-loop, rl, ...); writes no page")
    options = parser.parse_args()
    python = environment.ensure(COMPAT / "cookbook")
    base_model = prepare(DEFAULT_MODEL, None, COMPAT / "data")
    chosen = [run for run in runs() if options.only is None or run.log in options.only]
    with tempfile.TemporaryDirectory(prefix="cookbook-") as folder, place(python, base_model, Path(folder)) as here:
        outcomes, failures = run_all(chosen, here)
        if options.only is None and not failures:
            try:
                fetched = download(last_checkpoint(here.folder / "logs" / chosen[0].log, "state_path"), here)
                (ROOT / "docs" / "cookbook.md").write_text(report.page(outcomes, fetched), "utf-8")
                sys.stdout.write(report.download_line(*fetched) + "\n")
            except Failed as failure:
                failures.append(failure)
    sys.stderr.writelines(f"{failure}\n" for failure in failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
