"""What the machine lets this process have: cores and memory. Respects affinity and the limits of control groups.

Imports nothing heavy: the server asks here as well. Not responsible for accelerators (`torch_engine/hardware.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 of control groups writes a number near 2^63 where there is no limit."""


def usable_cores() -> int:
    """Cores that this process may use: its affinity, or the quota of its control group if that is less (rounded up)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def compute_threads(given: int | None, ranks: int, environ: dict[str, str] | os._Environ[str]) -> int:
    """Threads of each of the `ranks` processes that a server starts.

    What an operator said wins: the setting (`given`), then `OMP_NUM_THREADS` of the server's own environment. Else the
    ranks share the usable cores. To be asked in the server's process: launchers of workers set the variable to 1
    on their own, which is nobody's wish.
    """
    if given is not None:
        return given
    said = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if said.isdecimal() and int(said) > 0:
        return int(said)
    return max(1, usable_cores() // ranks)


def machine_memory() -> tuple[int, int]:
    """(total, free) bytes of main memory that this process may have; what a page cache would give back counts as free.

    Under a control group with a limit, both are the group's if that is less.
    """
    total, free = _physical()
    for folder in _groups("memory"):
        for limit_name, used_name, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(folder / limit_name)
            if limit is None or limit >= min(total, _UNLIMITED):
                continue
            used = (_number(folder / used_name) or 0) - _table(folder / "memory.stat").get(cache_key, 0)
            total, free = limit, max(0, min(free, limit - used))
    return total, free


def is_intel_avx2() -> bool:
    """Whether this is an Intel processor with AVX2 (or more); false where the kernel does not tell."""
    known = _text(Path("/proc/cpuinfo")).partition("\n\n")[0]
    return "GenuineIntel" in known and " avx2 " in known


def _physical() -> tuple[int, int]:
    known = _table(Path("/proc/meminfo"))
    if "MemTotal:" in known:
        return known["MemTotal:"] * 1024, known.get("MemAvailable:", known["MemTotal:"]) * 1024
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0, 0  # not known here
    return total, total


def _quota() -> float | None:
    """Cores per period that the control groups allow; None = no limit."""
    found: list[float] = []
    for folder in _groups("cpu"):
        words = _text(folder / "cpu.max").split()
        quota, period = words if len(words) == 2 else ("", "")
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            found.append(int(quota) / int(period))
    return min(found, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups that this process is in, for one controller, up to the root.

    Inside a container the path that the kernel tells may be the host's; then only the root exists.
    """
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            root = _CGROUPS
        elif controller in controllers.split(","):
            root = _CGROUPS / controller
        else:
            continue
        folder = root / path.lstrip("/")
        while root in (folder, *folder.parents):
            yield folder
            folder = folder.parent


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""  # not every kernel and container shows it


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdecimal() else None


def _table(file: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(file).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}
