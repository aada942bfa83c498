"""The notebooks, made of the scripts and run: `make notebooks`, with TINKER_BASE_URL and TINKER_API_KEY of a server.

    python -m examples.notebooks [NAME ...] [--no-run]

A script in jupytext's percent format is the source; its notebook holds the same cells and what they printed and drew.
Needs examples/requirements.txt. Tests compare scripts and notebooks, and run both.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = ("sft", "dpo", "rl", "custom_loss", "distill", "sweep", "plain_http")
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def make(name: str, *, run: bool, seconds: int, folder: Path = FOLDER) -> Path:
    """Write the notebook of a script, executed if asked; a cell that fails raises, and the old notebook stays."""
    import jupytext
    import nbformat
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor, ExecutePreprocessor

    notebook = jupytext.read(FOLDER / f"{name}.py", fmt="py:percent")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"{name}-{number}"  # not a new random one each time
        cell.metadata = {}
    if run:
        ExecutePreprocessor(timeout=seconds, kernel_name="python3").preprocess(
            notebook, {"metadata": {"path": str(FOLDER)}}
        )
        for cell in notebook.cells:
            cell.metadata = {}
            if cell.cell_type == "code":
                # Warnings of libraries are of the machine on which it ran.
                cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
        notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook, _ = CoalesceStreamsPreprocessor().preprocess(notebook, {})
    target = folder / f"{name}.ipynb"
    nbformat.write(notebook, target)
    return target


def main() -> None:
    """Make those that are named, or all."""
    parser = argparse.ArgumentParser(description="Make the notebooks of the examples, and run them.")
    parser.add_argument("names", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--no-run", action="store_true", help="without outputs")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to write them (default: beside the scripts)")
    parser.add_argument("--seconds", type=int, default=1200, help="for one cell (default: %(default)s)")
    chosen = parser.parse_args()
    for name in chosen.names:
        if name not in NAMES:
            parser.error(f"{name} is none of {', '.join(NAMES)}")
        sys.stdout.write(f"{make(name, run=not chosen.no_run, seconds=chosen.seconds, folder=chosen.folder)}\n")


if __name__ == "__main__":
    main()
