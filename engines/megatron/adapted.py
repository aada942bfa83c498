"""Many adapters behind megatron-core's fused linears: one base product, and for q, k, v (gate, up) an adapter each.

The fused layer stays megatron's (`ColumnParallelLinear`, `RowParallelLinear`); what an adapter adds goes to the places
of its outputs. Weights and gradients of adapters are whole and in Hugging Face's order on every rank: where ranks share
a layer, each adds its own part to the gradient, and the sum over the ranks is the gradient.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from engines.lora import LoraLinear, Part, Router
from engines.megatron.families import Slice
from schemas.errors import EngineFailure


class Place(nn.Linear):
    """A linear of the Hugging Face model, as the part of a fused one that it is: shapes and a name, no product.

    `lora_targets.attach` finds it by its path, and puts its own layer there; `AdaptedLinear` looks the adapters up in
    that.
    """

    def __init__(self, fused: nn.Module, place: Slice) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = place.in_features, place.out_features
        self._fused, self._place = (fused,), place  # a tuple: the fused layer is a module of the model elsewhere

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """This rank's part of the weight, of Hugging Face's rows (a copy where they are not next to each other)."""
        fused = cast(Tensor, self._fused[0].weight)
        place = self._place
        rows = fused.view(place.groups, place.width, -1)[:, place.start : place.stop]
        return rows.reshape(-1, fused.shape[1])

    @property
    def bias(self) -> None:  # type: ignore[override]
        """Biases are added by the fused layer."""
        return None

    def forward(self, input: Tensor) -> Tensor:
        """Never called: the product is the fused layer's."""
        raise EngineFailure("a part of a fused linear has no product of its own")


class AdaptedLinear(nn.Module):
    """In place of a fused linear: its output, and the adapters' on top; float32 out, whatever the base weight is.

    Runs once adapters are attached (`lora_targets.attach`).

    Args:
        fused: megatron's layer, [s, b, in] -> ([s, b, out], bias or None).
        at: the module of the Hugging Face tree in which the parts are.
        places: which part is whose.
        group: the ranks that share the layer; None = this one alone.
        row: whether they share its inputs (else its outputs).
    """

    def __init__(self, fused: nn.Module, at: nn.Module, places: Sequence[Slice], group: Any, *, row: bool) -> None:
        super().__init__()
        self.fused = fused
        self._at, self._places = (at,), tuple(places)
        self._group, self._row = group, row

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Raises `EngineFailure` if several adapters meet in a batch of several rows."""
        parts: list[LoraLinear] = [getattr(self._at[0], place.leaf) for place in self._places]
        router = parts[0].router
        y, bias = self.fused(router.cast(x, cast(Tensor, self.fused.weight).dtype))
        found = self._found(parts, router, x)
        y = y.float()
        if self._group is None:
            return _add(y, x, router, found), bias
        return self._shared(y, x, router, found), bias

    def _found(self, parts: Sequence[LoraLinear], router: Router, x: Tensor) -> list[tuple[Part, Slice]]:
        if x.shape[1] > 1 and len(router.segments or ()) > 1:
            raise EngineFailure("several adapters in a batch of several rows")
        shape = torch.Size((1, x.shape[0] * x.shape[1], x.shape[2]))
        return [
            (part, place)
            for lora, place in zip(parts, self._places, strict=True)
            for part in router.parts(lora.name, shape)
        ]

    def _shared(self, y: Tensor, x: Tensor, router: Router, found: list[tuple[Part, Slice]]) -> Tensor:
        """As `_add`, where several ranks share the layer."""
        from megatron.core.tensor_parallel import mappings

        if not self._row:
            return _add(y, mappings.copy_to_tensor_model_parallel_region(x, group=self._group), router, found)
        own = _add(torch.zeros_like(y), x, router, found)
        together: Tensor = mappings.reduce_from_tensor_model_parallel_region(own, group=self._group)
        return y + together


def _add(y: Tensor, x: Tensor, router: Router, found: list[tuple[Part, Slice]]) -> Tensor:
    """y [s, b, out] with what adapters make of x [s, b, in]; in a training pass their gradients go to their places."""
    if router.gradients is not None and torch.is_grad_enabled():
        return cast(Tensor, _Added.apply(y, x, router.anchor, router, found))  # type: ignore[no-untyped-call]
    if found:
        _deltas(y, x.reshape(-1, x.shape[-1]).float(), found)
    return y


def _deltas(y: Tensor, flat: Tensor, found: Sequence[tuple[Part, Slice]]) -> list[Tensor]:
    """Add every part's `scaling * (x A^T) B^T` to y in place, flat being x as [n, in]; returns the x A^T."""
    downs = []
    for part, place in found:
        down = torch.mm(flat[part.rows], part.down[:, place.columns].t())
        delta = torch.mm(down, part.up[place.rows].t())
        into = place.of(y.view(flat.shape[0], -1))[part.rows]
        into.add_(delta.view(into.shape), alpha=part.scaling)
        downs.append(down)
    return downs


class _Added(torch.autograd.Function):
    """y + s (x A^T) B^T per part; dx = s (g B) A; dA += s (g B)^T x; dB += s g^T (x A^T).

    On a rank that has some rows of B or some columns of A, these are its part of the sums.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, anchor: Tensor, router: Router, found: Any) -> Tensor:
        began = time.perf_counter()
        flat = x.reshape(-1, x.shape[-1]).float()
        out = y.clone(memory_format=torch.contiguous_format)
        downs = _deltas(out, flat, found)
        ctx.save_for_backward(flat if found else None, *downs)
        ctx.found, ctx.router, ctx.shape = found, router, x.shape
        router.lora_seconds += time.perf_counter() - began
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        began = time.perf_counter()
        flat, *downs = ctx.saved_tensors
        g = grads[0].reshape(-1, grads[0].shape[-1])
        gx = torch.zeros_like(flat) if ctx.found and ctx.needs_input_grad[1] else None
        for (part, place), down in zip(ctx.found, downs, strict=True):
            own = place.of(g)[part.rows].reshape(down.shape[0], -1)
            through = torch.mm(own, part.up[place.rows]).mul_(part.scaling)
            if gx is not None:
                gx[part.rows].addmm_(through, part.down[:, place.columns])
            part.gradient[0][:, place.columns].addmm_(through.t(), flat[part.rows])
            part.gradient[1][place.rows].addmm_(own.t(), down, alpha=part.scaling)
        ctx.router.lora_seconds += time.perf_counter() - began
        return grads[0], None if gx is None else gx.view(ctx.shape), None, None, None
