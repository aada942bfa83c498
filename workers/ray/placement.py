"""What a worker group asks of a Ray cluster, and what the cluster has, in words.

Not responsible for waiting until it is there (`workers/ray/gang.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

import ray

from schemas.errors import InvalidRequest
from workers.environment import worker_environment
from workers.spec import WorkerSpec

Bundle = Mapping[str, float]
"""Amounts of resources by Ray's names: CPU, GPU, or one of the cluster's own."""


def rank_bundle(spec: WorkerSpec, cluster: Bundle) -> dict[str, float]:
    """What one rank of `spec` takes: a CPU for each of its threads, and a GPU where its device is one.

    Args:
        cluster: all that the cluster has. Device `auto` takes a GPU if there is one.

    Raises `InvalidRequest` for a numbered GPU: Ray chooses it, and the rank sees no other.
    """
    bundle = {"CPU": float(spec.threads or 1)}
    if re.fullmatch(r"cuda:\d+", spec.device):
        raise InvalidRequest(
            f"device {spec.device!r} cannot be chosen on a Ray cluster, which gives each rank a GPU of its own; "
            "use 'cuda', 'cpu' or 'auto'",
            field="device",
        )
    if spec.device == "cuda" or (spec.device == "auto" and cluster.get("GPU", 0.0) > 0):
        bundle["GPU"] = 1.0
    return bundle


def node_environment(spec: WorkerSpec, bundle: Bundle) -> dict[str, str]:
    """What the process of a rank gets on top of its node's environment: what this process sets for workers.

    Without a GPU in its bundle it sees none: Ray leaves `CUDA_VISIBLE_DEVICES` alone then, which shows all of a node.
    """
    spec = replace(spec, threads=spec.threads or 1)
    wanted = worker_environment(spec, os.environ)
    env = {name: wanted[name] for name in worker_environment(spec, {})}
    if not bundle.get("GPU", 0.0):
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def shortage(model: str, ranks: int, bundle: Bundle, waited: float) -> str:
    """Why a base model has no place: what is asked for, what the cluster has, and what is free of it."""
    has, free = ray.cluster_resources(), ray.available_resources()
    names = [*bundle, *(name for name in ("CPU", "GPU") if name not in bundle)]
    there = ", ".join(f"{has.get(name, 0.0):g} {name} ({free.get(name, 0.0):g} free)" for name in names)
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    return (
        f"base model {model!r} found no place on the Ray cluster within {waited:g} s: it needs {ranks} x "
        f"{describe(bundle)}, each on one node; the cluster has {there} on {nodes} node{'s' if nodes != 1 else ''}"
    )


def describe(bundle: Bundle) -> str:
    """A bundle in words, such as `(2 CPU, 1 GPU)`."""
    return "(" + ", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) + ")"
