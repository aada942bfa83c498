"""Measured processes: one for each side, fed one piece of work at a time, so that the repeats of all sides interleave.

Every side starts with the same environment: the memory settings and thread counts of a real worker, which can only be
set before a process starts.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.sampling.work import SampleWork
from benchmarks.training.work import Side, SideSpec, Took, Work
from workers.environment import worker_environment
from workers.spec import WorkerSpec

PROFILE_ROWS = 15
AnyWork = Work | SampleWork
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class SideFailed(RuntimeError):
    """A measured process ended early; its own words are on stderr."""


class Host:
    """The process of one side, and the pipe to it."""

    def __init__(self, spec: SideSpec, settings: Mapping[str, str]) -> None:
        self.spec = spec
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        with environment(settings):
            self._process = context.Process(target=_main, args=(spec, theirs))
            self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        """Until the model is loaded. Raises `SideFailed`."""
        self._receive()

    def run(self, work: AnyWork) -> Took:
        """Do one piece of work now. Raises `SideFailed`."""
        self._pipe.send(work)
        took: Took = self._receive()
        return took

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            raise SideFailed(f"{self.spec.kind} {self.spec.dtype} ended with {self._process.exitcode}") from None

    def close(self) -> None:
        """Let it end after what it does now, and wait for that."""
        self._pipe.close()
        self._process.join()


@contextmanager
def hosts(specs: Iterable[SideSpec], settings: Mapping[str, str]) -> Iterator[dict[SideSpec, Host]]:
    """A process for each different spec, ready to work; all of them end with the context. Raises `SideFailed`."""
    started: dict[SideSpec, Host] = {}
    try:
        for spec in dict.fromkeys(specs):
            started[spec] = Host(spec, settings)
            started[spec].wait_ready()
        yield started
    finally:
        for host in started.values():
            host.close()


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """This process's environment, which a child inherits at its start, is `settings` inside the context."""
    former = dict(os.environ)
    os.environ.clear()
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(former)


def settings_for(threads: int) -> dict[str, str]:
    """What a worker of the server starts with, for any side. Tuning that the caller's environment has wins."""
    spec = WorkerSpec(model="", source=None, data_dir="", threads=threads)
    return {**worker_environment(spec, os.environ), "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}


def _main(spec: SideSpec, pipe: Connection) -> None:
    side = _build(spec)
    try:
        with suppress(EOFError):  # the measuring process closed the pipe, or is gone
            pipe.send(True)
            while True:
                work: AnyWork = pipe.recv()
                pipe.send(_profiled(side, work) if work.profile else _measured(side, work))
    finally:
        side.close()


def _build(spec: SideSpec) -> Side:
    """Imports only what the side needs: its memory is measured."""
    if spec.kind == "peft":
        from benchmarks.training.peft_side import PeftSide

        return PeftSide(spec)
    if spec.kind == "engine":
        from benchmarks.training.engine_side import EngineSide

        return EngineSide(spec)
    if spec.kind == "server":
        from benchmarks.training.server_side import ServerSide

        return ServerSide(spec)
    if spec.kind == "sampler":
        from benchmarks.sampling.sampler_side import SamplerSide

        return SamplerSide(spec)
    if spec.kind in ("generate", "paged"):
        from benchmarks.sampling.generate_side import GenerateSide, PagedSide

        return GenerateSide(spec) if spec.kind == "generate" else PagedSide(spec)
    from benchmarks.training.gemm_side import GemmSide

    return GemmSide(spec)


def _measured(side: Side, work: AnyWork) -> Took:
    before, _ = _resident(reset=True)
    begin, cpu = time.perf_counter(), side.cpu_seconds()
    outcome = side.step(work)
    wall, cpu = time.perf_counter() - begin, side.cpu_seconds() - cpu
    return Took(wall, cpu, before, _resident()[1], outcome)


def _profiled(side: Side, work: AnyWork) -> Took:
    """The same with torch's profiler on: shares are telling, totals are inflated."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        took = _measured(side, work)
    table = found.key_averages().table(sort_by="self_cpu_time_total", row_limit=PROFILE_ROWS, max_name_column_width=60)
    return Took(took.wall, took.cpu, took.rss_before, took.rss_peak, took.outcome, table)


def _resident(*, reset: bool = False) -> tuple[int, int]:
    """Resident bytes now and at the highest since the last reset; zeros where /proc does not tell."""
    if not _STATUS.exists():
        return 0, 0
    if reset:
        _CLEAR.write_text("5")  # the high-water mark starts again from now
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if line.startswith("Vm"))
    return tuple(1024 * int(fields[name].split()[0]) for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]
