"""Runs one program of the cookbook and reads what it logged.

Not responsible for what runs (`recipes.py`) or for how the results are shown (`report.py`).
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cookbook.recipes import KL, MODEL, Run

LIMIT = 900.0
"""Seconds after which a program is taken for hung, on a machine that has other work, too."""

SAME_MODEL = 1e-4
"""How far, in the mean over tokens, the logprobs of sampler and trainer may be apart at the first step in float32."""

TOLERANCE = 1e-3
"""By how much the loss of a repeated step may differ. On one machine's CPU it does not differ at all."""

DOWNLOAD = (
    "import sys; from tinker_cookbook import weights; weights.download(tinker_path=sys.argv[1], output_dir='adapter')"
)


class Failed(Exception):
    """A program of the cookbook did not do what it should; the message has the end of its output."""


@dataclass(frozen=True)
class Place:
    """Where the programs run: their interpreter, their folder, and the variables that lead them to the server."""

    python: Path
    folder: Path
    variables: Mapping[str, str]

    def environment(self) -> dict[str, str]:
        """Variables of a child: nothing of the user's own accounts, no hub, the library's threads kept few."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINSMITH_", "HF_", "WANDB_"))}
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(self.folder / "huggingface")}
        logs = {"TINKER_COOKBOOK_RUNS_DIR": str(self.folder / "logs")}
        return {**kept, **offline, **logs, "OMP_NUM_THREADS": "1", **self.variables}


@dataclass(frozen=True)
class Outcome:
    """What one program did: its label and module, the metric at each step, the steps, the seconds.

    `apart` is the cookbook's own measure of how far sampler and trainer are apart at the first step: the mean over the
    sampled tokens of the difference of their logprobs. None if the program does not log it.
    """

    label: str
    module: str
    metric: str
    steps: list[int]
    values: list[float]
    seconds: float
    apart: float | None = None


def logged(log: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, in the order written."""
    file = log / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []


def rows(log: Path, metric: str) -> list[tuple[int, float]]:
    """(step, value) of every line of metrics.jsonl that has the metric."""
    return [(int(row["step"]), float(row[metric])) for row in logged(log) if metric in row]


def last_checkpoint(log: Path, key: str) -> str:
    """The `tinker://` path of the last checkpoint that a log folder records under `key`; `Failed` without one."""
    file = log / "checkpoints.jsonl"
    records = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    found = [record[key] for record in records if key in record]
    if not found:
        raise Failed(f"there is no {key} of {log.name}, which must run before")
    return str(found[-1])


def repeated(killed: Outcome, resumed: Outcome) -> list[tuple[int, float, float]]:
    """(step, value before the kill, value after) of the steps that both runs logged.

    Raises `Failed` if there is none, or if the values differ by more than `TOLERANCE`: then the checkpoint was not
    restored exactly.
    """
    before = dict(zip(killed.steps, killed.values, strict=True))
    after = dict(zip(resumed.steps, resumed.values, strict=True))
    both = [(step, before[step], after[step]) for step in sorted(before.keys() & after.keys())]
    if not both or any(abs(old - new) > TOLERANCE for _, old, new in both):
        raise Failed(f"{resumed.label}: the steps after the checkpoint are not as they were before: {both}")
    return both


def execute(run: Run, place: Place) -> Outcome:
    """Run one program to its end, or until it is to be killed.

    Raises `Failed` if it fails, logs nothing, or logs what cannot be: numbers that are not finite, a first number
    other than `begins`, a last one that should have fallen, a sampler that is another model than the trainer.
    """
    log = place.folder / "logs" / run.log
    before = len(rows(log, run.metric))
    options = {run.model_option: MODEL, run.log_option: log, **run.options}
    arguments = [f"{key}={_value(value, place)}" for key, value in options.items() if key is not None]
    command = ["-m", f"tinker_cookbook.{run.module}", *arguments]
    begin = time.monotonic()
    output = place.folder / "output" / f"{run.log.replace('/', '-')}.{before}.txt"
    output.parent.mkdir(exist_ok=True)
    _child(command, place, output, log, run)
    seconds = time.monotonic() - begin
    if run.prints is not None:
        values = [float(found) for found in re.findall(run.prints, output.read_text("utf-8", "replace"))]
        new, apart = list(enumerate(values)), None
    else:
        new = rows(log, run.metric)[before:]  # a program that resumes appends
        apart = next(iter(value for _, value in rows(log, KL)[before:]), None)
        if not any(run.proof in row for row in logged(log)):
            raise Failed(f"{run.label}: no optimizer step was logged\n{_end(output)}")
    if not new:
        raise Failed(f"{run.label}: there is no {run.metric}\n{_end(output)}")
    outcome = Outcome(run.label, run.module, run.metric, [s for s, _ in new], [v for _, v in new], seconds, apart)
    _judge(run, outcome)
    return outcome


def _judge(run: Run, outcome: Outcome) -> None:
    first, last = outcome.values[0], outcome.values[-1]
    if not all(map(math.isfinite, outcome.values)):
        raise Failed(f"{run.label}: {run.metric} is not finite: {outcome.values}")
    if run.begins is not None and abs(first - run.begins[0]) > run.begins[1]:
        raise Failed(f"{run.label}: {run.metric} begins at {first}, which is not {run.begins[0]}")
    if run.falls and not last < first:
        raise Failed(f"{run.label}: {run.metric} does not fall: {outcome.values}")
    if outcome.apart is not None and not abs(outcome.apart) < SAME_MODEL:
        raise Failed(f"{run.label}: sampler and trainer are {outcome.apart} apart at the first step")


def download(path: str, place: Place) -> tuple[float, list[str]]:
    """`weights.download` of a training checkpoint, which exports it encrypted and decrypts it here; seconds, files."""
    begin = time.monotonic()
    output = place.folder / "output" / "download.txt"
    with output.open("wb") as sink:
        command = [str(place.python), "-c", DOWNLOAD, path]
        child = subprocess.run(
            command, cwd=place.folder, env=place.environment(), stdout=sink, stderr=sink, timeout=LIMIT, check=False
        )
    if child.returncode:
        raise Failed(f"weights.download ended with {child.returncode}\n{_end(output)}")
    return time.monotonic() - begin, sorted(file.name for file in (place.folder / "adapter").iterdir())


def _value(value: object, place: Place) -> object:
    if isinstance(value, str) and value.startswith("sampler:"):
        return last_checkpoint(place.folder / "logs" / value.removeprefix("sampler:"), "sampler_path")
    return value


def _child(command: list[str], place: Place, output: Path, log: Path, run: Run) -> None:
    deadline = time.monotonic() + LIMIT
    with output.open("wb") as sink:
        child = subprocess.Popen(
            [place.python, *command],
            cwd=place.folder,
            env=place.environment(),
            stdin=subprocess.PIPE,
            stdout=sink,
            stderr=sink,
        )
        try:
            if child.stdin is not None:
                child.stdin.write((run.typed or "").encode())
                child.stdin.close()
            while child.poll() is None and time.monotonic() < deadline:
                if run.kill_at is not None and any(step >= run.kill_at for step, _ in rows(log, run.metric)):
                    return
                time.sleep(0.2)
            if child.poll() is None:
                raise Failed(f"{run.label}: still running after {LIMIT:.0f} s\n{_end(output)}")
        finally:
            child.kill()
            child.wait()
    if child.returncode or run.kill_at is not None:
        raise Failed(f"{run.label}: ended with {child.returncode}\n{_end(output)}")


def _end(output: Path) -> str:
    return output.read_text("utf-8", "replace")[-3000:]
