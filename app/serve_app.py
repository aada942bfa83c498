"""The HTTP edge as a deployment of Ray Serve: `serve run app.serve_app:app`.

The same application that `tinsmith serve` runs under uvicorn, behind Ray Serve's HTTP proxy. Settings come from the
environment and from the file that TINSMITH_CONFIG names, or as arguments: `serve run app.serve_app:build max_rank=64`.
One replica: a data folder has one edge.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from app import logging as server_log
from app import memory
from app.main import create_app
from app.settings import Settings, SettingsError, check_folders, load_settings

MAX_ONGOING = 1000
"""Requests at once; long polls are most of them. Ray Serve's default of 5 would let them block everything else."""


def build(arguments: dict[str, Any]) -> Application:
    """The application for `serve run`, `serve build` and `serve deploy`.

    Args:
        arguments: settings by name, as on the command line.

    Raises:
        SettingsError: for a setting that is not accepted.
    """
    settings = load_settings({"ray": "auto", **arguments})
    check_folders(settings)
    if settings.tls_cert is not None:
        raise SettingsError("tls_cert: behind Ray Serve's proxy the server has no socket of its own; encrypt before it")

    def make() -> FastAPI:
        memory.bound()
        traced = settings.otel_endpoint is not None
        # Without a file of its own: Ray keeps what a replica writes to stderr.
        server_log.configure(
            settings.log_level,
            settings.log_format,
            settings.log_file,
            requests=settings.log_requests,
            trace_ids=traced,
        )
        return create_app(settings)

    return _deployment(make, settings).bind()


def _deployment(make: Any, settings: Settings) -> Any:
    @serve.deployment(
        name="edge",
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=settings.shutdown_grace + 10,
        ray_actor_options={"num_cpus": 0},
    )
    @serve.ingress(make)
    class Edge:
        """Nothing of its own: the routes are the application's."""

    return Edge


app = build({})
