"""The whole way: the unmodified SDK, HTTP, the operation log and the worker of a real server process."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import tinker
from tinker import types

from benchmarks.training.work import BETAS, EPS, LEARNING_RATE, Example, Outcome, SideSpec, Work
from tests.support.server import serve

MODEL = "bench/model"
NEVER = str(10**6)
"""Operations, seconds and MiB that no benchmark reaches."""
ADAM = types.AdamParams(learning_rate=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], eps=EPS)


class ServerSide:
    """A server of its own, and N training clients in this process."""

    def __init__(self, spec: SideSpec) -> None:
        self._stack = ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        options = {
            "--base-model": f"{MODEL}={spec.folder}",
            "--dtype": spec.dtype,
            "--device": spec.device,
            "--threads": str(spec.threads),
            "--log-level": "warning",
        }
        if not spec.snapshots:
            options |= dict.fromkeys(("--snapshot-operations", "--snapshot-seconds", "--snapshot-mib"), NEVER)
        arguments = [word for pair in options.items() for word in pair]
        server = self._stack.enter_context(serve(folder / "data", arguments))
        self._snapshots = folder / "data" / "snapshots"
        service: Any = self._stack.enter_context(tinker.ServiceClient(base_url=server.url, api_key=server.key))
        self.clients: list[Any] = [
            service.create_lora_training_client(
                base_model=MODEL, rank=spec.rank, seed=client, train_unembed=spec.unembed
            ).result()
            for client in range(spec.clients)
        ]

    def step(self, work: Work) -> Outcome:
        """Every client sends all its steps without waiting in between; then all results are awaited."""
        sent: list[list[Any]] = []
        for client, batch in zip(self.clients, work.clients, strict=True):
            data = [datum(example) for example in batch]
            mine: list[Any] = []
            for _ in range(work.steps):
                mine += [client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)]
            sent.append(mine)
        results = [[future.result() for future in mine] for mine in sent]
        kept = float(len(list(self._snapshots.iterdir()))) if self._snapshots.exists() else 0.0
        return Outcome(tuple(mine[0].metrics["loss:sum"] for mine in results), {"snapshots kept": kept})

    def cpu_seconds(self) -> float:
        """The SDK's process, the server and its workers."""
        me = psutil.Process(os.getpid())
        times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
        return float(sum(each.user + each.system for each in times))

    def close(self) -> None:
        """Stop the server."""
        self._stack.close()


def datum(example: Example) -> types.Datum:
    """As users write it."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(example.tokens.tolist()),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(example.targets),
            "weights": types.TensorData.from_numpy(np.ones(len(example.targets), np.float32)),
        },
    )
