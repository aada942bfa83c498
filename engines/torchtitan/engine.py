"""The torchtitan engine: the FSDP engine on a decoder that torchtitan builds, shards and computes.

Not responsible for adapters, losses, steps or files, which are those of the other engines.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch

from engines.capabilities import Capabilities
from engines.environments import install_hint
from engines.fsdp.engine import FsdpEngine
from engines.torchtitan.capabilities import CAPABILITIES
from schemas.errors import Unavailable

VERSION = "0.3.0"
"""Of torchtitan: the only one whose names this engine knows."""


class TorchTitanEngine(FsdpEngine):
    """As `FsdpEngine`, for the families that torchtitan has a model of (`families.FAMILIES`).

    On the CPU, and in float32, its attention takes one sequence at a time.
    """

    capabilities: ClassVar[Capabilities] = CAPABILITIES

    @classmethod
    def check(cls) -> None:
        """As `FsdpEngine.check`, and torchtitan is there in its version, with the triton that it imports."""
        super().check()
        hint = install_hint("torchtitan", "engine_python")
        for package in ("torchtitan", "triton"):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"engine 'torchtitan' needs the Python package {package!r}", hint=hint)
        try:
            found = version("torchtitan")
        except PackageNotFoundError:
            found = "unknown"
        if found != VERSION:
            raise Unavailable(f"engine 'torchtitan' needs torchtitan {VERSION}; {found} is installed", hint=hint)

    def _read_model(self, dtype: torch.dtype, device: torch.device) -> Any:
        from engines.torchtitan.loading import load_titan

        dtype = self._agreed(dtype)
        sharded = load_titan(self._folder, dtype, device, self._ranks)
        self.read_bytes = sharded.read_bytes
        return sharded.model
