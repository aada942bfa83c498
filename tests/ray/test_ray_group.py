"""The worker group on Ray actors: the contract of every group, and what only a cluster can do wrong."""

from __future__ import annotations

from typing import ClassVar

import pytest

from tests.workers.group_contract import GroupContract
from tests.workers.runtime_contract import RuntimeContract
from workers.ray.gang import GangOptions
from workers.ray.group import RayWorkerGroup
from workers.spec import WorkerSpec

SMALL = GangOptions(bundle={"CPU": 0.5})


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
class TestRayGroup(GroupContract):
    slowest_start: ClassVar[float] = 60.0
    short_start: ClassVar[float] = 15.0
    death: ClassVar[str] = "the actor of rank 0 of base model 'toy' ended unexpectedly"
    death_while_loading: ClassVar[str] = "the actor of rank 0 of base model 'dies' ended while loading"
    reaps_at_once: ClassVar[bool] = False

    @staticmethod
    def make(spec: WorkerSpec, *, start_timeout: float, stop_grace: float) -> RayWorkerGroup:
        return RayWorkerGroup(spec, start_timeout=start_timeout, stop_grace=stop_grace, options=SMALL)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("ray_cluster")
class TestRuntimeOnRay(RuntimeContract):
    slack: ClassVar[float] = 6.0

    @staticmethod
    def make(spec: WorkerSpec, *, stop_grace: float) -> RayWorkerGroup:
        return RayWorkerGroup(spec, stop_grace=stop_grace, options=SMALL)
