"""How many sampling replicas a base model has, and how each works. Plain data; imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """How many replicas there are, and what each takes.

    Args:
        min_replicas, max_replicas: they are added and removed between these numbers.
        target_ongoing_requests: samples that a replica has when their number is right, running and waiting; None =
            three quarters of the rows that it draws at once.
        upscale_delay, downscale_delay: seconds that more, or fewer, must be needed.
        look_back: seconds over which what is needed is averaged.
        bundle: what a replica takes of the cluster; None = a CPU for each thread, and a GPU if its device is one.
        start_timeout: seconds in which a replica must have loaded the base model.
        turn_timeout: seconds after which a turn of sampling counts as hung, and its process is replaced; None = never.
        drain_timeout: seconds that a replica which is removed gets to finish its samples; the rest run elsewhere.
        health_period: seconds between two looks at a replica; it is replaced after three at which it has failed.
        builder: of the worker in each replica (`WorkerSpec.builder`).
        decode_slice, restart_limit: of the runtime in each replica (`ModelRuntime`).
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float | None = None
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    look_back: float = 10.0
    bundle: Mapping[str, float] | None = None
    start_timeout: float = 900.0
    turn_timeout: float | None = None
    drain_timeout: float = 60.0
    health_period: float = 5.0
    builder: str = "workers.rollout:build_rollout"
    decode_slice: int = 8
    restart_limit: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise InvalidRequest(
                f"{self.min_replicas} to {self.max_replicas} sampling replicas are not possible; "
                "give at least 1, and no fewer as the most than as the least",
                field="min_replicas",
            )
