"""The bare sampler: everything in one running batch, without server, HTTP or log."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from benchmarks.sampling.work import Clock, SampleWork, adapter
from benchmarks.training.work import Outcome, SideSpec
from engines.sampling.torch_sampler import TorchSampler
from engines.torch_engine.engine import TorchEngine
from schemas.errors import TinsmithError
from schemas.operations import Sample, SamplingParams


class SamplerSide:
    """The engine's base model with a sampler on it; the prompt of one round is forgotten before the next."""

    def __init__(self, spec: SideSpec) -> None:
        self.engine = TorchEngine(Path(spec.folder), dtype=spec.dtype, device=spec.device, threads=spec.threads)
        self.engine.load()
        self.adapters = {str(i): adapter(self.engine.model, spec.rank, i) for i in range(spec.clients)}

    def step(self, work: SampleWork) -> Outcome:
        """Until all are done. Raises the first error."""
        sampler = TorchSampler(
            self.engine.model,
            self.engine.router,
            None,
            max_rows=work.most_rows,
            load_adapter=lambda folder: self.adapters[folder.name],
        )
        began = time.perf_counter()
        for index, ask in enumerate(work.asks):
            params = SamplingParams(max_tokens=ask.new, temperature=ask.temperature, seed=index, stop=())
            folder = None if ask.adapter is None else str(ask.adapter)
            prompt = np.array(ask.prompt, np.int64)
            sampler.add(str(index), Sample(prompt, params, ask.samples, adapter_folder=folder, stream=True))
        clock = Clock()
        drawn: dict[int, list[list[int]]] = {}
        while sampler.load.active:
            step = sampler.step()
            now = time.perf_counter() - began
            for name, deltas in step.deltas.items():
                for delta in deltas:
                    clock.times.setdefault((int(name), delta.index), []).append(now)
            for name, result in step.ended.items():
                if isinstance(result, TinsmithError):
                    raise result
                drawn[int(name)] = [sequence.tokens.tolist() for sequence in result.sequences]
        return clock.outcome(drawn)

    def cpu_seconds(self) -> float:
        """This process has no children."""
        return time.process_time()

    def close(self) -> None:
        """Nothing was started."""
