"""Merged weights: what base and adapter give together, bit for bit where PEFT's own merge is, close everywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engines.base_models import DEFAULT_MODEL, prepare
from engines.merge import merge
from schemas.errors import InvalidRequest
from tests.support.tiny_model import make_tiny_model

IDS = torch.arange(5, 45).unsqueeze(0)


def made(folder: Path, *, tie: bool, head: bool) -> tuple[Path, Path]:
    """A base model, and an adapter of it that PEFT wrote, with weights that matter."""
    base = make_tiny_model(folder / "base", tie_word_embeddings=tie)
    targets = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        *(["lm_head"] if head else []),
    ]
    config = LoraConfig(r=4, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with_random_weights(model, 0.05).save_pretrained(folder / "adapter")
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    if any("lora" not in name for name in weights):  # PEFT adds the embedding to an adapted head; the server does not
        from safetensors.torch import save_file

        kept = {name: tensor for name, tensor in weights.items() if "lora" in name}
        save_file(kept, folder / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    return base, folder / "adapter"


def with_random_weights(model: Any, size: float) -> Any:
    """The model, with an adapter that is no longer nothing."""
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * size)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits.float()
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return made(tmp_path_factory.mktemp("plain"), tie=False, head=True)


def test_merged_weights_give_the_logits_of_base_and_adapter(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    merge(base, adapter, tmp_path / "m")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    apart, ours = logits(beside), logits(merged)
    assert (apart - logits(AutoModelForCausalLM.from_pretrained(base))).abs().max() > 0.5
    assert (ours - apart).abs().max() < 1e-4 * apart.abs().max()
    theirs = beside.merge_and_unload()
    assert (ours - logits(theirs)).abs().max() < 1e-5 * apart.abs().max()
    for (name, one), (_, other) in zip(merged.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6, rtol=1e-6), name
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "m")("hi").input_ids
        == AutoTokenizer.from_pretrained(base)("hi").input_ids
    )
    assert not [name for name in load_file(tmp_path / "m" / "model.safetensors") if "lora" in name]


def test_an_adapted_head_that_was_tied_leaves_the_embedding_alone(tmp_path: Path) -> None:
    base, adapter = made(tmp_path, tie=True, head=True)
    merge(base, adapter, tmp_path / "m")
    merged, plain = (AutoModelForCausalLM.from_pretrained(tmp_path / each) for each in ("m", "base"))
    assert torch.equal(merged.get_input_embeddings().weight, plain.get_input_embeddings().weight)
    assert not torch.equal(merged.get_output_embeddings().weight, plain.get_output_embeddings().weight)
    assert merged.config.tie_word_embeddings is False
    apart = logits(PeftModel.from_pretrained(plain, adapter))
    assert (logits(merged) - apart).abs().max() < 1e-4 * apart.abs().max()


def test_a_head_that_is_not_adapted_stays_tied(tmp_path: Path) -> None:
    base, adapter = made(tmp_path, tie=True, head=False)
    merge(base, adapter, tmp_path / "m")
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m").config.tie_word_embeddings is True


def test_sums_are_rounded_once(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    merge(base, adapter, tmp_path / "whole")
    for name in ("bfloat16", "float16"):
        merge(base, adapter, tmp_path / name, name)
        whole, narrow = (load_file(tmp_path / each / "model.safetensors") for each in ("whole", name))
        dtype = getattr(torch, name)
        assert all(torch.equal(narrow[key], whole[key].to(dtype)) for key in whole)
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == name


def test_what_does_not_fit_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, adapter = pair
    other = make_tiny_model(tmp_path / "other", layers=1)
    with pytest.raises(InvalidRequest, match="no linear layer"):
        merge(other, adapter, tmp_path / "m")
    wide = make_tiny_model(tmp_path / "wide", hidden=64)
    with pytest.raises(InvalidRequest, match="do not fit"):
        merge(wide, adapter, tmp_path / "m")
    shutil.rmtree(other)
    other.mkdir()
    order = json.dumps({"base": str(other), "adapter": str(adapter), "output": str(tmp_path / "m"), "dtype": None})
    done = subprocess.run([sys.executable, "-m", "engines.merge"], input=order, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (1, "base: there is no config.json in its folder")
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
@pytest.mark.real_model
def test_the_default_model_merged_is_the_model_with_its_adapter(tmp_path: Path) -> None:
    base = prepare(DEFAULT_MODEL, None, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    beside = with_random_weights(get_peft_model(model, config), 0.02)
    beside.save_pretrained(tmp_path / "adapter")
    plain, apart = None, logits(beside)
    with beside.disable_adapter():
        plain = logits(beside)
    merge(base, tmp_path / "adapter", tmp_path / "m")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert (apart - plain).abs().max() > 1
    assert (logits(merged) - apart).abs().max() < 1e-4 * apart.abs().max()
    assert (logits(merged) - logits(beside.merge_and_unload())).abs().max() < 1e-4 * apart.abs().max()
