"""Which sampling engine a worker gets: on the trainer's own weights, on vLLM, or on a server elsewhere.

Runs inside the worker process only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.registry import capabilities, get_sampler, is_address, sampler_kind
from engines.sampling.base import SamplingEngine
from engines.sampling.elsewhere import Elsewhere
from engines.torch_engine.engine import TorchEngine
from schemas.base_model_info import BaseModelInfo
from workers.spec import WorkerSpec

GIB = 1 << 30


def check_sampler(spec: WorkerSpec) -> None:
    """Raise `Unavailable` or `InvalidRequest` if the sampler cannot run here, before anything is loaded."""
    capabilities(spec.engine).check_sampler(sampler_kind(spec.sampler))
    chosen = get_sampler(spec.sampler)
    if spec.sampler == "vllm" and spec.sampler_python is not None:
        from engines.sampling.vllm.environment import find_vllm

        find_vllm(Path(spec.sampler_python))
    else:
        chosen.check()


def build_sampler(
    spec: WorkerSpec, engine: TorchEngine, folder: Path, info: BaseModelInfo, tokenizer: Any, aside_folder: Path | None
) -> SamplingEngine:
    """The sampler that the specification names, ready. Raises `Unavailable` if it cannot start.

    Args:
        engine: the trainer, on whose copy of the weights sampler `torch` runs.
        folder: of the base model, for samplers with a copy of their own.
        aside_folder: where sampler `torch` puts requests aside; None = a temporary folder of its own.

    A sampler with weights of its own runs beside rank 0 only; the other ranks get one that does nothing.
    """
    if spec.sampler != "torch" and spec.place is not None and spec.place.rank > 0:
        return Elsewhere()
    if is_address(spec.sampler):
        from engines.sampling.external import ExternalSampler

        return ExternalSampler(
            spec.sampler,
            spec.model,
            info,
            tokenizer,
            sample_logprobs=spec.sample_logprobs,
            max_rows=spec.max_sample_rows,
        )
    if spec.sampler == "vllm":
        from engines.sampling.vllm.sampler import VllmSampler

        return VllmSampler(
            folder,
            info,
            tokenizer,
            python=None if spec.sampler_python is None else Path(spec.sampler_python),
            sample_logprobs=spec.sample_logprobs,
            max_rows=spec.max_sample_rows,
            max_loaded_adapters=spec.max_loaded_adapters,
            max_rank=spec.sampler_max_rank,
            cache_bytes=None if spec.sampler_memory_gib is None else int(spec.sampler_memory_gib * GIB),
            threads=spec.threads,
        )
    from engines.sampling.torch_sampler import TorchSampler

    return TorchSampler(
        engine.model,
        engine.router,
        tokenizer,
        sample_logprobs=spec.sample_logprobs,
        max_rows=spec.max_sample_rows,
        max_tokens=spec.max_sample_tokens,
        max_loaded_adapters=spec.max_loaded_adapters,
        aside_folder=aside_folder,
        lockstep=engine.lockstep,
    )
