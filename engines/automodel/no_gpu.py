"""What NeMo Automodel takes for granted about a machine with a GPU, put right where there is none.

Does nothing where torch finds a GPU. That triton has to go from an environment without one is seen to where the
environment is built (`docker/engine_env.sh`). Not responsible for building models.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def before_import() -> None:
    """Call before the library is imported: its norms are compiled at that moment, which takes a minute on a CPU and
    makes them no faster there."""
    if not torch.cuda.is_available():
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        config: Any = importlib.import_module("torch._dynamo.config")
        config.disable = True  # in case the variable was read already


@contextmanager
def cpu_instead() -> Iterator[None]:
    """Models that are built inside go to the CPU: the library names the current CUDA device, whatever there is."""
    if torch.cuda.is_available():
        yield
        return
    auto_model: Any = importlib.import_module("nemo_automodel._transformers.auto_model")
    finish, current = auto_model.apply_model_infrastructure, torch.cuda.current_device

    def on_cpu(**options: object) -> object:
        return finish(**options | {"device": torch.device("cpu")})

    auto_model.apply_model_infrastructure, torch.cuda.current_device = on_cpu, lambda: 0
    try:
        yield
    finally:
        auto_model.apply_model_infrastructure, torch.cuda.current_device = finish, current
