"""Geometry by module path, initialisation by seed, and the router's arithmetic."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from engines.lora import AdapterWeights, LoraLinear
from engines.lora_targets import attach, available_families, check_fits, init_adapter, linear_families, resolve_targets
from schemas.errors import EngineFailure, InvalidRequest
from schemas.operations import LoraSpec

LAYER = {
    "attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"],
    "mlp": ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
}


def load(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def randomise(adapter: AdapterWeights, seed: int) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)
    pairs = {name: (a, torch.randn(b.shape, generator=generator) * 0.1) for name, (a, b) in adapter.pairs.items()}
    return AdapterWeights(pairs, adapter.scaling)


@pytest.mark.parametrize("flags", [(a, m, u) for a in (0, 1) for m in (0, 1) for u in (0, 1) if a or m or u])
@pytest.mark.parametrize("attached", [False, True])
def test_families_are_exactly_the_wanted_modules(untied_folder: Path, flags: tuple[int, ...], attached: bool) -> None:
    model = load(untied_folder)
    if attached:
        attach(model)
    attn, mlp, unembed = map(bool, flags)
    leaves = LAYER["attn"] * attn + LAYER["mlp"] * mlp
    expected = [f"model.layers.{i}.{leaf}" for i in (0, 1) for leaf in leaves] + ["lm_head"] * unembed
    spec = LoraSpec(4, 0, train_attn=attn, train_mlp=mlp, train_unembed=unembed)
    assert resolve_targets(model, spec) == expected
    assert list(init_adapter(model, spec).pairs) == expected


class Paths(nn.Module):
    """Linears at given module paths, for the classification alone."""

    def __init__(self, *paths: str) -> None:
        super().__init__()
        for path in paths:
            *parents, leaf = path.split(".")
            node: nn.Module = self
            for part in parents:
                if not hasattr(node, part):
                    node.add_module(part, nn.Module())
                node = node.get_submodule(part)
            node.add_module(leaf, nn.Linear(2, 2))


def test_classification_by_path() -> None:
    attn = ["l.0.attn.c_attn", "l.0.self_attn.g_proj", "l.0.linear_attn.in_proj_qkvz", "l.0.attention.dense"]
    mlp = ["l.0.mlp.fc1", "l.0.feed_forward.w1", "l.0.mlp.experts.3.w2", "l.0.fc2", "l.0.moe.shared_expert.up_proj"]
    none = ["l.0.mlp.gate", "l.0.moe.router", "l.0.mlp.shared_expert_gate", "visual.attn.qkv", "projector", "lm_head"]
    families = linear_families(Paths(*attn, *mlp, *none))
    assert {name for name, family in families.items() if family == "attn"} == set(attn)
    assert {name for name, family in families.items() if family == "mlp"} == set(mlp)


def test_a_wanted_family_without_linears_is_refused() -> None:
    model = Paths("l.0.attn.q")
    assert available_families(model) == {"attn"}
    for flag in ("train_mlp", "train_unembed"):
        spec = LoraSpec(4, 0, **{"train_mlp": False, "train_unembed": False, flag: True})
        with pytest.raises(InvalidRequest, match=flag) as caught:
            resolve_targets(model, spec)
        assert caught.value.field == f"lora_config.{flag}"
    with pytest.raises(InvalidRequest, match="at least one"):
        resolve_targets(model, LoraSpec(4, 0, False, False, False))
    with pytest.raises(InvalidRequest, match="rank"):
        resolve_targets(model, LoraSpec(0, 0, True, False, False))


def test_fused_routed_experts_are_refused_and_not_left_out_silently() -> None:
    config = Qwen2MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(config)
    assert available_families(model) == {"attn", "unembed"}
    with pytest.raises(InvalidRequest, match="routed experts"):
        init_adapter(model, LoraSpec(4, 0))
    assert resolve_targets(model, LoraSpec(4, 0, train_mlp=False))


def test_initialisation_is_kaiming_uniform_and_zero(untied_folder: Path) -> None:
    model = load(untied_folder)
    adapter = init_adapter(model, LoraSpec(8, 5))
    assert adapter.scaling == 4.0
    for name, (down, up) in adapter.pairs.items():
        base = model.get_submodule(name)
        bound = 1 / math.sqrt(base.in_features)
        assert (down.shape, up.shape) == ((8, base.in_features), (base.out_features, 8))
        assert down.dtype == up.dtype == torch.float32
        assert down.abs().max() <= bound
        assert down.std() == pytest.approx(bound / math.sqrt(3), rel=0.15)
        assert not up.any()
    other = init_adapter(model, LoraSpec(8, 6))
    assert all(not torch.equal(adapter.pairs[name][0], other.pairs[name][0]) for name in adapter.pairs)
    first, second = (adapter.pairs[f"model.layers.{i}.self_attn.q_proj"][0] for i in (0, 1))
    assert not torch.equal(first, second)


def fingerprint(adapter: AdapterWeights) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in adapter.tensors)).hexdigest()


def test_same_seed_same_adapter_in_another_process(untied_folder: Path) -> None:
    torch.manual_seed(1234)
    here = fingerprint(init_adapter(load(untied_folder), LoraSpec(4, 77)))
    script = (
        "import sys, torch; from pathlib import Path; torch.manual_seed(99);"
        "from tests.engines.test_lora import *;"
        "print(fingerprint(init_adapter(load(Path(sys.argv[1])), LoraSpec(4, 77))))"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", script, str(untied_folder)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[-1] == here


def test_global_random_state_is_left_alone(untied_folder: Path) -> None:
    model = load(untied_folder)
    before = torch.get_rng_state()
    init_adapter(model, LoraSpec(4, 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_segments_choose_the_adapter_of_each_row(tied_folder: Path) -> None:
    model = load(tied_folder)
    ids = torch.randint(3, 250, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids).logits
        router = attach(model)
        one, two = (randomise(init_adapter(model, LoraSpec(4, seed)), seed) for seed in (1, 2))
        assert torch.equal(model(ids).logits, plain)
        alone = []
        for adapter in (one, two):
            with router.use([(adapter, slice(0, 3))]):
                alone.append(model(ids).logits)
        with router.use([(one, slice(0, 1)), (None, slice(1, 2)), (two, slice(2, 3))]):
            mixed = model(ids).logits
            with router.use([(two, slice(0, 3))]):
                assert torch.equal(model(ids).logits, alone[1])
            assert torch.equal(model(ids).logits, mixed)
        torch.testing.assert_close(mixed[0], alone[0][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mixed[1], plain[1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mixed[2], alone[1][2], rtol=1e-4, atol=1e-4)
        assert (alone[0] - plain).abs().max() > 0.1
        assert torch.equal(model(ids).logits, plain)


def test_the_router_is_restored_on_exceptions_and_refuses_other_row_counts(tied_folder: Path) -> None:
    model = load(tied_folder)
    router = attach(model)
    adapter = randomise(init_adapter(model, LoraSpec(4, 1)), 1)
    with (
        pytest.raises(EngineFailure, match="row 3 of 2"),
        router.use([(adapter, slice(0, 1)), (None, slice(1, 3))]),
    ):
        model(torch.zeros(2, 3, dtype=torch.int64))
    assert router.segments is None


def test_base_products_in_bfloat16_and_all_else_in_float32() -> None:
    base = nn.Linear(16, 8, bias=False, dtype=torch.bfloat16)
    model = nn.ModuleDict({"attn": nn.ModuleDict({"q": base})})
    router = attach(model)
    adapter = AdapterWeights({"attn.q": (torch.randn(4, 16), torch.randn(8, 4))}, 8.0)
    x = torch.randn(5, 16)
    with router.use([(adapter, slice(0, 5))]):
        y = model.get_submodule("attn.q")(x)
    down, up = adapter.pairs["attn.q"]
    delta = (x @ down.T) @ up.T * 8.0
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, base(x.bfloat16()).float() + delta)


def test_a_tied_head_stays_tied_and_frozen(tied_folder: Path) -> None:
    model = load(tied_folder)
    attach(model)
    head = model.get_output_embeddings()
    assert isinstance(head, LoraLinear)
    assert head.weight is model.get_input_embeddings().weight
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_check_fits_names_what_does_not(untied_folder: Path) -> None:
    model = load(untied_folder)
    adapter = init_adapter(model, LoraSpec(4, 1))
    check_fits(model, LoraSpec(4, 1), adapter)
    with pytest.raises(InvalidRequest, match="it changes lm_head, which is not trained here"):
        check_fits(model, LoraSpec(4, 1, train_unembed=False), adapter)
    headless = init_adapter(model, LoraSpec(4, 1, train_unembed=False))
    with pytest.raises(InvalidRequest, match="it does not change lm_head, which is trained here"):
        check_fits(model, LoraSpec(4, 1), headless)
    with pytest.raises(InvalidRequest, match="it has rank 4, and rank 8 is expected"):
        check_fits(model, LoraSpec(8, 1), adapter)
    adapter.pairs["lm_head"] = (adapter.pairs["lm_head"][0][:, 1:], adapter.pairs["lm_head"][1])
    with pytest.raises(InvalidRequest, match="lm_head has shapes"):
        check_fits(model, LoraSpec(4, 1), adapter)
