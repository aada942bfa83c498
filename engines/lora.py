"""LoRA arithmetic: what adapters add to the linears of a base model, and how a pass picks its adapters.

Many adapters share one frozen base model: every adaptable linear is wrapped once, and a pass says through the `Router`
which adapter rules which rows of the batch. Not responsible for which linears those are (`lora_targets`), for training
state (`torch_engine`) or for files (`peft_format`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from schemas.errors import EngineFailure

Pairs = dict[str, tuple[Tensor, Tensor]]
"""Per module path two float32 tensors of the shapes of A [r, in] and B [out, r]: weights, a gradient, a moment."""


def flatten(pairs: Pairs) -> tuple[Tensor, Pairs]:
    """A copy as one contiguous float32 vector [P] (module by module, A before B), and the views of it."""
    flat = torch.cat([tensor.detach().reshape(-1).float() for pair in pairs.values() for tensor in pair])
    return flat, views(flat, pairs)


def views(flat: Tensor, like: Pairs) -> Pairs:
    """The parts of a flat vector [P] in the shapes of `like`; they share its memory."""
    parts: Pairs = {}
    offset = 0
    for name, (down, up) in like.items():
        middle, end = offset + down.numel(), offset + down.numel() + up.numel()
        parts[name] = (flat[offset:middle].view(down.shape), flat[middle:end].view(up.shape))
        offset = end
    return parts


@dataclass(eq=False, slots=True)
class AdapterWeights:
    """One adapter: `pairs[module] = (A [r, in], B [out, r])`, float32, on the device of the module's base weight."""

    pairs: Pairs
    scaling: float
    """alpha / r: the factor on `B @ A`."""

    @property
    def tensors(self) -> list[Tensor]:
        """All A and B, module by module in the order of `pairs`."""
        return [tensor for pair in self.pairs.values() for tensor in pair]


Segments = Sequence[tuple[AdapterWeights | None, slice]]


@dataclass(frozen=True, slots=True)
class Part:
    """What one adapter does to some rows of a linear's input; `gradient` is where A's and B's go in a training pass."""

    rows: slice
    down: Tensor
    up: Tensor
    scaling: float
    gradient: tuple[Tensor, Tensor] | None


@dataclass(eq=False, slots=True)
class Router:
    """Which adapter rules which rows. Shared by all wrapped linears of one model; used by one thread at a time.

    `row_block`: products run over blocks of this many rows (None: over all rows at once), for machines whose product of
    one row depends on how many others there are. `row_unit`: passes have multiples of it, whose rows then have the
    bits that they have among many others (1: off). `least_rows`: adapters' products of fewer rows are filled up to a
    multiple of it too, those of rank 1 whatever their rows.
    """

    segments: Segments | None = None
    gradients: Sequence[Pairs] | None = None
    row_block: int | None = None
    row_unit: int = 16
    least_rows: int = 16
    lora_seconds: float = 0.0
    """Spent on adapters so far, by the clock of this process (on a GPU: to queue the work only)."""
    anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))
    """An input of every linear in a training pass, so that autograd reaches linears whose own input needs none."""
    _cast: tuple[Tensor, Tensor] | None = None

    def missing(self, rows: int, rank: int) -> int:
        """By how many rows an adapter's products are filled up."""
        return -rows % self.row_unit if rows < self.least_rows or rank == 1 else 0

    @contextmanager
    def use(self, segments: Segments, gradients: Sequence[Pairs] | None = None) -> Iterator[None]:
        """Apply these adapters in the passes inside the context (the former choice comes back after it).

        Args:
            segments: adapter (None = base model) and its slice of dim 0 of the batch (of the tokens, where one row
                holds them all); in order, together covering it whole. One segment alone applies to every row whatever
                the shape (mixture-of-experts layers regroup tokens; several adapters in one such pass cannot be told
                apart and raise).
            gradients: makes it a training pass: the backward pass adds each segment's gradient into its entry (modules
                that the adapter lacks are not looked up).
        """
        former = (self.segments, self.gradients)
        self.segments, self.gradients = segments, gradients
        try:
            yield
        finally:
            self.segments, self.gradients = former
            self._cast = None

    def parts(self, name: str, shape: torch.Size) -> list[Part]:
        """The adapters of a linear whose input has this shape. Raises `EngineFailure` if they do not cover it."""
        segments = self.segments or ()
        if not segments:
            return []
        units, rows = segments[-1][1].stop, math.prod(shape[:-1])
        # Linears beside routed experts see rows and tokens as one dimension.
        covered = rows % units == 0 if len(shape) == 2 else units in (shape[0], rows)
        if len(segments) > 1 and not covered:
            raise EngineFailure(f"adapter segments end at row {units} of {shape[0]} at {name}")
        each = rows // units if len(segments) > 1 else 0
        found: list[Part] = []
        for index, (adapter, span) in enumerate(segments):
            pair = None if adapter is None else adapter.pairs.get(name)
            if pair is None or adapter is None:
                continue
            where = slice(span.start * each, span.stop * each) if len(segments) > 1 else slice(0, rows)
            gradient = None if self.gradients is None else self.gradients[index][name]
            found.append(Part(where, pair[0], pair[1], adapter.scaling, gradient))
        return found

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` in the dtype of the base weights; linears that read the same tensor in turn share one copy."""
        if x.dtype == dtype:
            return x
        if self._cast is None or self._cast[0] is not x or self._cast[1].dtype != dtype:
            self._cast = (x, x.to(dtype))
        return self._cast[1]

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x @ weight` in float32, x [rows, k] and weight [k, n] of one dtype."""
        block = self.row_block
        if block is None or x.shape[0] <= block or x.shape[0] % block:
            return torch.mm(x, weight).float()
        y = x.new_empty(x.shape[0], weight.shape[1])
        for start in range(0, x.shape[0], block):
            torch.mm(x[start : start + block], weight, out=y[start : start + block])
        return y.float()


class LoraLinear(nn.Module):
    """`base(x) + scaling * B (A x)`; float32 out, whatever the dtype of the base weight.

    Takes [..., in] and returns the same with `out`. The base linear is frozen; its product runs in the dtype of its
    weight, everything else in float32.
    """

    def __init__(self, base: nn.Linear, name: str, router: Router) -> None:
        super().__init__()
        self.base = base
        self.name = name
        self.router = router

    @property
    def weight(self) -> Tensor:
        """The frozen base weight [out, in] (model code and tied embeddings look at it)."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """The frozen base bias [out], if there is one."""
        return cast("Tensor | None", self.base.bias)

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.base.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Base output plus each segment's own delta. Raises `EngineFailure` if the segments do not cover the rows."""
        parts = self.router.parts(self.name, x.shape)
        if self.router.gradients is not None and torch.is_grad_enabled():
            y = cast(Tensor, _TrainedLinear.apply(x, self.router.anchor, self, parts))  # type: ignore[no-untyped-call]
            return y
        flat = x.reshape(-1, x.shape[-1])
        y = self.product(x, flat)
        if parts:
            flat = flat.float()
        for part in parts:
            _add_delta(y, flat, part, self.router)
        return y.view(*x.shape[:-1], -1)

    def product(self, x: Tensor, flat: Tensor) -> Tensor:
        """The base output [rows, out] float32; `flat` is x as [rows, in]."""
        weight, bias = self.base.weight, self.bias
        if weight.dtype != flat.dtype:
            flat = self.router.cast(x, weight.dtype).reshape(flat.shape)
        y = self.router.product(flat, weight.t())
        return y if bias is None else y.add_(bias)


class _TrainedLinear(torch.autograd.Function):
    """A linear in a training pass: gradients of A and B go straight to their owners, none to the frozen base.

    y = x W^T + s (x A^T) B^T; dx = g W + s (g B) A; dA += s (g B)^T x; dB += s g^T (x A^T).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, linear: LoraLinear, parts: list[Part]) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y = linear.product(x, flat)
        began = time.perf_counter()
        downs = [_add_delta(y, flat, part, linear.router) for part in parts]
        linear.router.lora_seconds += time.perf_counter() - began
        ctx.save_for_backward(flat if parts else None, *downs)
        ctx.linear, ctx.parts, ctx.shape = linear, parts, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flat, *downs = ctx.saved_tensors
        linear: LoraLinear = ctx.linear
        router, weight = linear.router, linear.base.weight
        g = grads[0].reshape(-1, grads[0].shape[-1])
        gx = router.product(g.to(weight.dtype), weight) if ctx.needs_input_grad[0] else None
        began = time.perf_counter()
        for part, down in zip(ctx.parts, downs, strict=True):
            own = _aligned(g[part.rows])
            through = torch.mm(own, part.up).mul_(part.scaling)
            if gx is not None:
                gx[part.rows].addmm_(through, part.down)
            part.gradient[0].addmm_(through.t(), _aligned(flat[part.rows]))
            part.gradient[1].addmm_(own.t(), down, alpha=part.scaling)
        router.lora_seconds += time.perf_counter() - began
        return None if gx is None else gx.view(ctx.shape), None, None, None


def _aligned(rows: Tensor) -> Tensor:
    """The same rows, where they lie on a border of 64 bytes; elsewhere a copy that does.

    A product on the CPU sums in another order off that border, and where a datum lies depends on its company.
    """
    if rows.device.type == "cpu" and rows.data_ptr() % 64:
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


def _add_delta(y: Tensor, x: Tensor, part: Part, router: Router) -> Tensor:
    """Add `scaling * (x A^T) B^T` to the part's rows of y [n, out] in place; returns x A^T of them, x being [n, in]."""
    start, stop = part.rows.start, part.rows.stop
    block = router.row_block or stop - start
    if stop - start <= block:
        return _add_rows(y, x, part, router)
    cuts = (slice(first, min(first + block, stop)) for first in range(start, stop, block))
    return torch.cat([_add_rows(y, x, replace(part, rows=rows), router) for rows in cuts])


def _add_rows(y: Tensor, x: Tensor, part: Part, router: Router) -> Tensor:
    """One block of `_add_delta`.

    Products of few rows take their neighbours in (`Router.missing`), whose results are thrown away: products of fewer
    sum in another order.
    """
    count = part.rows.stop - part.rows.start
    missing = router.missing(count, len(part.down))
    if not missing:
        down = torch.mm(_aligned(x[part.rows]), part.down.t())
        y[part.rows].addmm_(down, part.up.t(), alpha=part.scaling)
        return down
    wanted = count + missing
    if wanted > len(x):
        x_wide, y_wide = (functional.pad(each[part.rows], (0, 0, 0, missing)) for each in (x, y))
        own = slice(0, count)
    else:
        start = min(part.rows.start, len(x) - wanted)
        x_wide, y_wide = (each[start : start + wanted] for each in (x, y))
        own = slice(part.rows.start - start, part.rows.stop - start)
    down = torch.mm(_aligned(x_wide), part.down.t())
    y[part.rows] = torch.addmm(y_wide, down, part.up.t(), alpha=part.scaling)[own]
    return _aligned(down[own])
