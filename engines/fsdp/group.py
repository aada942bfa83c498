"""The ranks of one base model as a process group: how they meet, add up, agree, and end when one is lost.

Small agreements go over gloo, on the CPU; gradients and weights over NCCL where the device is a GPU. A rank that fails
between two collectives would leave the others waiting, so it ends its process: whoever started the ranks then ends and
restarts all of them. Not responsible for what is computed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from engines.ranks import Place
from schemas.errors import TinsmithError, Unavailable

T = TypeVar("T")

_log = logging.getLogger(__name__)

EXIT_CODE = 70
"""Of a rank that ends itself because it cannot go on with the others."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LEAST_MEETING_SECONDS = 300.0
"""Interpreters and libraries start at their own pace; only after that does the group's timeout rule."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `size` ranks. Implements `engines.lockstep.Lockstep`.

    `per_replica` neighbouring ranks share the tensors of one copy of the model and compute the same datums.
    """

    rank: int
    size: int
    per_replica: int = 1

    @property
    def replicas(self) -> int:
        """Copies of the model, which share the datums."""
        return self.size // self.per_replica

    @property
    def replica(self) -> int:
        """The copy that this rank belongs to."""
        return self.rank // self.per_replica

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its copy where one answer is wanted of each."""
        return self.rank % self.per_replica == 0

    @classmethod
    def join(cls, place: Place, device: torch.device) -> Ranks:
        """Meet the other ranks (once in a process). Raises `Unavailable` if they cannot be reached in time."""
        if not dist.is_initialized():
            backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
            try:
                dist.init_process_group(
                    backend,
                    store=_store(place),
                    rank=place.rank,
                    world_size=place.ranks,
                    timeout=timedelta(seconds=place.timeout),
                )
            except (RuntimeError, ValueError) as error:
                _log.exception("the ranks did not meet")
                raise Unavailable(
                    f"the {place.ranks} ranks of this base model did not meet ({type(error).__name__})",
                    hint="the server's log has the details",
                ) from error
        if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.ranks):
            raise Unavailable("this process has joined another group of ranks already")
        return cls(place.rank, place.ranks)

    # -- decisions ---------------------------------------------------------------------------------------------------
    def any(self, flag: bool) -> bool:
        """See `Lockstep.any`."""
        return self.least([-float(flag)])[0] < 0

    def first(self, values: Sequence[int]) -> list[int]:
        """See `Lockstep.first`."""
        if self.size == 1 or not values:
            return list(values)
        carried = torch.tensor(values, dtype=torch.int64)
        self._collective(lambda: dist.broadcast(carried, 0))
        return [int(value) for value in carried.tolist()]

    def least(self, numbers: Sequence[float]) -> list[float]:
        """The smallest of each number over the ranks."""
        return self._reduced(numbers, dist.ReduceOp.MIN)

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over the ranks."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def gather(self, value: T) -> list[T]:
        """What each rank gave, in order of rank; small objects that pickle."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        self._collective(lambda: dist.all_gather_object(found, value))
        return found

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks: the same bits on every rank, in the order of the group."""
        if self.size > 1:
            self._collective(lambda: dist.all_reduce(tensor))

    # -- failures ----------------------------------------------------------------------------------------------------
    def together(self, action: Callable[[], T], undo: Callable[[], object] | None = None) -> T:
        """See `Lockstep.together`: it is the error of the lowest rank that has one."""
        if self.size == 1:
            return action()
        done: list[T] = []
        error: TinsmithError | None = None
        try:
            done.append(action())
        except TinsmithError as raised:
            error = raised
        except Exception as raised:
            self.broken(raised)
        if not self.any(error is not None):
            return done[0]
        told = next(each for each in self.gather(error) if each is not None)
        if done:
            if undo is None:
                self.broken(told)
            else:
                undo()
        raise told

    def broken(self, error: Exception) -> None:
        """See `Lockstep.broken`: with other ranks, the process ends."""
        if self.size == 1:
            return
        _log.error("rank %d of %d cannot go on with the others and ends", self.rank, self.size, exc_info=error)
        raise SystemExit(EXIT_CODE)

    # -- parts -------------------------------------------------------------------------------------------------------
    def _reduced(self, numbers: Sequence[float], how: Any) -> list[float]:
        carried = torch.tensor(numbers, dtype=torch.float64)
        if self.size > 1:
            self._collective(lambda: dist.all_reduce(carried, op=how))
        return [float(number) for number in carried.tolist()]

    def _collective(self, run: Callable[[], object]) -> None:
        try:
            run()
        except Exception as error:
            self.broken(error)


def _store(place: Place) -> Store:
    if place.ranks == 1:
        return HashStore()
    if place.address in _LOOPBACK:
        # By default gloo listens on the address of the host's name, which a container may not be able to reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    return TCPStore(
        place.address,
        place.port,
        place.ranks,
        is_master=place.rank == 0,
        timeout=timedelta(seconds=max(place.timeout, _LEAST_MEETING_SECONDS)),
        master_listen_fd=place.listen_fd if place.rank == 0 else None,
    )
