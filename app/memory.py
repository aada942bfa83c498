"""How much memory the server's process keeps after a large request.

The C library's allocator learns from the first large buffer that is freed to keep such buffers (up to 64 MiB), in each
of up to eight heaps per core. Bodies that are decoded in many threads then leave hundreds of MiB that are free, but not
the machine's. Not responsible for workers, which have their own rules (`workers/environment.py`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

LARGE = 1 << 20
"""Bytes from which on a buffer is a mapping of its own, which goes back to the system when it is freed."""
HEAPS = 2
"""Threads share them. The interpreter lets one thread run at a time, so more would hardly be faster."""
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # of malloc.h


def bound(environment: Mapping[str, str] = os.environ) -> bool:
    """Let large buffers go back to the system. Before threads start; again is fine.

    Returns:
        Whether it did: not without glibc, nor where the environment says otherwise (`MALLOC_*_`, `GLIBC_TUNABLES`).
    """
    if any(name.startswith("MALLOC_") for name in environment) or "glibc.malloc" in environment.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGE)) and bool(mallopt(_ARENA_MAX, HEAPS))
