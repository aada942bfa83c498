"""A Ray cluster in processes of its own, so that each of them can be killed and the cluster outlives a server."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.server import environment, free_port


class RayProcesses:
    """`ray start --head` and everything that came of it. `environment` lets a process use the cluster."""

    def __init__(self, address: str, process: subprocess.Popen[bytes], environment: dict[str, str]) -> None:
        self.address = address
        self.environment = environment
        self._process = process

    def find(self, title: str) -> list[int]:
        """Processes of this cluster, and of no other, whose command line begins so."""
        return [pid for pid in self._all() if _title(pid).startswith(title)]

    def replica(self) -> int:
        """The replica of the one base model."""
        return self._one("ray::ServeReplica:tinsmith")

    def controller(self) -> int:
        """The controller of Ray Serve."""
        return self._one("ray::ServeController")

    def worker(self) -> int:
        """The process that computes: the one rank of the group."""
        return self._one("ray::RankActor")

    def kill(self, *pids: int) -> None:
        """End processes as the kernel does when there is no memory left."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def _one(self, title: str, seconds: float = 60.0) -> int:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.find(title)
            if found:
                return found[-1]
            time.sleep(0.2)
        raise AssertionError(f"no process {title} on the cluster")

    def _all(self) -> list[int]:
        found, new = [], [self._process.pid]
        while new:
            found += new
            new = [child for pid in new for child in _children(pid)]
        return found


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


@contextmanager
def ray_processes(*, cpus: int = 2) -> Iterator[RayProcesses]:
    """A cluster with a token of its own, on the loopback address; ended with all its processes."""
    folder = tempfile.mkdtemp(prefix="tray-", dir="/tmp")
    try:
        for attempts_left in (2, 1, 0):
            cluster = _start(folder, cpus)
            try:
                _wait_until_started(cluster, Path(folder) / "start.log")
            except AssertionError:  # Ray gives itself 30 s, which is too little on a machine with other work
                _end(cluster)
                if not attempts_left:
                    raise
            else:
                break
        try:
            yield cluster
        finally:
            _end(cluster)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: str, cpus: int) -> RayProcesses:
    port = free_port()
    access = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [
        str(Path(sys.executable).with_name("ray")),
        *("start", "--head", "--block", "--node-ip-address", "127.0.0.1", "--port", str(port)),
        *("--num-cpus", str(cpus), "--num-gpus", "0", "--include-dashboard", "false"),
        *("--object-store-memory", str(200 << 20), "--temp-dir", folder, "--dashboard-agent-listen-port", "0"),
    ]
    with (Path(folder) / "start.log").open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(access), start_new_session=True
        )
    return RayProcesses(f"127.0.0.1:{port}", process, access)


def _wait_until_started(cluster: RayProcesses, log: Path) -> None:
    deadline = time.monotonic() + 180
    while not cluster._all()[1:] or b"Ray runtime started" not in log.read_bytes():
        if cluster._process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(log.read_text()[-3000:])
        time.sleep(0.2)


def _end(cluster: RayProcesses) -> None:
    everything, process = cluster._all(), cluster._process
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in everything[1:]:
        if _title(pid):
            os.kill(pid, signal.SIGKILL)
