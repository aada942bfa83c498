"""The engine that computes with megatron-core: its `GPTModel` and its layers, our adapters, losses and optimizer.

Every rank gets every call; datums are shared by the ranks, or by groups of ranks that share the tensors of the model
(`tensor_parallel`). Not responsible for starting ranks. Runs on the CPU over gloo; see `docs/engines.md` for GPUs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from engines.capabilities import Capabilities
from engines.fsdp.engine import FsdpEngine
from engines.megatron.capabilities import CAPABILITIES
from engines.megatron.cpu import without_gpu
from schemas.errors import InvalidRequest, Unavailable

VERSION = "0.16.1"
"""Of megatron-core; other versions differ in names that are used here."""


class MegatronEngine(FsdpEngine):
    """As `FsdpEngine`, on a model that is whole on every rank, or shared by `tensor_parallel` of them.

    Args:
        tensor_parallel: how many neighbouring ranks share every linear; a divisor of the number of ranks.
    """

    capabilities: ClassVar[Capabilities] = CAPABILITIES

    def __init__(self, model_folder: Path, *, tensor_parallel: int = 1, **options: Any) -> None:
        super().__init__(model_folder, **options)
        if tensor_parallel < 1 or self._place.ranks % tensor_parallel:
            raise InvalidRequest(
                f"tensor_parallel is {tensor_parallel}; it must be a divisor of the {self._place.ranks} ranks",
                field="tensor_parallel",
            )
        self._tensor_parallel = tensor_parallel

    @classmethod
    def check(cls) -> None:
        """As `FsdpEngine.check`, and megatron-core is installed in the version that is known here."""
        super().check()
        found = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
        version = importlib.metadata.version("megatron-core") if found else None
        if version != VERSION:
            raise Unavailable(
                f"engine 'megatron' needs megatron-core {VERSION}; this environment has {version or 'none'}",
                hint="make engine-venv NAME=megatron",
            )

    def _read_model(self, dtype: torch.dtype, device: torch.device) -> Any:
        without_gpu()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import initialize_rng_tracker

        from engines.megatron.model import load_model

        dtype = self._agreed(dtype)
        self._ranks = replace(self._ranks, per_replica=self._tensor_parallel)
        if not parallel_state.model_parallel_is_initialized():
            minutes = max(1, math.ceil(self._place.timeout / 60))
            parallel_state.initialize_model_parallel(self._tensor_parallel, distributed_timeout_minutes=minutes)
        if parallel_state.get_tensor_model_parallel_world_size() != self._tensor_parallel:
            raise Unavailable("this process computes a model with another tensor_parallel already")
        # There is no dropout: the tracker of random states, which would ask for a GPU, has nothing to do.
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        model, self.read_bytes = load_model(
            self._folder, dtype, device, parallel_state.get_tensor_model_parallel_group()
        )
        return model

    def _gathered_bytes(self) -> int:
        return 0  # nothing is gathered
