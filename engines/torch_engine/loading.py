"""Loading a frozen base model from a local Hugging Face folder, and what there is to know about it.

Never runs code from the folder. Not responsible for getting the folder (`engines/base_models.py`) or for adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from engines.loading_errors import reading_base_model
from engines.lora_targets import available_families, linear_families
from engines.torch_engine.hardware import peak_flops
from engines.torch_engine.head import OutputHead
from engines.torch_engine.precision import convert, weights_dtype
from schemas.base_model_info import BaseModelInfo, Linear
from schemas.errors import InvalidRequest, Unavailable

_UNBOUNDED_CONTEXT = 1 << 20
"""Context of architectures without a maximum (recurrent ones): a bound must exist, for memory's sake."""


def resolve_device(device: str) -> torch.device:
    """`auto` = the first CUDA device if there is one, else the CPU. Raises `InvalidRequest` for another kind."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"device is {device!r}; it must be auto, cpu or cuda[:index]", field="device")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise Unavailable("device is cuda, but torch finds no CUDA device on this machine")
    return resolved


def load_base_model(folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model of the folder in evaluation mode and in the precision of `precision.convert`.

    Weights are read in the dtype in which they are stored, so that nothing is rounded that is to be float32, and a
    bfloat16 checkpoint never takes the memory of a float32 one. Raises `Unavailable`; details go to the log only.
    """
    with reading_base_model():
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", trust_remote_code=False, use_safetensors=True, local_files_only=True
        )
        _restore_float32(model, folder)
        return convert(model, dtype).to(device)


def _restore_float32(model: nn.Module, folder: Path) -> None:
    """Read again what is stored in float32 but was rounded to the dtype that the checkpoint's configuration names."""
    parameters = dict(model.named_parameters())
    if all(parameter.dtype == torch.float32 for parameter in parameters.values()):
        return
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                parameter = parameters.get(name)
                if parameter is None or parameter.dtype == torch.float32:
                    continue
                stored = tensors.get_slice(name)
                if stored.get_dtype() == "F32" and stored.get_shape() == list(parameter.shape):
                    parameter.data = tensors.get_tensor(name)


def freeze(model: nn.Module) -> None:
    """Evaluation mode, no gradients, no dropout anywhere (some architectures apply it functionally)."""
    model.eval()
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def check_head(model: Any, head: OutputHead) -> None:
    """Raise `Unavailable` unless hidden states through our head give the model's own logits.

    An architecture that treats its logits in a way of its own must be refused, not trained on wrong numbers.
    """
    if model.base_model is model:
        raise Unavailable(f"{type(model).__name__} has no backbone apart from its head; it cannot be trained here")
    ids = (torch.arange(8, device=model.get_input_embeddings().weight.device) % head.vocab_size).unsqueeze(0)
    with torch.no_grad():
        own = model(input_ids=ids, use_cache=False).logits[0].float()
        ours = head.logits(model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0])
    tolerance = 1e-4 if weights_dtype(model) == torch.float32 else 2e-2
    if own.shape != ours.shape or not bool((own - ours).abs().max() <= tolerance * own.abs().max().clamp(min=1e-6)):
        raise Unavailable(f"{type(model).__name__} transforms its logits in a way that is not supported")


def describe(model: Any, head: OutputHead) -> BaseModelInfo:
    """What the edge needs to know about the model; measures the peak of its products.

    Not known here, and left at their defaults: `packed`, `batch_invariant`, `memory` (`memory.estimate_memory`).
    """
    config, families = model.config.get_text_config(), available_families(model)
    return BaseModelInfo(
        vocab_size=min(head.vocab_size, int(model.get_input_embeddings().weight.shape[0])),
        context_length=context_length(model),
        dtype=str(weights_dtype(model)).removeprefix("torch."),
        num_layers=int(config.num_hidden_layers),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        eos_token_ids=eos_token_ids(model),
        adapter_families=families,
        micro_batch_tokens=micro_batch_tokens(model),
        peak_flops=peak_flops(model),
        linears=tuple(linear for linear in _linears(model) if linear.family in families),
    )


def _linears(model: Any) -> Iterator[Linear]:
    for name, family in linear_families(model).items():
        module = model.get_submodule(name)
        yield Linear(name, family, int(module.in_features), int(module.out_features))


def context_length(model: Any) -> int:
    """The most positions of a sequence."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or _UNBOUNDED_CONTEXT)


def eos_token_ids(model: Any) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config's if it names any, else the model config's."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    return tuple(int(token) for token in eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),)


def micro_batch_tokens(model: Any) -> int:
    """Tokens of a turn that fill the device: beyond them products get no faster, and other work waits longer."""
    weight = model.get_output_embeddings().weight
    if weight.device.type == "cuda":
        return 8192
    return 512 if weight.dtype == torch.float32 else 1024
