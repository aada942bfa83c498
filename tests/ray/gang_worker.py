"""A worker whose ranks meet through `torch.distributed`, and that tells about the process it runs in."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from tests.support.toy_worker import INFO
from workers.build import Progress
from workers.dispatch import Dispatch, register
from workers.spec import WorkerSpec


class GangWorker:
    def __init__(self) -> None:
        self.info = INFO
        self.heard: list[str] = []

    @register(Dispatch.ONE_TO_ALL)
    def add_ranks(self, seconds: float = 0.0) -> float:
        """The sum of (rank + 1) over all ranks; rank 1 comes `seconds` late."""
        if distributed.get_rank() == 1:
            time.sleep(seconds)
        total = torch.tensor([distributed.get_rank() + 1.0])
        distributed.all_reduce(total)
        return float(total)

    @register(Dispatch.ONE_TO_ALL)
    def environments(self, names: list[str]) -> list[dict[str, str | None]]:
        """Variables of every rank's process."""
        found: list[dict[str, str | None]] = [{} for _ in range(distributed.get_world_size())]
        distributed.all_gather_object(found, {name: os.environ.get(name) for name in names})
        return found

    @register(Dispatch.ONE_TO_ALL)
    def prefixes(self) -> list[str]:
        """The folder of every rank's Python environment."""
        found = [""] * distributed.get_world_size()
        distributed.all_gather_object(found, sys.prefix)
        return found

    @register(Dispatch.ONE_TO_ALL)
    def is_shared(self, array: NDArray[np.float64]) -> bool:
        """Whether every rank reads the array where the object store keeps it, instead of a copy."""
        shared = torch.tensor([float(not array.flags.writeable and not array.flags.owndata)])
        distributed.all_reduce(shared, distributed.ReduceOp.MIN)
        return bool(shared)

    @register(Dispatch.ONE_TO_ALL)
    def hear(self, name: str, array: NDArray[np.float64]) -> list[str]:
        """The names of all calls so far, in the order in which they came."""
        self.heard.append(f"{name}:{array.size}")
        return self.heard


def build(spec: WorkerSpec, progress: Progress) -> GangWorker:
    progress("meeting the other ranks")
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    return GangWorker()
