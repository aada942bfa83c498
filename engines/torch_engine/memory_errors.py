"""The ways in which memory runs out, as one error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from schemas.errors import OutOfMemory


def is_out_of_memory(error: Exception) -> bool:
    """CUDA has a class of its own; the CPU allocator raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """Turn the ways in which memory runs out into `OutOfMemory`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"{what} does not fit in the memory of the device", hint="send fewer or shorter datums at a time"
        ) from None
