"""What was measured, as tables for people and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.training.cases import Options
from benchmarks.training.measure import Measured, Series

GIB = 2**30
PACKAGES = ("torch", "transformers", "peft", "tinker")


def as_json(found: Sequence[Measured], options: Options, settings: Mapping[str, str]) -> dict[str, Any]:
    """Everything, with every single round."""
    return {
        "machine": machine(options, settings),
        "options": {name: getattr(options, name) for name in options.__slots__ if name != "folder"},
        "cases": [_case(measured) for measured in found],
    }


def machine(options: Options, settings: Mapping[str, str]) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads_of_each_side": options.threads,
        "load_average": os.getloadavg(),
        "malloc": settings.get("GLIBC_TUNABLES", ""),
        "model": options.folder.name,
        "packages": {name: version(name) for name in PACKAGES},
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _case(measured: Measured) -> dict[str, Any]:
    case = measured.case
    return {
        "name": case.name,
        "title": case.title,
        "tokens": case.work.tokens,
        "rows": [_row(measured, series) for series in measured.series],
        "bounds": {
            dtype: {"tokens_per_cpu_second": 1 / series.parts()["cpu"], **series.parts()}
            for dtype, series in measured.bounds.items()
        },
    }


def _row(measured: Measured, series: Series) -> dict[str, Any]:
    tokens = measured.case.work.tokens
    return {
        "label": series.row.label,
        "tokens_per_second": tokens / series.median("wall"),
        "tokens_per_cpu_second": tokens / series.median("cpu"),
        "times_as_fast": {
            each.row.label: {what: series.ratio(each, what) for what in ("wall", "cpu")}
            for each in baselines(measured, series)
        },
        "share_of_bound": share(measured, series),
        "rss_before_bytes": series.median("rss_before"),
        "rss_peak_bytes": series.median("rss_peak"),
        "parts": series.parts(),
        "losses_by_step": list(series.losses),
        "rounds": [{"wall": each.wall, "cpu": each.cpu} for each in series.took],
    }


def baselines(measured: Measured, series: Series) -> list[Series]:
    """What a row is compared with: the other rows that are baselines."""
    return [each for each in measured.series if each.row.baseline and each is not series]


def share(measured: Measured, series: Series) -> float | None:
    """CPU time of the base model's matrix products alone, of the CPU time of this row. None where not measured."""
    bound = measured.bounds.get(series.row.spec.dtype)
    if bound is None:
        return None
    return bound.parts()["cpu"] * measured.case.work.tokens / series.median("cpu")


def tables(found: Sequence[Measured], options: Options, settings: Mapping[str, str]) -> str:
    """All cases for people."""
    about = machine(options, settings)
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    head = (
        f"{about['model']} on {about['cpu']}, {about['cores']} cores, {options.threads} thread(s) for each side, load "
        f"{about['load_average'][0]:.1f}; {packages}\n"
        "tok/s: real tokens per second of wall clock, and per second of CPU time of all processes of the row; "
        "x: times as fast as that row (CPU time, in brackets wall clock)"
    )
    return "\n\n".join([head, *(_memory(each) if each.case.alone else _speed(each) for each in found)])


def _speed(measured: Measured) -> str:
    against = [each for each in measured.series if each.row.baseline]
    lines = [measured.case.title]
    lines += [f"  [{chr(97 + i)}] {each.row.label}" for i, each in enumerate(against)]
    columns = "".join(f"{f'x [{chr(97 + i)}]':>15}" for i in range(len(against)))
    lines.append(f"{'':<32}{'tok/s':>8}{'tok/CPU-s':>11}{'bound':>7}{columns}   loss apart")
    tokens = measured.case.work.tokens
    for series in measured.series:
        ratios = [
            "" if each is series else f"{series.ratio(each, 'cpu'):.2f} ({series.ratio(each, 'wall'):.2f})"
            for each in against
        ]
        part = share(measured, series)
        apart = [measured.difference(series, step) for step in range(min(2, len(series.losses)))]
        lines.append(
            f"{series.row.label:<32}{tokens / series.median('wall'):>8.0f}{tokens / series.median('cpu'):>11.0f}"
            f"{'' if part is None else f'{part:.0%}':>7}{''.join(f'{ratio:>15}' for ratio in ratios)}   "
            f"{', '.join(f'{each:.0e}' for each in apart)}"
        )
    for dtype, series in measured.bounds.items():
        parts = series.parts()
        lines.append(
            f"{f'matrix products {dtype}':<32}{1 / parts['wall']:>8.0f}{1 / parts['cpu']:>11.0f}   "
            f"{parts['flops'] / 1e9:.0f} GFLOP per CPU second"
        )
    return "\n".join([*lines, *_parts(measured), *_profiles(measured)])


def _parts(measured: Measured) -> list[str]:
    """Where the engine's own clock says that the time went."""
    lines = []
    for series in measured.series:
        parts = series.parts()
        seconds = {name.removeprefix("seconds "): s for name, s in parts.items() if name.startswith("seconds ")}
        total = sum(seconds.values())
        if total > 0:
            shares = ", ".join(f"{name} {value / total:.0%}" for name, value in seconds.items())
            lines.append(f"{series.row.label}: {shares}; {parts['rows']:.0f} rows in {parts['passes']:.0f} passes")
    return lines


def _profiles(measured: Measured) -> list[str]:
    return [f"\n{series.row.label}\n{series.profile}" for series in measured.series if series.profile]


def _memory(measured: Measured) -> str:
    against = [each for each in measured.series if each.row.baseline]
    lines = [measured.case.title, f"{'GiB':<40}{'loaded':>8}{'peak':>8}{'step':>8}   step of peft / step of this"]
    for series in measured.series:
        before, peak = series.median("rss_before") / GIB, series.median("rss_peak") / GIB
        ratios = [
            f"{(each.median('rss_peak') - each.median('rss_before')) / GIB / (peak - before):.1f} ({each.row.label})"
            for each in against
            if each is not series and not series.row.baseline
        ]
        lines.append(f"{series.row.label:<40}{before:>8.2f}{peak:>8.2f}{peak - before:>8.2f}   {', '.join(ratios)}")
    return "\n".join(lines)
