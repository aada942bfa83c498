"""Mixed precision of the frozen base: products with its weights in bfloat16, everything else in float32.

The residual stream, norms, rotary embeddings, softmax, logits and the adapters stay float32; only the operands of a
product with a base weight are rounded, so that an error does not build up from layer to layer. Linears that carry an
adapter cast by themselves (`engines/lora.py`); the others get a class or hooks from here. Not responsible for loading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from schemas.errors import InvalidRequest

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LEAST_CAPABILITY = (8, 0)
"""Of CUDA devices whose tensor cores multiply bfloat16; older ones emulate it."""


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of base weights: `auto` takes bfloat16 only where the hardware has units of its own for it.

    Those are AMX tiles on a CPU and tensor cores of compute capability 8.0 or more on CUDA. A CPU with avx512_bf16
    alone stays float32: bfloat16 products are about twice as fast there, but it must be asked for. Raises
    `InvalidRequest` for another name; float16 is not offered, for without loss scaling its gradients underflow.
    """
    if dtype == "auto":
        return torch.bfloat16 if _fast_bfloat16(device) else torch.float32
    if dtype not in _DTYPES:
        raise InvalidRequest(f"dtype is {dtype!r}; it must be auto, {' or '.join(_DTYPES)}", field="dtype")
    return _DTYPES[dtype]


def _fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
    able = torch.cpu.get_capabilities()
    return bool(able.get("amx_tile") and able.get("amx_bf16"))


def weights_dtype(model: Any) -> torch.dtype:
    """The dtype of the base weights of a converted model (`model.dtype` is that of whatever parameter comes first)."""
    dtype: torch.dtype = model.get_output_embeddings().weight.dtype
    return dtype


def convert(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Put a freshly loaded model into the precision described above, in place; returns it. Call it before
    `lora_targets.attach`.

    Weights of plain `nn.Linear` (the head and an embedding tied to it included) and stacked weights of fused experts go
    to `dtype`. Other embeddings keep the dtype they are stored in. All other floating parameters and buffers go to
    float32, and so do linears of classes of their own, whose arithmetic is unknown. Every module then takes and
    gives float32. With float32, everything is float32 and no module is touched. Weights are converted one by one:
    memory for one more weight is needed, not for one more model. A second call with the same dtype changes nothing.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if dtype == torch.float32:
        return model.to(torch.float32)
    fused = {name: module for name, module in model.named_modules() if _is_fused(name, module)}
    kept = {id(module.weight): module.weight.dtype for module in tables}
    kept |= {id(module.weight): dtype for module in model.modules() if type(module) in (nn.Linear, MixedLinear)}
    kept |= {id(p): dtype for module in fused.values() for p in module.parameters(recurse=False)}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(kept.get(id(tensor), torch.float32))
    for parent in list(model.modules()):
        for leaf, child in parent.named_children():
            if type(child) is nn.Linear:
                setattr(parent, leaf, MixedLinear(child))
    for module in fused.values():
        if not module._forward_pre_hooks:
            module.register_forward_pre_hook(_Inward(dtype), with_kwargs=True)
            module.register_forward_hook(_outward)
    for table in tables:
        if table.weight.dtype != torch.float32 and not table._forward_hooks:
            table.register_forward_hook(_outward)
    return model


class MixedLinear(nn.Linear):
    """A frozen linear whose product runs in the dtype of its weight, with float32 [..., in] in and [..., out] out."""

    def __init__(self, linear: nn.Linear) -> None:
        """Takes over the parameters of `linear` (the same objects: ties stay)."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """The product, then the bias in float32."""
        y = functional.linear(input.to(self.weight.dtype), self.weight).float()
        return y if self.bias is None else y + self.bias


class _Inward:
    """Casts floating tensors among the arguments of a module."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(_cast(value, self._dtype) for value in args), {k: _cast(v, self._dtype) for k, v in kwargs.items()}


def _outward(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(_cast(value, torch.float32) for value in output)
    return _cast(output, torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _is_fused(name: str, module: nn.Module) -> bool:
    """Whether a module holds the weights of several experts stacked in 3-D parameters."""
    if not ("experts" in name.lower().split(".") or "Experts" in type(module).__name__):
        return False
    return any(p.dim() == 3 for p in module.parameters(recurse=False))
