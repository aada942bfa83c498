"""The worker groups of a normal server: child processes on this machine, made as the settings say.

Not responsible for starting them (`workers/runtime.py`). The workers import torch in their own processes, not here.
"""

from __future__ import annotations

import os

from app.services.core import GroupFactory
from app.settings import Settings
from engines.machine import compute_threads
from workers.group import WorkerGroup
from workers.local import LocalWorkerGroup
from workers.spec import WorkerSpec


def local_groups(settings: Settings) -> GroupFactory:
    """A factory of groups that are not started yet, one for each base model."""

    def make(name: str, source: str | None) -> WorkerGroup:
        return LocalWorkerGroup(worker_spec(settings, name, source), start_timeout=settings.worker_start_timeout)

    return make


def worker_spec(settings: Settings, name: str, source: str | None) -> WorkerSpec:
    """What the ranks of a base model load, and how."""
    return WorkerSpec(
        model=name,
        source=source,
        data_dir=str(settings.data_dir),
        engine=settings.engine,
        engine_python=None if settings.engine_python is None else str(settings.engine_python.expanduser()),
        dtype=settings.dtype,
        device=settings.device,
        threads=compute_threads(settings.threads, settings.ranks, os.environ),
        ranks=settings.ranks,
        tensor_parallel=settings.tensor_parallel,
        rank_timeout=settings.rank_timeout,
        sample_logprobs=settings.sample_logprobs,
        max_sample_rows=settings.max_sample_rows,
        max_sample_tokens=settings.max_sample_tokens,
        sampler=settings.sampler,
        sampler_python=None if settings.sampler_python is None else str(settings.sampler_python.expanduser()),
        sampler_memory_gib=settings.sampler_memory_gib,
        sampler_max_rank=settings.sampler_max_rank,
        batch_invariant=settings.batch_invariant,
        micro_batch_tokens=settings.micro_batch_tokens,
        gradient_checkpointing=settings.gradient_checkpointing,
        adapter_memory_gib=settings.adapter_memory_gib,
        scratch=str(settings.scratch_dir),
    )
