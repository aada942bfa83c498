"""One small Ray cluster for all tests of a session that need one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own choice lets whatever else runs here go before its workers


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A cluster of this process alone, with two CPUs; started at the first use, ended with the session."""
    import ray

    # Sockets of the cluster lie in the folder, and the length of their paths is limited to about 100 characters.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    try:
        for attempts_left in (2, 1, 0):
            try:
                ray.init(
                    address="local",
                    num_cpus=2,
                    num_gpus=0,
                    include_dashboard=False,
                    object_store_memory=200 << 20,
                    logging_level="error",
                    log_to_driver=False,
                    _temp_dir=folder,
                )
                break
            except Exception:  # Ray gives itself 30 s, which is too little on a machine with other work
                ray.shutdown()
                if not attempts_left:
                    raise
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def serve_cluster(ray_cluster: None) -> Iterator[None]:
    """Ray Serve on that cluster, without its HTTP server."""
    from ray import serve

    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR", "enable_access_log": False})
    try:
        yield
    finally:
        serve.shutdown()


def pytest_configure(config: pytest.Config) -> None:
    # Ray Serve declares its settings in a way that pydantic is about to give up.
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:ray\.serve\..*")
