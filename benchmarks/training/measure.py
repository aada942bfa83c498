"""Runs cases: the rows of a case take turns, so that what disturbs the machine disturbs all; medians count."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.training.cases import Case, Row
from benchmarks.training.host import hosts
from benchmarks.training.work import Dtype, SideSpec, Took

TOLERANCE: Mapping[Dtype, float] = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative difference of the summed loss, from equal adapters, up to which two sides did equal work."""


class UnequalWork(RuntimeError):
    """A side's loss is not that of the others: its times must not be compared."""


@dataclass(frozen=True, slots=True)
class Series:
    """All rounds of one row; `losses` are those of its process, step by step from the start of the adapters."""

    row: Row
    took: Sequence[Took]
    losses: Sequence[float]
    profile: str = ""

    def median(self, what: str) -> float:
        """Of `wall`, `cpu`, `rss_before` or `rss_peak`."""
        return float(statistics.median(getattr(each, what) for each in self.took))

    def parts(self) -> dict[str, float]:
        """Medians of what the side says about itself."""
        names = dict.fromkeys(name for each in self.took for name in each.outcome.parts)
        return {name: statistics.median(each.outcome.parts[name] for each in self.took) for name in names}

    def ratio(self, baseline: Series, what: str) -> float:
        """How many times as fast as the baseline: the median over rounds, each round compared with itself."""
        pairs = zip(baseline.took, self.took, strict=True)
        return float(statistics.median(getattr(theirs, what) / getattr(ours, what) for theirs, ours in pairs))


@dataclass(frozen=True, slots=True)
class Measured:
    """A case with its series in the order of its rows; `bounds` tells of each dtype's matrix products alone."""

    case: Case
    series: Sequence[Series]
    bounds: Mapping[Dtype, Series] = field(default_factory=dict)

    def difference(self, series: Series, step: int) -> float:
        """Of the summed loss at a step of its process (0: before any update) from that of the first row, relative."""
        first = self.series[0].losses[step]
        return abs(series.losses[step] - first) / abs(first)


def measure(case: Case, repeats: int, settings: Mapping[str, str], *, profile: bool) -> Measured:
    """Run one case. Raises `UnequalWork` or `SideFailed`."""
    tell(f"{case.name}: {case.title}")
    found = _alone(case, settings) if case.alone else _together(case, repeats, settings, profile=profile)
    check(found)
    return found


def check(found: Measured) -> None:
    """Raise `UnequalWork` if a loss differs from the first row's: before any update, and in float32 after one too.

    After an update bfloat16 is not held: peft there adds the adapter's part to a bfloat16 output, which rounds a young
    adapter away.
    """
    first = found.series[0]
    for series in found.series:
        rounded = "bfloat16" in (series.row.spec.dtype, first.row.spec.dtype)
        bound = TOLERANCE["bfloat16" if rounded else "float32"]
        for step in range(1 if rounded else min(2, len(series.losses))):
            off = found.difference(series, step)
            if not off <= bound:
                raise UnequalWork(
                    f"{found.case.name}, step {step}: the loss of {series.row.label} is {series.losses[step]:.6g}, "
                    f"that of {first.row.label} {first.losses[step]:.6g}: {off:.1e} apart, {bound:.0e} is allowed"
                )


def _together(case: Case, repeats: int, settings: Mapping[str, str], *, profile: bool) -> Measured:
    gemm = {row.spec.dtype: _gemm_of(row.spec) for row in case.rows}
    took: dict[Row, list[Took]] = {row: [] for row in case.rows}
    bounds: dict[Dtype, list[Took]] = {dtype: [] for dtype in gemm}
    losses: dict[SideSpec, list[float]] = {row.spec: [] for row in case.rows}
    profiles: dict[Row, str] = {}
    with hosts([*(row.spec for row in case.rows), *gemm.values()], settings) as processes:
        for number in range(repeats + 1):
            for row in case.rows:
                one = processes[row.spec].run(replace(case.work, layout=row.layout))
                losses[row.spec].append(sum(one.outcome.losses))
                tell(f"  {'warm-up' if number == 0 else number} {row.label}: {one.wall:.1f} s, {one.cpu:.1f} s of CPU")
                if number > 0:
                    took[row].append(one)
            for dtype, spec in gemm.items():
                if number > 0:
                    bounds[dtype].append(processes[spec].run(case.work))
        for row in case.rows if profile else ():
            profiles[row] = processes[row.spec].run(replace(case.work, layout=row.layout, profile=True)).profile
    return Measured(
        case,
        [Series(row, took[row], losses[row.spec], profiles.get(row, "")) for row in case.rows],
        {dtype: Series(Row("matrix products", gemm[dtype]), each, ()) for dtype, each in bounds.items()},
    )


def _alone(case: Case, settings: Mapping[str, str]) -> Measured:
    """One step of each row in a process that ends before the next begins: their memory would not fit beside it."""
    series = []
    for row in case.rows:
        with hosts([row.spec], settings) as processes:
            one = processes[row.spec].run(replace(case.work, layout=row.layout))
        tell(f"  {row.label}: {one.rss_peak / 2**30:.2f} GiB")
        series.append(Series(row, [one], [sum(one.outcome.losses)]))
    return Measured(case, series)


def _gemm_of(spec: SideSpec) -> SideSpec:
    return replace(spec, kind="gemm", clients=1, unembed=False, checkpointing=False)


def tell(line: str) -> None:
    """Progress goes to stderr; the result alone to stdout."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
