"""`make cookbook`: a server with the default model, the cookbook's programs, and a table in docs/cookbook.md."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.tokenizers import install
from benchmarks import environment
from benchmarks.cookbook import data, report
from benchmarks.cookbook.execute import Failed, Outcome, Place, download, execute, last_checkpoint
from benchmarks.cookbook.recipes import MODEL, THINKING, Run, runs
from engines.base_models import DEFAULT_MODEL, prepare
from tests.support.server import serve

ROOT = Path(__file__).resolve().parents[2]
COMPAT = ROOT / ".compat"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
EARLIER = COMPAT / "cookbook-outcomes.json"


@contextmanager
def place(python: Path, base_model: Path, folder: Path) -> Iterator[Place]:
    """A server with the model under two names, and a folder with data and tokenizers for the programs."""
    package = next((python.parents[1] / "lib").glob("python*/site-packages/tinker_cookbook"))
    conversations = package / "example_data" / "conversations.jsonl"
    data.prepare(folder, conversations)
    shutil.copy(conversations, folder)
    models = {MODEL: base_model, THINKING: data.thinking_model(base_model, folder / "thinking")}
    for name, source in models.items():
        install(name, source, folder / "huggingface" / "hub")
    names = [f"--base-model={name}={source}" for name, source in models.items()]
    with serve(folder / "server" / "data", [*names, "--log-level", "warning"], ready_within=600) as server:
        yield Place(python, folder, {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key})


def run_all(chosen: Sequence[Run], here: Place) -> tuple[list[Outcome], list[Failed]]:
    """Run one after the other, each whatever became of the others, and say what each did as it ends."""
    outcomes: list[Outcome] = []
    failures: list[Failed] = []
    for run in chosen:
        try:
            outcomes.append(execute(run, here))
            sys.stdout.write(report.line(outcomes[-1]) + "\n")
            keep(outcomes[-1])
        except Failed as failure:
            failures.append(failure)
            sys.stdout.write(f"{run.label:<56}failed\n")
        sys.stdout.flush()
    return outcomes, failures


def keep(outcome: Outcome) -> None:
    """Remember a row for the page."""
    EARLIER.write_text(json.dumps({**earlier(), outcome.label: asdict(outcome)}, indent=1), "utf-8")


def earlier() -> dict[str, dict[str, Any]]:
    """The rows of runs in this checkout, by label."""
    return dict(json.loads(EARLIER.read_text("utf-8"))) if EARLIER.exists() else {}


def write_page(fetched: tuple[float, list[str]]) -> None:
    """Write docs/cookbook.md with every row there is, if the run that is killed and its sequel are among them."""
    rows = earlier()
    done = [Outcome(**rows[run.label]) for run in runs() if run.label in rows]
    if all(run.label in rows for run in runs()[:2]):
        missing = [run.label for run in runs() if run.label not in rows]
        (ROOT / "docs" / "cookbook.md").write_text(report.page(done, fetched, missing), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cookbook", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="LOG", help="run these (sl-loop, rl, ...); the page keeps the rows of the others"
    )
    options = parser.parse_args()
    python = environment.ensure(COMPAT / "cookbook", REQUIREMENTS)
    base_model = prepare(DEFAULT_MODEL, None, COMPAT / "data")
    chosen = [run for run in runs() if options.only is None or run.log in options.only]
    if options.only is None:
        EARLIER.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="cookbook-") as folder, place(python, base_model, Path(folder)) as here:
        _, failures = run_all(chosen, here)
        trained = [run.log for run in chosen if (here.folder / "logs" / run.log / "checkpoints.jsonl").exists()]
        if trained and not failures:
            try:
                fetched = download(last_checkpoint(here.folder / "logs" / trained[0], "state_path"), here)
                write_page(fetched)
                sys.stdout.write(report.download_line(*fetched) + "\n")
            except Failed as failure:
                failures.append(failure)
    sys.stderr.writelines(f"{failure}\n" for failure in failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
