"""LoRA geometry: which linears of a base model an adapter covers, in which shapes, and with which values it starts.

Not responsible for what an adapter does in a pass (`lora`).
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any, Literal, cast

import torch
from torch import nn

from engines.lora import AdapterWeights, LoraLinear, Pairs, Router
from schemas.errors import InvalidRequest
from schemas.operations import LORA_ALPHA, LoraSpec

Family = Literal["attn", "mlp", "unembed"]
FAMILIES: tuple[Family, ...] = ("attn", "mlp", "unembed")

_ATTENTION = re.compile(r"(^|_)(attn|attention)(_|$)")
_MLP = re.compile(r"(^|_)(mlp|ffn|feed_forward|feedforward|experts?|moe)(_|$)")
_MLP_LEAVES = frozenset({"fc1", "fc2"})
_ROUTER_LEAVES = frozenset({"gate", "router", "shared_expert_gate", "gate_network"})
_OTHER_TOWERS = frozenset({"visual", "vision_tower", "vision_model", "audio_tower", "audio_model"})


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
    pairs: Pairs = {}
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
    ranks = {down[0] for down, _ in found.values()}
    if ranks and ranks != {spec.rank}:
        of = " and ".join(map(str, sorted(ranks)))
        raise InvalidRequest(f"the adapter does not fit: it has rank {of}, and rank {spec.rank} is expected")
    for name in sorted(expected.keys() ^ found.keys()):
        here = "changes" if name in found else "does not change"
        trained = "is not" if name in found else "is"
        raise InvalidRequest(
            f"the adapter does not fit: it {here} {name}, which {trained} trained here",
            hint="train_attn, train_mlp and train_unembed must be those of the adapter",
        )
    for name in sorted(found):
        if expected[name] != found[name]:
            raise InvalidRequest(
                f"the adapter does not fit this base model: {name} has shapes {found[name]}, "
                f"where {expected[name]} is expected"
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
