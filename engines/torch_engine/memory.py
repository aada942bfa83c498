"""How much memory training takes, measured on the loaded model, and what is refused because it could never fit.

How an engine uses it: `estimate_memory` once after loading; `adapter_budget` and `activation_room` divide what is free;
`checkpoints_pass` for every pass, `refuse_long_datum` for every datum before any is computed. Not responsible for the
adapters' own budget (`adapter_pool.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from engines.lora import Router, views
from engines.lora_targets import available_families, expected_shapes, init_adapter
from engines.torch_engine.checkpointing import decoder_layers
from engines.torch_engine.hardware import device_memory
from schemas.base_model_info import MemoryEstimate
from schemas.errors import InvalidRequest
from schemas.operations import LoraSpec

Checkpointing = Literal["off", "on", "auto"]

PER_ADAPTER_PARAMETER = 4 + 4 + 8 + 4
"""float32 weight, gradient and two moments, and the gradient of the operation that is open."""
_PROBE_RANK = 8
_PROBE_TOKENS = (32, 64)
_HEAD_BYTES = {"cpu": 2 * (32 << 20), "cuda": 2 * (512 << 20)}
"""A block of logits and its gradient."""
_GIB = 1 << 30


def estimate_memory(model: Any, router: Router, *, head: int | None = None) -> MemoryEstimate:
    """What the model and its training need, in bytes. Call after `lora_targets.attach`, with the base in place.

    Activations are not derived from the architecture but counted: two tiny training passes run, and every tensor that
    autograd keeps is measured, weights apart. Each pass also has a working set of about one layer. Takes about as long
    as a hundred tokens forward.

    Args:
        head: bytes that the output head holds at a time; None = two blocks of logits of the usual size.
    """
    device = model.get_input_embeddings().weight.device
    layers = max(1, len(decoder_layers(model)))
    width = int(model.get_input_embeddings().weight.shape[1])
    spec = _probe_spec(model)
    with _probe_pass(model, router, spec) as forward:
        short, long = (_kept_bytes(model, forward, tokens) for tokens in _PROBE_TOKENS)
    first, second = _PROBE_TOKENS
    pairs = max(0, round((long / second - short / first) / (second - first)))
    kept = max(0, round(short / first - pairs * first))
    total, free = device_memory(device)
    return MemoryEstimate(
        base=sum(tensor.numel() * tensor.element_size() for tensor in _own_tensors(model)),
        per_adapter_parameter=PER_ADAPTER_PARAMETER,
        adapter_parameters_per_rank=sum(
            sum(down) + sum(up) - 2 for down, up in expected_shapes(model, LoraSpec(1, 0, *_flags(model))).values()
        ),
        per_token=kept + kept // layers,
        per_token_checkpointed=min(kept + kept // layers, 4 * width * layers + 2 * kept // layers),
        per_token_pair=pairs,
        layers=layers,
        head=_HEAD_BYTES[device.type] if head is None else head,
        total=total,
        free=free,
    )


def adapter_budget(memory: MemoryEstimate, given: int | None) -> int | None:
    """Bytes that live training runs may take in memory: what was given, else half of what is free.

    None = no limit is known (nor is the memory of the machine).
    """
    if given is not None:
        return given
    return memory.free // 2 if memory.free else None


def activation_room(memory: MemoryEstimate, adapters: int | None) -> int | None:
    """Bytes that one training pass may take: three fifths of what is free beside the adapters' budget.

    The rest is for sampling and the process itself. None = the memory of the machine is not known.
    """
    if not memory.free:
        return None
    return max(0, memory.free - (adapters or 0)) * 3 // 5


def checkpoints_pass(
    memory: MemoryEstimate, lengths: Sequence[int], room: int | None, mode: Checkpointing = "auto"
) -> bool:
    """Whether a training pass over datums of these lengths runs with gradient checkpointing.

    Depends on the lengths only, never on what happens to be free at the moment.
    """
    if mode == "auto":
        return room is not None and memory.training_pass(lengths) > room
    return mode == "on"


def refuse_long_datum(
    memory: MemoryEstimate, index: int, length: int, room: int | None, mode: Checkpointing = "auto"
) -> None:
    """Raise `InvalidRequest` if a training pass over datum `index` alone cannot fit, even checkpointed (if allowed)."""
    if room is None:
        return
    needed = memory.training_pass([length], checkpointing=mode != "off")
    if needed <= room:
        return
    off = " (gradient_checkpointing is off)" if mode == "off" else ""
    raise InvalidRequest(
        f"data[{index}].model_input has {length} tokens; training on them takes {needed / _GIB:.2f} GiB of memory"
        f"{off}, and at most {room / _GIB:.2f} GiB can be had, enough for {_longest(memory, room, mode)} tokens",
        field=f"data[{index}].model_input",
        hint="shorten the datum, or serve on a machine with more memory",
        code="datum_too_large",
    )


def _longest(memory: MemoryEstimate, room: int, mode: Checkpointing) -> int:
    """The greatest length that fits, by halving."""
    low, high = 0, 1 << 30
    while high - low > 1:
        middle = (low + high) // 2
        fits = memory.training_pass([middle], checkpointing=mode != "off") <= room
        low, high = (middle, high) if fits else (low, middle)
    return low


def _flags(model: nn.Module) -> tuple[bool, bool, bool]:
    """`train_attn`, `train_mlp`, `train_unembed` of an adapter on everything."""
    families = available_families(model)
    return "attn" in families, "mlp" in families, "unembed" in families


def _probe_spec(model: nn.Module) -> LoraSpec:
    return LoraSpec(_PROBE_RANK, 0, *_flags(model))


@contextmanager
def _probe_pass(model: Any, router: Router, spec: LoraSpec) -> Iterator[Callable[[int], Tensor]]:
    """Gives a function: the training forward of the body over n tokens, as one sequence of one adapter."""
    weights = init_adapter(model, spec)
    flat = torch.zeros(sum(tensor.numel() for tensor in weights.tensors), device=weights.tensors[0].device)
    device = model.get_input_embeddings().weight.device

    def forward(tokens: int) -> Tensor:
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        hidden: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    with router.use([(weights, slice(0, 1))], [views(flat, weights.pairs)]), torch.enable_grad():
        yield forward


def _kept_bytes(model: nn.Module, forward: Callable[[int], Tensor], tokens: int) -> int:
    """Bytes that autograd keeps for the backward pass over so many tokens: distinct memory, without the model's own."""
    # Slices of a sharded model (DTensors) have no memory at an address of their own.
    plain = [tensor for tensor in _own_tensors(model) if not hasattr(tensor, "to_local")]
    own = {tensor.untyped_storage().data_ptr() for tensor in plain}
    kept: dict[int, tuple[Tensor, int]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward(tokens)
    del output
    return sum(size for _, size in kept.values())


def _own_tensors(model: nn.Module) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values())
