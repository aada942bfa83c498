"""The local worker group on real child processes: life, death, order, errors, environment."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from schemas.errors import Unavailable
from schemas.operations import LoraSpec
from tests.support.processes import ended
from tests.workers.group_contract import SPEC, GroupContract
from workers.environment import worker_environment
from workers.local import LocalWorkerGroup
from workers.spec import WorkerSpec


class TestLocalGroup(GroupContract):
    @staticmethod
    def make(spec: WorkerSpec, *, start_timeout: float, stop_grace: float) -> LocalWorkerGroup:
        return LocalWorkerGroup(spec, start_timeout=start_timeout, stop_grace=stop_grace)

    async def test_signals_meant_for_the_server_do_not_end_a_rank(self, group: LocalWorkerGroup) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(group.pids[0], number)
        assert await group.call("create_adapter", "a", LoraSpec(8, seed=1)) == 1


def test_children_die_with_a_killed_server() -> None:
    script = textwrap.dedent(
        """
        import asyncio, sys
        from tests.workers.group_contract import SPEC
        from workers.local import LocalWorkerGroup

        async def main():
            group = LocalWorkerGroup(SPEC)
            await group.start()
            print(*group.pids, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    with server.stdout:
        pid = int(server.stdout.readline())
    assert not ended(pid)
    server.kill()
    server.wait()
    deadline = time.monotonic() + 30
    while not ended(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    outlived = not ended(pid)
    if outlived:
        os.kill(pid, signal.SIGKILL)
    assert not outlived, "the worker outlived its server"


def test_server_side_imports_no_torch() -> None:
    code = "import workers.local, workers.runtime, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_environment_of_a_rank() -> None:
    env = worker_environment(SPEC, {"PATH": "/bin", "PYTHONPATH": "/x"})
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "1"
    assert env["TOKENIZERS_PARALLELISM"] == "false"
    assert env["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert env["PYTHONPATH"].endswith(os.pathsep + "/x")
    if sys.platform == "linux":
        assert "glibc.malloc.hugetlb=1" in env["GLIBC_TUNABLES"]
    own = worker_environment(SPEC, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"})
    assert own["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=1"
    assert "OMP_NUM_THREADS" not in worker_environment(WorkerSpec("toy", None, "x"), {})


async def test_what_a_rank_logs_is_in_the_servers_log(caplog: pytest.LogCaptureFixture) -> None:
    group = LocalWorkerGroup(replace(SPEC, builder="tests.workers.group_contract:no_such_builder"))
    with caplog.at_level(logging.INFO), pytest.raises(Unavailable):
        await group.start()
    (record,) = [each for each in caplog.records if each.name == "tinsmith.worker"]
    assert record.levelno == logging.ERROR
    assert "cannot be loaded" in record.getMessage()
    assert "no_such_builder" in str(record.exc_text)
