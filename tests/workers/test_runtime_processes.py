"""The runtime on real child processes."""

from __future__ import annotations

from tests.workers.runtime_contract import RuntimeContract
from workers.local import LocalWorkerGroup
from workers.spec import WorkerSpec


class TestRuntimeOnChildProcesses(RuntimeContract):
    @staticmethod
    def make(spec: WorkerSpec, *, stop_grace: float) -> LocalWorkerGroup:
        return LocalWorkerGroup(spec, stop_grace=stop_grace)
