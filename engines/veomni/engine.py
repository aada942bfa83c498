"""The engine on VeOmni: its models, kernels and sharding, under the adapters, losses and optimizers of this server.

VeOmni builds the model with its own layers, shards it (FSDP2) and reads the weights; everything after that is
`FsdpEngine`'s. Runs in an environment of its own (`make engine-venv NAME=veomni`). Its modules are imported when a
model is loaded: they take seconds.
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import torch

from engines.capabilities import Capabilities
from engines.environments import install_hint, require_versions
from engines.fsdp.engine import FsdpEngine
from engines.veomni.capabilities import CAPABILITIES
from schemas.errors import InvalidRequest, Unavailable

TESTED = {"veomni": "0.1.12", "transformers": "5.9.0"}
"""VeOmni's models are made from the source of one version of transformers."""


class VeomniEngine(FsdpEngine):
    """As `FsdpEngine`, on a model that VeOmni has built; one rank or several."""

    capabilities: ClassVar[Capabilities] = CAPABILITIES

    @classmethod
    def check(cls) -> None:
        """VeOmni, and the transformers that it was made from, are installed; nothing is there that breaks them."""
        require_versions("veomni", TESTED)
        hint = install_hint("veomni", "engine_python")
        if importlib.util.find_spec("torchvision") is not None and torch.version.cuda is None:
            raise Unavailable("engine 'veomni': torchvision does not load beside a CPU build of torch", hint=hint)
        super().check()

    def _read_model(self, dtype: torch.dtype, device: torch.device) -> Any:
        from engines.veomni.loading import device_type, load_veomni

        if device.type != device_type():
            raise InvalidRequest(
                f"device is {device.type!r}; engine 'veomni' accepts on this machine: auto, {device_type()}",
                field="device",
            )
        dtype = self._agreed(dtype)
        loaded = load_veomni(self._folder, dtype, device, self._ranks)
        self.read_bytes = loaded.read_bytes
        return loaded.model
