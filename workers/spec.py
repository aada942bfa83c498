"""What a worker process needs to know to come up. Plain data: it crosses a process border."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One base model on one kind of engine.

    Args:
        model: the name of the base model as clients say it.
        source: where its weights come from (a folder or a hub id); None = the built-in default of that name.
        data_dir: the server's data folder, for converted and downloaded base models.
        engine: a name of `engines.registry`.
        dtype, device: passed to the engine; "auto" lets it choose.
        threads: compute threads per rank; None lets the libraries choose.
        ranks: number of processes.
        sample_logprobs: "tempered" or "plain": which distribution the logprobs of sampled tokens belong to.
        max_loaded_adapters: saved adapters that the sampler keeps in memory.
        builder: "module:function" called in the worker process as `function(spec, progress)`; returns the worker.
    """

    model: str
    source: str | None
    data_dir: str
    engine: str = "torch"
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    ranks: int = 1
    sample_logprobs: Literal["tempered", "plain"] = "tempered"
    max_loaded_adapters: int = 16
    builder: str = "workers.build:build_worker"
