"""A base model that VeOmni builds, shards and fills, and the proof that it holds what its files say.

Never runs code from the folder. Imports VeOmni. Not responsible for computing with the model.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME
from veomni.arguments import MixedPrecisionConfig
from veomni.arguments.arguments_types import OpsImplementationConfig
from veomni.distributed.parallel_state import init_parallel_state
from veomni.distributed.torch_parallelize import build_parallelize_model
from veomni.models import build_foundation_model, load_model_weights
from veomni.models.auto import build_config
from veomni.utils.device import get_device_type

from engines.fsdp.group import Ranks
from engines.fsdp.loading import Files, ShardedModel, compared, stored_names
from engines.loading_errors import reading_base_model
from engines.torch_engine.precision import convert
from schemas.errors import Unavailable

_log = logging.getLogger(__name__)

_ENGINE = "veomni"
_FUSED = ("rms_norm_implementation", "swiglu_mlp_implementation", "rotary_pos_emb_implementation")
"""Layers whose fused kernels (Liger's, on a GPU) are taken where the package is installed; our losses and adapters
replace the other ones, or are not reached."""


def device_type() -> str:
    """What VeOmni computes on here: it takes an accelerator if there is one, and cannot be told not to."""
    return str(get_device_type())


def load_veomni(folder: Path, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> ShardedModel:
    """The model of the folder in evaluation mode, in the precision of `precision.convert`, sharded over the ranks.

    Raises `Unavailable`; details go to the log only. `read_bytes` are those that this rank has compared.
    """
    if "VEOMNI_VERBOSITY" not in os.environ:  # it prints every layer
        logging.getLogger("veomni").setLevel(logging.WARNING)
    with reading_base_model():
        init_parallel_state(dp_size=ranks.size, dp_shard_size=ranks.size, dp_mode="fsdp2", device_type=device.type)
        files = Files.of(folder, _ENGINE)
        model = _blueprint(folder, device)
        names = stored_names(model, files)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(files.dtype(names[name]))
        convert(model, dtype)
        model.eval().requires_grad_(False)
        model = _filled(model, folder, device, ranks)
        read = sum(compared(name, tensor, files, names[name], ranks) for name, tensor in model.named_parameters())
        _gather_rest(model, device)
    return ShardedModel(model, read)


def _blueprint(folder: Path, device: torch.device) -> Any:
    """VeOmni's model for this architecture: parameters without memory, buffers with their real values."""
    config = build_config(str(folder), trust_remote_code=False)
    if getattr(config, "auto_map", None):  # VeOmni itself would trust it
        raise Unavailable("the base model asks for code of its own (auto_map), which is never run")
    kernels = {
        each.name: "eager" for each in dataclasses.fields(OpsImplementationConfig) if "_implementation" in each.name
    }
    kernels |= {"attn_implementation": "sdpa", "qat_implementation": "none"}
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        kernels |= dict.fromkeys(_FUSED, "liger_kernel")
    try:
        model: Any = build_foundation_model(
            config_path=config,
            weights_path=str(folder),
            torch_dtype="float32",
            ops_implementation=OpsImplementationConfig(**kernels),
            init_device="meta",
        )
    except (KeyError, ValueError) as error:
        _log.exception("VeOmni does not build this model")
        raise Unavailable(
            f"VeOmni has no model of type {config.model_type!r}", hint="use engine 'fsdp' for this base model"
        ) from error
    if (folder / GENERATION_CONFIG_NAME).exists():  # it may name other ends of a sequence than the model's own file
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _filled(model: Any, folder: Path, device: torch.device, ranks: Ranks) -> Any:
    """The model with its weights: whole on one rank, sharded by VeOmni on several."""
    if ranks.size == 1:
        load_model_weights(model, str(folder), init_device=device.type)
        return model
    return build_parallelize_model(
        model,
        init_device="meta",
        weights_path=str(folder),
        mixed_precision=MixedPrecisionConfig(enable=False),
        enable_gradient_checkpointing=False,
        basic_modules=list(getattr(model, "_no_split_modules", None) or []),
        broadcast_model_weights_from_rank0=True,
    )


@torch.no_grad()
def _gather_rest(built: Any, device: torch.device) -> None:
    """Keep whole on every rank what is in no layer: embedding, last norm and output head.

    VeOmni makes the model the root, and passes here call its body: so the root is made ready by one pass of its own,
    and gathered once for all.
    """
    if not isinstance(built, FSDPModule):
        return
    built.set_reshard_after_forward(False, recurse=False)
    built.set_reshard_after_backward(False, recurse=False)
    model: Any = built
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
    model.unshard()
