"""LoRA geometry and arithmetic: which modules are adapted, how an adapter starts, how a pass picks its adapters.

Many adapters share one frozen base model: every adaptable linear is wrapped once (`attach`), and a pass says through
the `Router` which adapter rules which rows of the batch. Not responsible for training state (`torch_engine`) or for
files (`peft_format`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from schemas.errors import EngineFailure, InvalidRequest
from schemas.operations import LORA_ALPHA, LoraSpec

Family = Literal["attn", "mlp", "unembed"]
FAMILIES: tuple[Family, ...] = ("attn", "mlp", "unembed")

_ATTENTION = re.compile(r"(^|_)(attn|attention)(_|$)")
_MLP = re.compile(r"(^|_)(mlp|ffn|feed_forward|feedforward|experts?|moe)(_|$)")
_MLP_LEAVES = frozenset({"fc1", "fc2"})
_ROUTER_LEAVES = frozenset({"gate", "router", "shared_expert_gate", "gate_network"})
_OTHER_TOWERS = frozenset({"visual", "vision_tower", "vision_model", "audio_tower", "audio_model"})


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


@dataclass(eq=False, slots=True)
class Router:
    """Which adapter rules which rows. Shared by all wrapped linears of one model; used by one thread at a time."""

    segments: Segments | None = field(default=None)

    @contextmanager
    def use(self, segments: Segments) -> Iterator[None]:
        """Apply these adapters in the passes inside the context (the former choice comes back after it).

        Args:
            segments: adapter (None = base model) and its slice of dim 0 of the batch; in order, together covering
                it whole. One segment alone applies to every row whatever the shape (mixture-of-experts layers
                regroup tokens; several adapters in one such pass cannot be told apart and raise).
        """
        former, self.segments = self.segments, segments
        try:
            yield
        finally:
            self.segments = former


class LoraLinear(nn.Module):
    """`base(x) + scaling * B (A x)`; the delta is computed in float32 and added in the dtype of the base's output.

    Takes [B, T, in] or [rows, in] and returns the same with `out`. The base linear is frozen.
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
        """Base output plus each segment's own delta. Raises `EngineFailure` if several segments do not cover dim 0."""
        y = cast(Tensor, self.base(x))
        segments = self.router.segments
        if not segments or all(self._pair(adapter) is None for adapter, _ in segments):
            return y
        if len(segments) == 1:
            return self._add(y, x, segments[0][0])
        if segments[-1][1].stop != x.shape[0]:
            raise EngineFailure(f"adapter segments end at row {segments[-1][1].stop} of {x.shape[0]} at {self.name}")
        return torch.cat([self._add(y[rows], x[rows], adapter) for adapter, rows in segments])

    def _pair(self, adapter: AdapterWeights | None) -> tuple[Tensor, Tensor] | None:
        return None if adapter is None else adapter.pairs.get(self.name)

    def _add(self, y: Tensor, x: Tensor, adapter: AdapterWeights | None) -> Tensor:
        pair = self._pair(adapter)
        if pair is None or adapter is None:
            return y
        delta = functional.linear(functional.linear(x.float(), pair[0]), pair[1]) * adapter.scaling
        return y + delta.to(y.dtype)


def linear_families(model: nn.Module) -> dict[str, Family]:
    """Every adaptable linear of the model (wrapped or not) by its module path, with its family, in model order."""
    head = _head(model)
    modules = dict(model.named_modules())
    wrapped = {f"{name}.base" for name, module in modules.items() if isinstance(module, LoraLinear)}
    found: dict[str, Family] = {}
    for name, module in modules.items():
        if not isinstance(module, nn.Linear | LoraLinear) or name in wrapped:
            continue
        family: Family | None = "unembed" if module is head else _family(name)
        if family is not None:
            found[name] = family
    return found


def available_families(model: nn.Module) -> frozenset[Family]:
    """The families that can be adapted whole: those with linears, less `mlp` where routed experts are fused weights."""
    found = set(linear_families(model).values())
    if _fused_experts(model):
        found.discard("mlp")
    return frozenset(found)


def attach(model: nn.Module) -> Router:
    """Freeze the model and wrap every adaptable linear in place, the output head included; call once per model.

    Module paths stay as they are. A head tied to the input embedding stays tied: the adapter sits beside the weight,
    so it never touches the embedding.
    """
    router = Router()
    model.requires_grad_(False)
    for name in linear_families(model):
        parent_name, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent_name), leaf, LoraLinear(_linear(model, name), name, router))
    return router


def resolve_targets(model: nn.Module, spec: LoraSpec) -> list[str]:
    """Module paths that an adapter of this geometry covers, in model order.

    Raises `InvalidRequest` if nothing is wanted or a wanted family has no linear layer in this model.
    """
    flags = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
    if not any(flags.values()):
        raise InvalidRequest("at least one of train_attn, train_mlp, train_unembed must be true", field="lora_config")
    if spec.rank < 1:
        raise InvalidRequest(f"rank is {spec.rank}; it must be at least 1", field="lora_config.rank")
    available = available_families(model)
    for family in FAMILIES:
        if flags[family] and family not in available:
            reason = (
                "routed experts in fused weights" if family == "mlp" and _fused_experts(model) else "no linear layer"
            )
            raise InvalidRequest(
                f"train_{family} is true, but this base model has {reason} in that family",
                field=f"lora_config.train_{family}",
                hint=f"it can train: {', '.join(sorted(available)) or 'nothing'}",
            )
    return [name for name, family in linear_families(model).items() if flags[family]]


def init_adapter(model: nn.Module, spec: LoraSpec) -> AdapterWeights:
    """A fresh adapter: A Kaiming-uniform(a=sqrt 5) as in PEFT, B zero, float32.

    Each module draws from a generator of its own, seeded by sha256 of "seed:module", on the CPU: the same seed gives
    the same adapter in any process, on any device, engine and number of ranks. Raises as `resolve_targets`.
    """
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name in resolve_targets(model, spec):
        base = _linear(model, name)
        digest = hashlib.sha256(f"{spec.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        down = torch.empty(spec.rank, base.in_features, dtype=torch.float32)
        nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
        up = torch.zeros(base.out_features, spec.rank, dtype=torch.float32)
        pairs[name] = (down.to(base.weight.device), up.to(base.weight.device))
    return AdapterWeights(pairs, LORA_ALPHA / spec.rank)


def expected_shapes(model: nn.Module, spec: LoraSpec) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """The shapes of A and B per module path of an adapter of this geometry. Raises as `resolve_targets`."""
    bases = {name: _linear(model, name) for name in resolve_targets(model, spec)}
    return {name: ((spec.rank, b.in_features), (b.out_features, spec.rank)) for name, b in bases.items()}


def check_fits(model: nn.Module, spec: LoraSpec, weights: AdapterWeights) -> None:
    """Raise `InvalidRequest` unless these weights are exactly an adapter of this geometry on this model."""
    expected = expected_shapes(model, spec)
    found = {name: (tuple(down.shape), tuple(up.shape)) for name, (down, up) in weights.pairs.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise InvalidRequest(
                f"the adapter does not fit this base model: {name} has shapes {found.get(name)}, "
                f"where {expected.get(name)} is expected"
            )


def _family(name: str) -> Family | None:
    """The family by the innermost telling part of the path; None for routers, other towers and anything unknown."""
    *parents, leaf = name.split(".")
    if _OTHER_TOWERS.intersection(parents):
        return None
    for part in reversed(parents):
        if _MLP.search(part):
            return None if leaf in _ROUTER_LEAVES else "mlp"
        if _ATTENTION.search(part):
            return "attn"
    return "mlp" if leaf in _MLP_LEAVES else None


def _fused_experts(model: nn.Module) -> bool:
    """Whether routed experts live in stacked 3-D parameters, which no linear wrapper reaches."""
    return any(p.dim() == 3 and "experts" in name.split(".") for name, p in model.named_parameters())


def _head(model: nn.Module) -> nn.Module | None:
    getter: Any = getattr(model, "get_output_embeddings", None)
    return cast("nn.Module | None", getter()) if callable(getter) else None


def _linear(model: nn.Module, name: str) -> nn.Linear:
    module = model.get_submodule(name)
    return module.base if isinstance(module, LoraLinear) else cast(nn.Linear, module)
