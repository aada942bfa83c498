"""Engine `veomni` in its own environment: the common contract on one rank, and what two ranks must compute.

The numbers are compared with Hugging Face, PEFT and the torch engine, none of which VeOmni has a part in.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from engines.fsdp.loading import whole
from engines.torch_engine.adapter_pool import AdapterPool
from engines.torch_engine.engine import TorchEngine
from engines.veomni.engine import VeomniEngine
from schemas.errors import Unavailable
from tests.engines.batches import make_batch
from tests.engines.contract import SPEC, EngineContract, logprobs, train
from tests.engines.field import needs
from tests.engines.field.tiny_models import make_model
from tests.engines.gang import Gang, gang
from tests.engines.test_fsdp_ranks import (  # noqa: F401 (the same tests, on ranks of this engine)
    UNEQUAL,
    name,
    one,
    test_a_datum_that_fails_on_one_rank_fails_its_batch_on_both_and_nothing_else,
    test_a_gradient_that_is_not_finite_on_one_rank_is_so_on_both,
    test_checkpoints_and_snapshots_go_from_two_ranks_to_one_and_back,
    test_company_does_not_change_a_bit,
    test_one_datum_on_two_ranks,
    test_samples_are_those_of_one_process,
    test_the_gradient_is_that_of_transformers_and_peft,
    test_training_never_changes_the_base_model,
    test_two_ranks_compute_what_one_does,
    test_what_one_rank_cannot_do_none_does,
)
from tests.support.reference import Reference

pytestmark = [needs("veomni"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def two(tied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    """Two ranks of this engine on the tied model."""
    data = tmp_path_factory.mktemp("gang")
    with gang(tied_folder, data, 2, engine="veomni", engine_python=sys.executable) as started:
        yield started


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3, an architecture that VeOmni has layers of its own for, with norms on queries and keys."""
    return make_model(tmp_path_factory.mktemp("qwen") / "tiny-qwen3", Qwen3Config, Qwen3ForCausalLM, head_dim=16)


def load_engine(folder: Path, **options: Any) -> VeomniEngine:
    engine = VeomniEngine(folder, **({"device": "cpu", "threads": 1, "dtype": "float32"} | options))
    engine.load()
    return engine


@pytest.fixture(scope="module")
def loaded(untied_folder: Path) -> VeomniEngine:
    return load_engine(untied_folder)


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self, loaded: VeomniEngine) -> VeomniEngine:
        loaded._pool = AdapterPool(None, None)
        return loaded


def test_the_model_is_veomnis_and_holds_the_weights_of_the_files(loaded: VeomniEngine, untied_folder: Path) -> None:
    """Also after training: each is compared with the file."""
    assert type(loaded.model).__module__.startswith("veomni.")
    loaded._pool = AdapterPool(None, None)
    loaded.create_adapter("a", SPEC)
    train(loaded, make_batch("a"))
    found = {key.replace(".base.", "."): whole(p) for key, p in loaded.model.named_parameters()}
    stored = load_file(untied_folder / "model.safetensors")
    assert found.keys() == stored.keys()
    for key, tensor in stored.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["qwen", "tied"])
def test_one_rank_computes_what_the_torch_engine_does(
    kind: str, qwen_folder: Path, tied_folder: Path, tmp_path: Path
) -> None:
    """Logprobs and norms of gradients over steps, in float32 and bfloat16; adapters go both ways."""
    folder = qwen_folder if kind == "qwen" else tied_folder
    for dtype, close in (("float32", 1e-5), ("bfloat16", 2e-2)):
        ours = load_engine(folder, dtype=dtype)
        plain = TorchEngine(folder, device="cpu", threads=1, dtype=dtype)
        plain.load()
        for engine in (ours, plain):
            engine.create_adapter("a", SPEC)
        for seed in range(2):
            batch = make_batch("a", lengths=UNEQUAL, seed=seed)
            norms = [train(engine, batch).metrics["grad_norm"] for engine in (ours, plain)]
            assert norms[0] == pytest.approx(norms[1], rel=10 * close)
        ours.save_adapter("a", tmp_path / f"{dtype}-ours", with_optimizer=True)
        plain.load_adapter("b", tmp_path / f"{dtype}-ours", with_optimizer=True, create=True)
        np.testing.assert_allclose(logprobs(plain, "b"), logprobs(ours, "a"), atol=close * 10)
        plain.save_adapter("b", tmp_path / f"{dtype}-plain", with_optimizer=True)
        ours.load_adapter("back", tmp_path / f"{dtype}-plain", with_optimizer=True, create=True)
        np.testing.assert_array_equal(logprobs(ours, "back"), logprobs(ours, "a"))


def test_the_gradient_of_qwen3_is_that_of_transformers_and_peft(qwen_folder: Path, tmp_path: Path) -> None:
    """On two ranks; the sum of the squares of the gradient is read off a step whose learning rate is 0."""
    with gang(qwen_folder, tmp_path / "data", 2, engine="veomni", engine_python=sys.executable) as two:
        two.call("create_adapter", "a", SPEC)
        two.call("forward_backward", make_batch("a"))
        two.call("optimizer_step", "a")
        two.call("save_checkpoint", "a", str(tmp_path / "saved"), False)
        adapter = load_file(tmp_path / "saved" / "adapter_model.safetensors")
        reference = Reference(qwen_folder, json.loads((tmp_path / "saved/adapter_config.json").read_text()), adapter)
        batch = make_batch("a", lengths=UNEQUAL, seed=1)
        found = two.call("forward_backward", batch)
        examples = [
            {"tokens": torch.from_numpy(d.tokens), **{k: torch.from_numpy(v) for k, v in d.inputs.items()}}
            for d in batch.datums
        ]
        for ours, theirs in zip(found.logprobs, reference.forward_backward(examples, "cross_entropy"), strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
        norm = sum(float(each.double().square().sum()) for each in reference.gradient().values()) ** 0.5
        assert two.call("optimizer_step", "a").metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_weights_that_are_not_loaded_as_they_are_stored_are_refused(
    untied_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VeOmni leaves out what it does not recognise, without an error: here it gets a folder that lacks a tensor."""
    from engines.veomni import loading

    real = vars(loading)["load_model_weights"]
    broken = tmp_path / "broken"
    shutil.copytree(untied_folder, broken)
    tensors = load_file(untied_folder / "model.safetensors")
    tensors["unknown"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(loading, "load_model_weights", lambda model, path, **rest: real(model, str(broken), **rest))
    with pytest.raises(Unavailable, match=r"did not load model\.layers\.1\.mlp\.up_proj\.weight"):
        load_engine(untied_folder)


def test_files_in_another_form_are_refused_by_name(untied_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(untied_folder, folder)
    tensors = load_file(untied_folder / "model.safetensors")
    tensors["model.layers.0.self_attn.qkv"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Unavailable, match=r"engine 'veomni'.*layers\.0\.self_attn\.q_proj\.weight"):
        load_engine(folder)
