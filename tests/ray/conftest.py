"""One small Ray cluster for all tests of a session that need one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own choice lets whatever else runs here go before its workers
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # 30 are too few on a machine with other work


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A cluster of this process alone, with two CPUs; started at the first use, ended with the session."""
    import ray

    # Sockets of the cluster lie in the folder, and the length of their paths is limited to about 100 characters.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
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
