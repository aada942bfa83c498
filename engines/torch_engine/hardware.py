"""What the device of this process can do: the peak of its matrix products, its threads and its memory.

Not responsible for what a model needs of it (`memory.py`).
"""

from __future__ import annotations

import functools
import os
import time

import torch
from torch import Tensor, nn

from engines.machine import is_intel_avx2, machine_memory, usable_cores

_SECONDS = 0.1
"""Of measuring, after one product to warm up."""
_WORK = {"cpu": 1e9, "cuda": 1e12}
"""Floating-point operations of one product: enough to fill the machine, few enough to be done several times."""
_ROWS = {"cpu": (64, 1024), "cuda": (1024, 16384)}
_MOST_BYTES = 1 << 30


def set_threads(threads: int | None) -> int:
    """Compute with so many CPU threads from now on; None = all cores that the process may use. Returns the number.

    None does not look at `OMP_NUM_THREADS`: launchers set it to 1 in processes that they start. An operator's wish
    arrives as a number (`engines.machine.compute_threads`).
    """
    wanted = usable_cores() if threads is None else threads
    torch.set_num_threads(wanted)
    return wanted


def keep_sums() -> None:
    """Ask MKL to sum a row of a float32 product in one order, however many rows and threads there are.

    Its "strict" mode of reproducible results promises that for numbers of threads, on Intel processors with AVX2 or
    more, and keeps it for numbers of rows too; products of many rows are as fast as without (docs/performance.md).
    MKL reads the variable at its first product, so this comes before any; what an operator has set wins. Other
    processors are left alone: MKL has no such mode for them. What rows are worth in the end is tried out
    (`invariance.py`).
    """
    if is_intel_avx2():
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def device_memory(device: torch.device) -> tuple[int, int]:
    """(total, free) bytes of the device's memory; of main memory within the limits of control groups for the CPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return machine_memory()


def peak_flops(model: nn.Module) -> float:
    """The greatest rate of products of activations with base weights, FLOP/s of all threads together, measured now.

    By the model's largest linear that is no output head, in the dtype of its weight; about a tenth of a second. Best of
    several, so that a busy machine disturbs it little. 0.0 if the model has no linear. Measured once in a process for
    each shape, dtype, device and number of threads.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    head_weight = None if head is None else head.weight
    weights = [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.weight is not head_weight
    ]
    if not weights:
        return 0.0
    largest: Tensor = max(weights, key=lambda weight: weight.numel())
    return _measured(tuple(largest.shape), largest.dtype, largest.device, torch.get_num_threads())


@functools.cache
def _measured(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, threads: int) -> float:
    width, depth = shape
    low, high = _ROWS[device.type]
    rows = int(min(high, max(low, _WORK[device.type] / (2 * width * depth))))
    rows = max(1, min(rows, _MOST_BYTES // (4 * (width + depth))))
    weight = torch.ones(width, depth, dtype=dtype, device=device).mul_(0.5)
    x = torch.ones(rows, depth, dtype=dtype, device=device).mul_(0.5)
    out = torch.empty(rows, width, dtype=dtype, device=device)
    best, began = float("inf"), 0.0
    for attempt in range(64):
        start = _now(device)
        torch.mm(x, weight.t(), out=out)
        end = _now(device)
        if attempt == 0:
            began = end  # the first one also chooses a kernel and touches the memory
            continue
        best = min(best, end - start)
        if end - began > _SECONDS:
            break
    return 2.0 * rows * width * depth / max(best, 1e-9)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
