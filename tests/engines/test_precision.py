"""Precision of the base: what is converted, what stays, what it costs in error, and who decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.loading import load_base_model
from engines.torch_engine.precision import MixedLinear, convert, resolve_dtype, weights_dtype
from schemas.errors import InvalidRequest
from tests.engines.batches import make_batch
from tests.engines.contract import SPEC, accumulate
from tests.engines.test_model_families import FAMILIES, make_family
from tests.support.reference import tell

CPU = torch.device("cpu")
IDS = torch.arange(3, 43).unsqueeze(0)


def capabilities(**able: bool) -> dict[str, Any]:
    return {"avx512_bf16": True, "amx_tile": False, "amx_bf16": False, **able}


def test_auto_asks_the_cpu_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", capabilities)
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities(amx_tile=True, amx_bf16=True))
    assert resolve_dtype("auto", CPU) == torch.bfloat16
    assert resolve_dtype("float32", CPU) == torch.float32
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "aarch64"})
    assert resolve_dtype("auto", CPU) == torch.float32


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_auto_asks_the_gpu_for_its_capability(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_dtype("auto", torch.device("cuda", 1)) == dtype


@pytest.mark.parametrize("name", ["float16", "fp32", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="auto, float32 or bfloat16"):
        resolve_dtype(name, CPU)


@pytest.mark.parametrize("folder", ["untied_folder", "tied_folder"])
def test_only_operands_of_products_are_bfloat16(folder: str, request: pytest.FixtureRequest) -> None:
    model: Any = load_base_model(request.getfixturevalue(folder), torch.bfloat16, CPU)
    tied = folder == "tied_folder"
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 2 * 7 + 1
    assert all(type(module) is MixedLinear and module.weight.dtype == torch.bfloat16 for module in linears)
    assert weights_dtype(model) == torch.bfloat16
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    products = {id(module.weight) for module in linears}
    others = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in products]
    assert others
    assert all(tensor.dtype == torch.float32 for tensor in others if tensor.is_floating_point())
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, output: seen.append((module, output)))
    model(IDS, use_cache=False)
    assert {type(module).__name__ for module, _ in seen} >= {"MixedLinear", "Embedding", "LlamaRMSNorm"}
    outputs = [output[0] if isinstance(output, tuple) else output for _, output in seen]
    assert {output.dtype for output in outputs if isinstance(output, torch.Tensor)} == {torch.float32}


def test_float32_touches_no_module(untied_folder: Path) -> None:
    model: Any = load_base_model(untied_folder, torch.float32, CPU)
    own = AutoModelForCausalLM.from_pretrained(untied_folder)
    assert all(type(module) is not MixedLinear for module in model.modules())
    assert torch.equal(model(IDS).logits, own(IDS).logits)


def test_converting_twice_changes_nothing(tied_folder: Path) -> None:
    model: Any = load_base_model(tied_folder, torch.bfloat16, CPU)
    before = model(IDS).logits
    convert(model, torch.bfloat16)
    assert torch.equal(model(IDS).logits, before)


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(IDS, use_cache=False).logits[0], -1).gather(1, IDS[0].roll(-1).unsqueeze(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_error_of_bfloat16(family: str, tmp_path: Path) -> None:
    """Biases, norms of their own, scaled embeddings and soft caps all go through; the error is that of the operands.

    The families have large random weights, so that the same rounding shows far more than in a trained model.
    """
    folder = make_family(tmp_path, family)
    exact = logprobs(load_base_model(folder, torch.float32, CPU))
    mixed = logprobs(load_base_model(folder, torch.bfloat16, CPU))
    plain = logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    error, of_plain = (float((other - exact).abs().mean() / exact.abs().mean()) for other in (mixed, plain.float()))
    tell(f"{family}: mean error of logprobs in bfloat16, relative", error, 0.02)
    assert 0 < error < 1.1 * of_plain


def test_norms_stored_in_float32_are_not_rounded(untied_folder: Path, tmp_path: Path) -> None:
    """A checkpoint whose configuration says bfloat16 may hold single tensors in float32."""
    for file in untied_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    fine = 1.0 + 2.0**-12 * torch.arange(32.0)
    assert not torch.equal(fine.bfloat16().float(), fine)
    mixed = {name: fine.clone() if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(mixed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    for dtype in (torch.bfloat16, torch.float32):
        model: Any = load_base_model(tmp_path, dtype, CPU)
        norms = [tensor for name, tensor in model.named_parameters() if "norm" in name]
        assert len(norms) == 5
        assert all(torch.equal(norm, fine) for norm in norms)
        assert model.get_input_embeddings().weight.dtype == dtype
        assert model.get_output_embeddings().weight.dtype == dtype


def test_fused_experts_multiply_in_bfloat16(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=259,
                hidden_size=32,
                intermediate_size=64,
                moe_intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
            )
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    mixed: Any = load_base_model(tmp_path, torch.bfloat16, CPU)
    experts = mixed.model.layers[0].mlp.experts
    assert {parameter.dtype for parameter in experts.parameters()} == {torch.bfloat16}
    assert mixed.model.layers[0].mlp.gate.weight.dtype == torch.float32
    error = (logprobs(mixed) - logprobs(model)).abs().mean() / logprobs(model).abs().mean()
    assert 0 < float(error) < 0.02
    hidden = torch.randn(1, 5, 32, requires_grad=True)
    output = mixed.model.layers[0].mlp(hidden)
    assert output.dtype == torch.float32
    (gradient,) = torch.autograd.grad(output.sum(), hidden)
    assert gradient.dtype == torch.float32
    assert bool(gradient.abs().sum() > 0)


@pytest.mark.parametrize("folder", ["untied_folder", "tied_folder"])
def test_training_in_bfloat16_is_near_float32(folder: str, request: pytest.FixtureRequest) -> None:
    """Logprobs and the gradient of an adapter that has been trained for a few steps in float32."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        engine = TorchEngine(request.getfixturevalue(folder), dtype=dtype, device="cpu", threads=1)
        assert engine.load().dtype == dtype
        engine.create_adapter("a", SPEC)
        state = engine._pool.get("a")
        generator = torch.Generator().manual_seed(0)
        state.flat.add_(torch.randn(state.flat.shape, generator=generator) * 0.05)
        result = accumulate(engine, make_batch("a", lengths=(30, 9, 64)))
        assert state.gradient.flat is not None
        assert state.gradient.flat.dtype == torch.float32
        found[dtype] = np.concatenate(result.logprobs), state.gradient.flat.clone()
    (exact, exact_gradient), (mixed, gradient) = found["float32"], found["bfloat16"]
    gap = np.abs(mixed - exact)
    tell("logprobs in bfloat16, mean difference", float(gap.mean()), 0.04)
    tell("logprobs in bfloat16, 99th percentile", float(np.quantile(gap, 0.99)), 0.15)
    off = float((gradient - exact_gradient).norm() / exact_gradient.norm())
    tell("gradient in bfloat16, relative", off, 0.05)
    assert off > 1e-6, "the two are not the same computation"
