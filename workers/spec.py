"""What a worker process needs to know to come up. Plain data: it crosses a process border."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engines.ranks import Place


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One base model on one kind of engine.

    Args:
        model: the name of the base model as clients say it.
        source: where its weights come from (a folder or a hub id); None = the built-in default of that name.
        data_dir: the server's data folder, for converted and downloaded base models.
        engine: a name of `engines.registry`.
        engine_python: an interpreter that has the engine's library; None = that of `make engine-venv`, or this one.
        dtype, device: passed to the engine; "auto" lets it choose.
        threads: compute threads per rank; None = the cores that the process may use, shared by the ranks.
        ranks: number of processes.
        tensor_parallel: how many neighbouring ranks share the tensors of one copy of the model (engine megatron).
        rank_timeout: seconds that a rank waits for the others before it counts them as lost.
        place: which rank this is, set by whoever starts the processes; None = the only one.
        sample_logprobs: "tempered" or "plain": which distribution the logprobs of sampled tokens belong to.
        max_loaded_adapters: saved adapters that the sampler keeps in memory.
        max_sample_rows, max_sample_tokens: sequences that draw at once, and tokens that they may hold together.
        sampler: "torch" (on the trainer's copy of the weights), "vllm", or the address of an OpenAI-compatible server.
        sampler_python: an interpreter that has vLLM; None = that of `make engine-venv NAME=vllm`.
        sampler_memory_gib: vLLM's key-value cache in GiB; None = its own choice.
        sampler_max_rank: the largest rank of an adapter that vLLM is set up for.
        batch_invariant: numbers of training may not depend on what else is computed beside them.
        micro_batch_tokens: tokens of one turn of many training runs; None = the engine's choice.
        gradient_checkpointing: compute activations twice instead of keeping them; "auto" where they would not fit.
        adapter_memory_gib: memory for live training runs in GiB (2^30 bytes), above which idle ones go to disk;
            None = a share of what is free.
        scratch: where the worker keeps what it makes again itself, such as idle adapters; "" = `data_dir`.
        builder: "module:function" called in the worker process as `function(spec, progress)`; returns the worker.
    """

    model: str
    source: str | None
    data_dir: str
    engine: str = "torch"
    engine_python: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    ranks: int = 1
    tensor_parallel: int = 1
    rank_timeout: float = 120.0
    place: Place | None = None
    sample_logprobs: Literal["tempered", "plain"] = "tempered"
    max_loaded_adapters: int = 16
    max_sample_rows: int = 64
    max_sample_tokens: int = 131_072
    sampler: str = "torch"
    sampler_python: str | None = None
    sampler_memory_gib: float | None = None
    sampler_max_rank: int = 64
    batch_invariant: bool = True
    micro_batch_tokens: int | None = None
    gradient_checkpointing: Literal["off", "on", "auto"] = "auto"
    adapter_memory_gib: float | None = None
    scratch: str = ""
    builder: str = "workers.build:build_worker"
