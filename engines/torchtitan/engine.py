"""The torchtitan engine: the FSDP engine on a decoder that torchtitan builds, shards and computes.

Not responsible for adapters, losses, steps or files, which are those of the other engines.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from engines.fsdp.engine import FsdpEngine
from schemas.errors import Unavailable

VERSION = "0.3.0"
"""Of torchtitan: the only one whose names this engine knows."""
_HINT = "make engine-venv NAME=torchtitan builds an environment that has it"


class TorchTitanEngine(FsdpEngine):
    """As `FsdpEngine`, for the families that torchtitan has a model of (`families.FAMILIES`).

    On the CPU, and in float32, its attention takes one sequence at a time.
    """

    @classmethod
    def check(cls) -> None:
        """As `FsdpEngine.check`, and torchtitan is there in its version, with the triton that it imports."""
        super().check()
        for package in ("torchtitan", "triton"):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"engine 'torchtitan' needs the Python package {package!r}", hint=_HINT)
        try:
            found = version("torchtitan")
        except PackageNotFoundError:
            found = "unknown"
        if found != VERSION:
            raise Unavailable(f"engine 'torchtitan' needs torchtitan {VERSION}; {found} is installed", hint=_HINT)

    def _read_model(self, dtype: torch.dtype, device: torch.device) -> Any:
        from engines.torchtitan.loading import load_titan

        # Machines may differ in what `auto` means on them.
        if self._ranks.any(dtype == torch.float32):
            dtype = torch.float32
        sharded = load_titan(self._folder, dtype, device, self._ranks)
        self.read_bytes = sharded.read_bytes
        return sharded.model
