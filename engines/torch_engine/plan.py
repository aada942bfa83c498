"""`python -m engines.torch_engine.plan DEVICE DTYPE`: what a worker with these settings would compute on, as JSON.

A process of its own, for those who must not import torch. Not responsible for starting a worker.
"""

from __future__ import annotations

import json
import sys

import torch

from engines.torch_engine.hardware import device_memory
from engines.torch_engine.loading import resolve_device
from engines.torch_engine.precision import resolve_dtype
from schemas.errors import TinsmithError


def main(device: str, dtype: str) -> int:
    """Write `{"device", "dtype", "total", "free", "devices", "gpus"}` or `{"error"}`; returns 0 or 1.

    Bytes of the device's memory, how many devices of its kind there are for ranks (CPU: 0, they share it), and the
    names of all GPUs that torch finds.
    """
    try:
        place = resolve_device(device)
        total, free = device_memory(place)
        plan = {
            "device": str(place),
            "dtype": str(resolve_dtype(dtype, place)).removeprefix("torch."),
            "total": total,
            "free": free,
            "devices": torch.cuda.device_count() if place.type == "cuda" else 0,
            "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        }
    except TinsmithError as error:
        sys.stdout.write(json.dumps({"error": error.message}))
        return 1
    sys.stdout.write(json.dumps(plan))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*sys.argv[1:3]))
