"""The sampling half of the split layout: a deployment of sampling replicas for each base model, as many as are needed.

A training group keeps its own copy of the base weights; replicas have theirs, and read sampler checkpoints from the
shared file system, as the one-machine layout does. So the same seeds give the same tokens. Not responsible for running
the application (`ray.serve.run`), nor for sending samples to it (`workers/ray/sampler_client.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig

from workers.ray.application import DEPLOY_SECONDS
from workers.ray.placement import node_environment, rank_bundle
from workers.ray.sampler_options import SamplerOptions
from workers.ray.sampler_replica import SamplerReplica
from workers.sampling_lane import READY_INSIDE
from workers.spec import WorkerSpec

DEPLOYMENT = "sampler"
"""Its name within the application."""
_FAILED_CHECKS = 3
"""Looks in a row at which a replica has failed until Serve replaces it; Serve has no setting for it."""


def most_ongoing(spec: WorkerSpec) -> int:
    """Samples that a replica has at once: one for each row that it draws, and the next few, so that no row waits."""
    return spec.max_sample_rows + READY_INSIDE


def replaced_within(options: SamplerOptions) -> float:
    """Seconds in which Serve replaces a replica whose worker cannot be brought back, if it can at all: until it has
    noticed (up to a period passes before its first look), the old one has gone, a process has a place, and the base
    model is loaded. Each is its own bound, so a replica that may still come is not given up."""
    noticed = (_FAILED_CHECKS + 1) * options.health_period
    return noticed + options.drain_timeout + DEPLOY_SECONDS + options.start_timeout


def sampler_bundle(spec: WorkerSpec, options: SamplerOptions) -> dict[str, float]:
    """What one replica takes of the cluster that this process is connected to."""
    return dict(options.bundle or rank_bundle(spec, ray.cluster_resources()))


def rollout_spec(spec: WorkerSpec, options: SamplerOptions) -> WorkerSpec:
    """What the worker of a replica loads, for a base model that is trained as `spec` says."""
    return replace(
        spec, engine="torch", engine_python=None, builder=options.builder, threads=spec.threads or 1, ranks=1
    )


def sampler_application(spec: WorkerSpec, options: SamplerOptions | None = None) -> Any:
    """The Serve application that samples from one base model. This process is connected to a cluster.

    Raises `InvalidRequest` for a device that a cluster does not choose (`rank_bundle`).
    """
    options = options or SamplerOptions()
    bundle = sampler_bundle(spec, options)
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
    return deployment.bind(rollout_spec(spec, options), options)
