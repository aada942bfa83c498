"""The bound: how long the base model's matrix products take on their own, shape by shape, in this process.

A LoRA step needs of every linear the product forward and the one back to its input; nothing else that a training pass
does is counted, so no engine reaches it.
"""

from __future__ import annotations

import time
from collections import Counter

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.training.work import Outcome, SideSpec, Work

REPEATS = 3


class GemmSide:
    """Products of `gemm_rows` rows with a weight of every shape of the model."""

    def __init__(self, spec: SideSpec) -> None:
        torch.set_num_threads(spec.threads)
        self.rows, self.device = spec.gemm_rows, torch.device(spec.device)
        self.dtype = getattr(torch, spec.dtype)
        self.shapes = shapes(spec.folder)

    def step(self, work: Work) -> Outcome:
        """`wall` and `cpu` seconds per token, sums of the best of 3 per shape, and `flops` per CPU second."""
        wall = cpu = 0.0
        for (inputs, outputs), count in self.shapes.items():
            found = [self._pair(inputs, outputs) for _ in range(REPEATS)]
            wall += count * min(each[0] for each in found)
            cpu += count * min(each[1] for each in found)
        parameters = sum(i * o * count for (i, o), count in self.shapes.items())
        return Outcome(
            parts={"wall": wall / self.rows, "cpu": cpu / self.rows, "flops": 4 * parameters * self.rows / cpu}
        )

    def _pair(self, inputs: int, outputs: int) -> tuple[float, float]:
        """Wall and CPU seconds of the product forward and of the one back."""
        x = torch.randn(self.rows, inputs, device=self.device).to(self.dtype)
        g = torch.randn(self.rows, outputs, device=self.device).to(self.dtype)
        weight = torch.randn(outputs, inputs, device=self.device).to(self.dtype)
        self._wait()
        begin, before = time.perf_counter(), time.process_time()
        functional.linear(x, weight)
        torch.mm(g, weight)
        self._wait()
        return time.perf_counter() - begin, time.process_time() - before

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def cpu_seconds(self) -> float:
        """This process has no children."""
        return time.process_time()

    def close(self) -> None:
        """Nothing was started."""


def shapes(folder: str) -> Counter[tuple[int, int]]:
    """How many linears of which (inputs, outputs) the model of this folder has, the head included."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return Counter((linear.in_features, linear.out_features) for linear in linears)
