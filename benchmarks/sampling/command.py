"""`python -m benchmarks sampling`: the sides of a case take turns, so that what disturbs the machine disturbs all."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from app.settings import Settings
from benchmarks.sampling.cases import Row, SampleCase, build, same_tokens
from benchmarks.training.host import hosts, settings_for
from benchmarks.training.measure import UnequalWork, tell
from benchmarks.training.work import Took
from engines.base_models import DEFAULT_MODEL, prepare

LEAST_EQUAL = {"float32": 0.9, "bfloat16": 0.0}
"""Greedy sequences that must be the same to the last token. Where two tokens are all but equally likely, sums in
another order decide; in bfloat16 that is too often to be held."""


@dataclass(frozen=True, slots=True)
class Found:
    """All rounds of one row of a case."""

    row: Row
    took: Sequence[Took]
    equal: float | None
    """Share of greedy sequences equal to the baseline's."""
    profile: str = ""

    def median(self, what: str) -> float:
        """Of `wall` or `cpu` seconds."""
        return float(statistics.median(getattr(each, what) for each in self.took))

    def part(self, name: str) -> float | None:
        """Median of what the side says about itself."""
        values = [each.outcome.parts[name] for each in self.took if name in each.outcome.parts]
        return float(statistics.median(values)) if values else None

    def ratio(self, baseline: Found, what: str) -> float:
        """How many times as fast as the baseline: the median over rounds, each round compared with itself."""
        pairs = zip(baseline.took, self.took, strict=True)
        return float(statistics.median(getattr(theirs, what) / getattr(ours, what) for theirs, ours in pairs))


def run(given: argparse.Namespace) -> None:
    """All chosen cases. Raises `UnequalWork` or `SideFailed`; what was measured before is printed all the same."""
    data_dir = (given.data_dir or Settings.model_fields["data_dir"].default).expanduser()
    folder = given.model.resolve() if given.model else prepare(DEFAULT_MODEL, None, data_dir)
    environment = settings_for(given.threads)
    repeats = given.repeats or (1 if given.quick else 3)
    done: list[tuple[SampleCase, list[Found]]] = []
    try:
        for case in build(given, folder):
            done.append((case, measure(case, repeats, environment, profile=given.profile)))
    finally:
        about = machine(given, folder.name, environment)
        text = json.dumps({"machine": about, "cases": [as_json(case, found) for case, found in done]})
        if given.json:
            given.json.write_text(text + "\n")
        sys.stdout.write(tables(done, about) + ("\n" if given.json else f"\n\n{text}\n"))


def measure(case: SampleCase, repeats: int, environment: Mapping[str, str], *, profile: bool) -> list[Found]:
    """Run one case. Raises `UnequalWork` or `SideFailed`."""
    tell(f"{case.name}: {case.title}")
    took: dict[Row, list[Took]] = {row: [] for row in case.rows}
    profiles: dict[Row, str] = {}
    with hosts([row.spec for row in case.rows], environment) as processes:
        for number in range(repeats + 1):
            for row in case.rows:
                one = processes[row.spec].run(case.work)
                tell(f"  {'warm-up' if number == 0 else number} {row.label}: {one.wall:.1f} s, {one.cpu:.1f} s of CPU")
                took[row].append(one)
        for row in case.rows if profile else ():
            profiles[row] = processes[row.spec].run(replace(case.work, profile=True)).profile
    first = took[case.rows[0]][0].outcome.drawn
    found = []
    for row in case.rows:
        equal = same_tokens(first, took[row][0].outcome.drawn) if case.equal else None
        found.append(Found(row, took[row][1:], equal, profiles.get(row, "")))
        if equal is not None and equal < LEAST_EQUAL[row.spec.dtype]:
            raise UnequalWork(
                f"{case.name}: of {len(first)} greedy sequences of {row.label} only {equal:.0%} are those of "
                f"{case.rows[0].label}; {LEAST_EQUAL[row.spec.dtype]:.0%} must be"
            )
    return found


def machine(given: argparse.Namespace, model: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads_of_each_side": given.threads,
        "dtype": given.dtype,
        "rank": given.rank,
        "load_average": os.getloadavg(),
        "malloc": environment.get("GLIBC_TUNABLES", ""),
        "model": model,
        "packages": {name: version(name) for name in ("torch", "transformers", "peft")},
    }


def as_json(case: SampleCase, found: Sequence[Found]) -> dict[str, Any]:
    """Everything, with every single round."""
    return {
        "name": case.name,
        "title": case.title,
        "tokens": case.work.tokens,
        "rows": [
            {
                "label": each.row.label,
                "tokens_per_second": case.work.tokens / each.median("wall"),
                "tokens_per_cpu_second": case.work.tokens / each.median("cpu"),
                "times_as_fast": {what: each.ratio(found[0], what) for what in ("wall", "cpu")},
                "milliseconds": {name: each.part(name) for name in each.took[0].outcome.parts},
                "equal_greedy_sequences": each.equal,
                "rounds": [{"wall": one.wall, "cpu": one.cpu} for one in each.took],
            }
            for each in found
        ],
    }


def tables(done: Sequence[tuple[SampleCase, Sequence[Found]]], about: Mapping[str, Any]) -> str:
    """All cases for people."""
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    head = (
        f"{about['model']} in {about['dtype']}, {about['cores']} cores, {about['threads_of_each_side']} thread(s) for "
        f"each side, load {about['load_average'][0]:.1f}; {packages}\n"
        "tok/s: new tokens per second of wall clock and of CPU time; x: times as fast as the first row (CPU time, in "
        "brackets wall clock); milliseconds of wall clock to the first token and between two; equal: greedy sequences "
        "the same as the first row's"
    )
    return "\n\n".join([head, *(_table(case, found) for case, found in done)])


def _table(case: SampleCase, found: Sequence[Found]) -> str:
    names = ("first token p50", "first token p95", "between tokens p50", "between tokens p95")
    lines = [
        case.title,
        f"{'':<26}{'tok/s':>8}{'tok/CPU-s':>11}{'x':>15}{'first p50':>11}{'p95':>8}"
        f"{'between p50':>13}{'p95':>8}  equal",
    ]
    for each in found:
        ratio = f"{each.ratio(found[0], 'cpu'):.2f} ({each.ratio(found[0], 'wall'):.2f})"
        times = [each.part(name) for name in names]
        texts = ["" if value is None else f"{value:.0f}" for value in times]
        lines.append(
            f"{each.row.label:<26}{case.work.tokens / each.median('wall'):>8.1f}"
            f"{case.work.tokens / each.median('cpu'):>11.1f}{ratio:>15}"
            f"{texts[0]:>11}{texts[1]:>8}{texts[2]:>13}{texts[3]:>8}  "
            f"{'' if each.equal is None else f'{each.equal:.0%}'}"
        )
    return "\n".join([*lines, *(f"\n{each.row.label}\n{each.profile}" for each in found if each.profile)])
