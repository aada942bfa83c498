"""The sampling half of the split layout: a deployment of sampling replicas for each base model, as many as are needed.

A training group keeps its own copy of the base weights; replicas have theirs, and read sampler checkpoints from the
shared file system, as the one-machine layout does. So the same seeds give the same tokens. Not responsible for running
the application (`ray.serve.run`), nor for sending samples to it (`workers/ray/sampler_client.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig

from schemas.errors import InvalidRequest
from workers.ray.placement import Bundle, node_environment, rank_bundle
from workers.ray.sampler_replica import SamplerReplica
from workers.sampling_lane import READY_INSIDE
from workers.spec import WorkerSpec

DEPLOYMENT = "sampler"
"""Its name within the application."""


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
        health_period: seconds between two looks at a replica.
        builder: of the worker in each replica (`WorkerSpec.builder`).
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float | None = None
    upscale_delay: float = 10.0
    downscale_delay: float = 300.0
    look_back: float = 10.0
    bundle: Bundle | None = None
    start_timeout: float = 900.0
    turn_timeout: float | None = None
    drain_timeout: float = 60.0
    health_period: float = 5.0
    builder: str = "workers.rollout:build_rollout"

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise InvalidRequest(
                f"{self.min_replicas} to {self.max_replicas} sampling replicas are not possible; "
                "give at least 1, and no fewer as the most than as the least",
                field="min_replicas",
            )


def most_ongoing(spec: WorkerSpec) -> int:
    """Samples that a replica has at once: one for each row that it draws, and the next few, so that no row waits."""
    return spec.max_sample_rows + READY_INSIDE


def sampler_application(spec: WorkerSpec, options: SamplerOptions | None = None) -> Any:
    """The Serve application that samples from one base model. This process is connected to a cluster.

    Raises `InvalidRequest` for a device that a cluster does not choose (`rank_bundle`).
    """
    options = options or SamplerOptions()
    bundle = dict(options.bundle or rank_bundle(spec, ray.cluster_resources()))
    target = options.target_ongoing_requests or 0.75 * spec.max_sample_rows
    deployment = serve.deployment(
        SamplerReplica,
        name=DEPLOYMENT,
        max_ongoing_requests=most_ongoing(spec),
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=target,
            upscale_delay_s=options.upscale_delay,
            downscale_delay_s=options.downscale_delay,
            look_back_period_s=options.look_back,
            metrics_interval_s=options.look_back / 2,
        ),
        ray_actor_options={
            "num_cpus": bundle.get("CPU", 0.0),
            "num_gpus": bundle.get("GPU", 0.0),
            "resources": {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
            "runtime_env": {"env_vars": node_environment(spec, bundle)},
        },
        graceful_shutdown_timeout_s=options.drain_timeout,
        health_check_period_s=options.health_period,
    )
    rollout = replace(
        spec, engine="torch", engine_python=None, builder=options.builder, threads=spec.threads or 1, ranks=1
    )
    return deployment.bind(rollout, options.start_timeout, options.turn_timeout)
