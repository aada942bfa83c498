"""What megatron-core needs in order to run where there is no GPU. Nothing here is used where there is one."""

from __future__ import annotations

import torch


def without_gpu() -> None:
    """Answer "which device?" with the CPU: rotary angles and buffers of attention ask torch.cuda, whatever the device.

    For this process, for good; without a GPU torch itself has nothing to answer. Does nothing where there is one.
    """
    if not torch.cuda.is_available():
        torch.cuda.current_device = _the_cpu  # type: ignore[assignment]


def _the_cpu() -> torch.device:
    return torch.device("cpu")
