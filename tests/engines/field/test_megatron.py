"""Engine megatron on one rank: the common contract, and the numbers of transformers and PEFT for every family.

Several ranks: `test_megatron_ranks.py`. Runs in the engine's environment (`make engine-venv NAME=megatron`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines.base import BaseEngine
from engines.lora import LoraLinear
from engines.megatron.engine import MegatronEngine
from engines.ranks import Place
from engines.registry import get_engine
from engines.sampling.torch_sampler import TorchSampler
from engines.torch_engine.adapter_pool import AdapterPool
from engines.torch_engine.engine import TorchEngine
from schemas.errors import InvalidRequest, Unavailable
from schemas.operations import LoraSpec, OptimStepParams, Sample, SampleTurn, SamplingParams, TrainBatch
from tests.engines.batches import make_batch
from tests.engines.contract import SPEC, EngineContract, accumulate, logprobs, train
from tests.engines.field import needs
from tests.engines.field.megatron_models import FAMILIES, checksum, make_family
from tests.engines.test_fsdp_ranks import named
from tests.support.reference import Reference

pytestmark = needs("megatron")
ROOT = Path(__file__).parents[3]
CLOSE = 2e-5
"""Of the largest gradient: what sums in another order may change."""
STEPS = (OptimStepParams(3e-3, (0.9, 0.95), 1e-2, 0.0), OptimStepParams(1e-3, (0.8, 0.9), 1e-2, 0.1))


def load_engine(folder: Path, **options: Any) -> MegatronEngine:
    engine = MegatronEngine(folder, **({"device": "cpu", "threads": 1, "dtype": "float32"} | options))
    engine.load()
    return engine


@pytest.fixture(scope="module")
def loaded(untied_folder: Path) -> MegatronEngine:
    return load_engine(untied_folder)


@pytest.fixture
def engine(loaded: MegatronEngine) -> Iterator[MegatronEngine]:
    """The engine of the module, without adapters."""
    loaded._pool = AdapterPool(None, None)
    yield loaded
    assert loaded._open is None


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self, loaded: MegatronEngine) -> BaseEngine:
        loaded._pool = AdapterPool(None, None)
        return loaded


# -- numbers -----------------------------------------------------------------------------------------------------------
def examples_of(batch: TrainBatch) -> list[dict[str, Tensor]]:
    """As the reference takes them."""
    return [
        {"tokens": torch.from_numpy(d.tokens), **{k: torch.from_numpy(v) for k, v in d.inputs.items()}}
        for d in batch.datums
    ]


def reference_of(folder: Path, saved: Path) -> tuple[Reference, dict[str, Tensor]]:
    """transformers and PEFT with an exported adapter, which is returned too."""
    adapter = load_file(saved / "adapter_model.safetensors")
    return Reference(folder, json.loads((saved / "adapter_config.json").read_text()), adapter), adapter


def assert_gradient(
    flat: Tensor, adapter: dict[str, Tensor], expected: dict[str, Tensor], close: float = CLOSE
) -> None:
    """Every part of a flat gradient by its PEFT name."""
    largest = max(float(each.abs().max()) for each in expected.values())
    found = named(flat, adapter)
    assert found.keys() == expected.keys()
    for key, ours in found.items():
        np.testing.assert_allclose(ours.numpy(), expected[key].numpy(), rtol=0, atol=close * largest, err_msg=key)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_family_is_that_of_transformers_and_peft(family: str, tied: bool, tmp_path: Path) -> None:
    """Logits, logprobs, every gradient by name, two steps with values of their own; the base model stays as it is."""
    folder = make_family(tmp_path / "model", family, tied=tied)
    engine = load_engine(folder)
    before = checksum(engine)
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        torch.testing.assert_close(engine.model(tokens).logits, theirs, rtol=0, atol=1e-4)
    engine.create_adapter("a", SPEC)
    train(engine, make_batch("a"))
    engine.save_adapter("a", tmp_path / "saved", with_optimizer=False)
    engine.load_adapter("a", tmp_path / "saved", with_optimizer=False, create=False)  # fresh moments, as theirs are
    reference, adapter = reference_of(folder, tmp_path / "saved")
    for seed, step in enumerate(STEPS):
        batch = make_batch("a", lengths=(1, 25, 8), seed=seed)
        found = accumulate(engine, batch)
        expected = reference.forward_backward(examples_of(batch), "cross_entropy")
        for ours, lp in zip(found.logprobs, expected, strict=True):
            np.testing.assert_allclose(ours, lp.numpy(), atol=1e-4)
        flat = engine._pool.get("a").gradient.flat
        assert flat is not None
        gradient = {name: p.grad.clone() for name, p in reference.parameters.items() if p.grad is not None}
        assert_gradient(flat, adapter, gradient, close=5e-5)
        engine.optimizer_step("a", step)
        reference.step(**asdict(step))
    engine.save_adapter("a", tmp_path / "after", with_optimizer=False)
    after = load_file(tmp_path / "after" / "adapter_model.safetensors")
    for name, tensor in reference.get().items():
        np.testing.assert_allclose(after[name].numpy(), tensor.numpy(), rtol=0, atol=2e-4, err_msg=name)
    assert checksum(engine) == before


def test_rotary_angles_of_llama_3(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    folder = make_family(tmp_path / "model", "llama", rope_parameters=rope)
    tokens = torch.arange(3, 203)[None]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        plain = AutoModelForCausalLM.from_pretrained(make_family(tmp_path / "plain", "llama"))(tokens).logits
    ours = load_engine(folder).model(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    assert (theirs - plain).abs().max() > 0.1


@pytest.mark.parametrize("spec", [LoraSpec(4, 3, False, False, True), LoraSpec(4, 3, True, False, False)])
def test_adapters_on_parts_of_the_model(engine: MegatronEngine, untied_folder: Path, spec: LoraSpec) -> None:
    """The head alone, where no pass goes back through the body, and attention alone: as on engine torch."""
    plain = TorchEngine(untied_folder, device="cpu", threads=1, dtype="float32")
    plain.load()
    found = []
    for each in (engine, plain):
        each.create_adapter("a", spec)
        train(each, make_batch("a"))
        accumulate(each, make_batch("a", seed=1))
        flat = each._pool.get("a").gradient.flat
        assert flat is not None
        found.append(flat.numpy())
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-4 * float(np.abs(found[1]).max()))


def test_activations_that_are_computed_twice_give_the_same_bits(untied_folder: Path) -> None:
    gradients = []
    for mode in ("off", "on"):
        engine = load_engine(untied_folder, gradient_checkpointing=mode)
        engine.create_adapter("a", SPEC)
        train(engine, make_batch("a"))
        accumulate(engine, make_batch("a", seed=1))
        gradients.append(engine._pool.get("a").gradient.flat)
    assert gradients[0] is not None
    assert torch.equal(*gradients)


def test_base_weights_in_bfloat16(untied_folder: Path) -> None:
    """As engine torch computes them: products in bfloat16, the rest in float32."""
    prints = []
    for kind in (TorchEngine, MegatronEngine):
        engine = kind(untied_folder, device="cpu", threads=1, dtype="bfloat16")
        assert engine.load().dtype == "bfloat16"
        engine.create_adapter("a", SPEC)
        train(engine, make_batch("a"), OptimStepParams(lr=1e-2, eps=1e-2))
        prints.append(logprobs(engine, "a"))
    assert float(np.abs(prints[0] - prints[1]).mean()) < 0.05


# -- the surface -------------------------------------------------------------------------------------------------------
def test_what_it_says_of_itself(engine: MegatronEngine) -> None:
    assert get_engine("megatron") is MegatronEngine
    assert not engine.info.packed
    names = [name for name, module in engine.model.named_modules() if isinstance(module, LoraLinear)]
    assert names[:7] == [
        f"model.layers.0.{leaf}"
        for leaf in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        )
    ]  # fmt: skip
    assert names[-1] == "lm_head"
    assert len(engine.model.checkpointed_layers) == 2


def test_parts_of_fused_weights_are_those_of_the_files(engine: MegatronEngine, untied_folder: Path) -> None:
    for name, tensor in load_file(untied_folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            torch.testing.assert_close(engine.model.get_submodule(name.removesuffix(".weight")).weight, tensor)


def test_samples_are_those_of_engine_torch(engine: MegatronEngine, untied_folder: Path, tmp_path: Path) -> None:
    """Without keys and values kept, token by token: greedy and drawn, base model and adapter."""
    plain = TorchEngine(untied_folder, device="cpu", threads=1, dtype="float32")
    plain.load()
    engine.create_adapter("a", SPEC)
    train(engine, make_batch("a"))
    engine.save_adapter("a", tmp_path / "saved", with_optimizer=False)
    turn = SampleTurn(
        {
            "drawn": Sample(np.arange(5, 17), SamplingParams(max_tokens=12, seed=3), 2, str(tmp_path / "saved")),
            "greedy": Sample(np.arange(9, 14), SamplingParams(max_tokens=9, temperature=0.0), 1, None),
        },
        steps=100,
    )
    ended = []
    for each in (engine, plain):
        sampler, found = TorchSampler(each.model, each.router, None), {}
        following = turn
        while len(found) < 2:
            found |= sampler.turn(following).ended
            following = SampleTurn(steps=100)
        ended.append(found)
    for name in ("drawn", "greedy"):
        for ours, theirs in zip(ended[0][name].sequences, ended[1][name].sequences, strict=True):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)


def test_checkpoints_go_to_engine_torch_and_back(engine: MegatronEngine, untied_folder: Path, tmp_path: Path) -> None:
    """With the optimizer's state: both then take the same step."""
    plain = TorchEngine(untied_folder, device="cpu", threads=1, dtype="float32")
    plain.load()
    engine.create_adapter("a", SPEC)
    for seed in range(2):
        train(engine, make_batch("a", seed=seed))
    saved = engine.save_adapter("a", tmp_path / "ours", with_optimizer=True)
    assert plain.load_adapter("a", tmp_path / "ours", with_optimizer=True, create=True) == saved
    plain.save_adapter("a", tmp_path / "theirs", with_optimizer=True)
    engine.load_adapter("b", tmp_path / "theirs", with_optimizer=True, create=True)
    first, second = engine._pool.get("a"), engine._pool.get("b")
    assert torch.equal(first.flat, second.flat)
    assert all(torch.equal(first.moments[key], second.moments[key]) for key in first.moments)
    steps = [train(each, make_batch(name, seed=7)).metrics for each, name in ((engine, "b"), (plain, "a"))]
    assert steps[0] == pytest.approx(steps[1], rel=1e-4)


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2'; accepted: llama, qwen2, qwen3"),
        ({"attention_bias": True}, "attention_bias is true; accepted: false"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; accepted: silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'dynamic'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    changes: dict[str, Any], words: str, untied_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(untied_folder, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Unavailable) as caught:
        load_engine(folder)
    assert words in caught.value.message


def test_a_sliding_window_is_refused(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    with pytest.raises(Unavailable, match=r"layer_types has sliding_attention; accepted: full_attention"):
        load_engine(make_family(tmp_path / "model", "qwen2", **window))


@pytest.mark.parametrize("missing", [False, True])
def test_files_with_other_weights_are_refused_by_name(missing: bool, untied_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(untied_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    if missing:
        del tensors["model.layers.1.mlp.up_proj.weight"]
    else:
        tensors["model.layers.1.mlp.up_proj.bias"] = torch.zeros(64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Unavailable, match=r"model\.layers\.1\.mlp\.up_proj\." + ("weight" if missing else "bias")):
        load_engine(folder)


def test_a_number_of_ranks_that_cannot_be_grouped(untied_folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="tensor_parallel is 2; it must be a divisor of the 1 ranks") as caught:
        MegatronEngine(untied_folder, tensor_parallel=2)
    assert caught.value.field == "tensor_parallel"
    with pytest.raises(InvalidRequest, match="divisor of the 4 ranks"):
        MegatronEngine(untied_folder, tensor_parallel=3, place=Place(0, 4))


# -- a real model ------------------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
def test_smollm2_is_that_of_transformers_and_peft(tmp_path: Path) -> None:
    """The built-in base model, converted by the server's own environment: logprobs and every gradient."""
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        pytest.skip("the server's own environment, which converts the model, is not there (make setup)")
    convert = "import sys, pathlib; from engines.base_models import *; prepare(DEFAULT_MODEL, None, pathlib.Path('.'))"
    subprocess.run([python, "-c", convert], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    (config,) = tmp_path.glob("base_models/*/config.json")
    engine = load_engine(config.parent)
    engine.create_adapter("a", LoraSpec(8, 1))
    accumulate(engine, make_batch("a", lengths=(12, 5)))
    engine.optimizer_step("a", OptimStepParams(lr=1e-3, eps=1e-5))
    engine.save_adapter("a", tmp_path / "saved", with_optimizer=False)
    reference, adapter = reference_of(config.parent, tmp_path / "saved")
    batch = make_batch("a", lengths=(5, 47, 19), seed=1)
    found = accumulate(engine, batch)
    expected = reference.forward_backward(examples_of(batch), "cross_entropy")
    for ours, lp in zip(found.logprobs, expected, strict=True):
        np.testing.assert_allclose(ours, lp.numpy(), atol=1e-3)
    flat = engine._pool.get("a").gradient.flat
    assert flat is not None
    assert_gradient(flat, adapter, reference.gradient(), close=1e-4)
