"""The engine on NVIDIA's NeMo Automodel: its models and its sharding, under the adapters, losses and optimizers of this
server.

Automodel builds the model with its own layers, reads its weights and, on several ranks, shards it (FSDP2); everything
after that is `FsdpEngine`'s. Runs in an environment of its own (`make engine-venv NAME=automodel`). The library is
imported when a model is loaded: that takes seconds.
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import torch

from engines.automodel.capabilities import CAPABILITIES
from engines.capabilities import Capabilities
from engines.environments import install_hint, require_versions
from engines.fsdp.engine import FsdpEngine
from schemas.errors import InvalidRequest, Unavailable

TESTED = {"nemo_automodel": "0.7.0", "transformers": "5.18.0"}
"""Names that the loading takes from the library come and go between its versions."""


class AutomodelEngine(FsdpEngine):
    """As `FsdpEngine`, on a model that NeMo Automodel has built; one rank or several."""

    capabilities: ClassVar[Capabilities] = CAPABILITIES

    @classmethod
    def check(cls) -> None:
        """Automodel and the transformers that it pins are installed, and nothing is there that breaks its import."""
        require_versions("automodel", TESTED)
        hint = install_hint("automodel", "engine_python")
        if torch.version.cuda is None and importlib.util.find_spec("triton") is not None:
            raise Unavailable("engine 'automodel': triton breaks the library beside a CPU build of torch", hint=hint)
        super().check()

    def _read_model(self, dtype: torch.dtype, device: torch.device) -> Any:
        own = "cuda" if torch.cuda.is_available() else "cpu"
        if device.type != own:  # the library takes a GPU if there is one, and cannot be told not to
            raise InvalidRequest(
                f"device is {device.type!r}; engine 'automodel' accepts on this machine: auto, {own}", field="device"
            )
        dtype = self._agreed(dtype)
        from engines.automodel.loading import load_automodel

        loaded = load_automodel(self._folder, dtype, device, self._ranks)
        self.read_bytes = loaded.read_bytes
        return loaded.model
