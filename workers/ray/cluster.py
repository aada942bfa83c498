"""The Ray cluster that the server uses: one that is there, or one of its own on this machine.

Responsible for connecting, for starting what is not there, and for ending what was started. Not responsible for what
runs on it. Everything here blocks: for a thread. Imports Ray only when it is needed, for it is an extra.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from schemas.errors import Unavailable

_log = logging.getLogger("tinsmith.ray")

LOCAL = "local"
"""The address that stands for a cluster of the server's own."""
INSIDE = "auto"
"""The address that stands for the cluster that this process is part of."""
OBJECT_STORE_BYTES = 256 << 20
"""Nothing large goes through the store: bodies of requests, one at a time."""
AUTH_MODE = "RAY_AUTH_MODE"
REACH_SECONDS = 10.0


class Cluster:
    """A connection of this process to a Ray cluster, with Ray Serve running there. Made by `connect`."""

    def __init__(self, address: str, folder: Path | None, *, joined: bool = True) -> None:
        self.address = address
        self._folder = folder
        self._joined = joined
        """Whether the connection was made here, and not by whoever started this process."""

    @property
    def own(self) -> bool:
        """Whether the cluster was started here, and ends with this process."""
        return self._folder is not None

    @classmethod
    def connect(cls, address: str) -> Cluster:
        """Connect to `address`, host:port; or, if it is "local", start a cluster on this machine for this process. With
        "auto" this process is part of a cluster already, and stays so.

        A cluster of our own has no dashboard. Ray's own ports listen on every address, whatever it is told, and let in
        who has the token in `~/.ray/auth_token`, which Ray makes: without that check we start none.

        Raises `Unavailable`: Ray is not installed, does not start, or nothing answers at the address.
        """
        if importlib.util.find_spec("ray") is None:
            raise Unavailable("Ray is not installed", hint="install the extra: pip install 'tinsmith[ray]'")
        if address == LOCAL and os.environ.setdefault(AUTH_MODE, "token") != "token":
            raise Unavailable(
                f"a Ray cluster is not started without token authentication ({AUTH_MODE} is "
                f"{os.environ[AUTH_MODE]!r}): whoever reached its ports could run programs here",
                hint=f"unset {AUTH_MODE}, or start the cluster yourself and give its address",
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if address == INSIDE:
            return cls(address, None, joined=False)
        # Sockets lie in this folder, and the length of their paths is limited to about 100 characters.
        folder = Path(tempfile.mkdtemp(prefix="tinsmith-ray-")) if address == LOCAL else None
        cluster = cls(address, folder)
        try:
            if folder is None:
                _reach(address)
                ray.init(address=address, **_quiet())
            else:
                ray.init(
                    address=LOCAL,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder),
                    **_quiet(),
                )
            _start_serve()
        except Exception as error:
            _log.debug("connecting to Ray failed", exc_info=True)
            cluster.close()
            raise _explained(address, error) from error
        return cluster

    def close(self) -> None:
        """Leave the cluster; one of our own ends. Never raises."""
        if not self._joined:
            return
        import ray

        try:
            if self.own and ray.is_initialized():
                from ray import serve

                serve.shutdown()
        except Exception:
            _log.warning("Ray Serve did not end as it should", exc_info=True)
        try:
            ray.shutdown()
        except Exception:
            _log.warning("Ray did not end as it should", exc_info=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _reach(address: str) -> None:
    """Raise `OSError` if nothing listens at `address`: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=REACH_SECONDS):
        return


def _quiet() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": "warning", "configure_logging": False, "namespace": "tinsmith"}


def _start_serve() -> None:
    """Serve without HTTP: requests come through the edge, and no port is opened. Leaves one that runs as it is."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # what it does is told in our own words
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING", "enable_access_log": False})


def _explained(address: str, error: Exception) -> Unavailable:
    text = str(error).strip().splitlines()
    reason = text[0][:300] if text else type(error).__name__
    if address == LOCAL:
        return Unavailable(f"Ray cannot be started on this machine: {reason}")
    return Unavailable(
        f"no Ray cluster can be used at {address}: {reason}",
        hint="start one with `ray start --head`, and let this machine have its token (RAY_AUTH_TOKEN_PATH)",
    )
