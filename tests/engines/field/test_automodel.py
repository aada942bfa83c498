"""Engine `automodel` in its own environment: the common contract on one rank, and what two ranks must compute.

The numbers are compared with Hugging Face, PEFT, torch.optim and the torch engine: nothing of Automodel is in them.
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
from transformers import AutoModelForCausalLM, Olmo2Config, Qwen3Config

from engines.automodel.engine import AutomodelEngine
from engines.fsdp.loading import whole
from engines.lora_targets import linear_families
from engines.torch_engine.adapter_pool import AdapterPool
from engines.torch_engine.engine import TorchEngine
from schemas.errors import Unavailable
from schemas.operations import OptimStepParams, TrainBatch
from tests.engines.batches import make_batch
from tests.engines.contract import FAST, SPEC, EngineContract, accumulate, logprobs, train
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
from tests.support.reference import Adapter, Example, Reference

pytestmark = [needs("automodel"), pytest.mark.timeout(900)]
from_config = AutoModelForCausalLM.from_config


@pytest.fixture(scope="module")
def two(tied_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    """Two ranks of this engine on the tied model."""
    with gang(
        tied_folder, tmp_path_factory.mktemp("gang"), 2, engine="automodel", engine_python=sys.executable
    ) as started:
        yield started


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3: norms on queries and keys, and heads that are wider than the model divides."""
    return make_model(tmp_path_factory.mktemp("qwen") / "tiny-qwen3", Qwen3Config, from_config, head_dim=16)


@pytest.fixture(scope="module")
def olmo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OLMo 2, which Automodel has no class of its own for."""
    return make_model(tmp_path_factory.mktemp("olmo") / "tiny-olmo2", Olmo2Config, from_config, pad_token_id=0)


def load_engine(folder: Path, **options: Any) -> AutomodelEngine:
    engine = AutomodelEngine(folder, **({"device": "cpu", "threads": 1, "dtype": "float32"} | options))
    engine.load()
    return engine


@pytest.fixture(scope="module")
def loaded(untied_folder: Path) -> AutomodelEngine:
    return load_engine(untied_folder)


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self, loaded: AutomodelEngine) -> AutomodelEngine:
        loaded._pool = AdapterPool(None, None)
        return loaded


# -- the model ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["untied", "tied", "qwen"])
def test_the_model_is_automodels_and_holds_the_weights_of_the_files(
    kind: str, untied_folder: Path, tied_folder: Path, qwen_folder: Path
) -> None:
    """Also after training. Linears have the names that Hugging Face gives them, and datums share passes."""
    folder = {"untied": untied_folder, "tied": tied_folder, "qwen": qwen_folder}[kind]
    engine = load_engine(folder)
    assert type(engine.model).__module__.startswith("nemo_automodel.components.models.")
    plain = TorchEngine(folder, device="cpu", threads=1, dtype="float32")
    assert engine.info.packed == plain.load().packed
    assert linear_families(engine.model) == linear_families(plain.model)
    engine.create_adapter("a", SPEC)
    train(engine, make_batch("a"))
    found = {key.replace(".base.", "."): whole(p) for key, p in engine.model.named_parameters()}
    stored = load_file(folder / "model.safetensors")
    assert found.keys() == stored.keys()
    for key, tensor in stored.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=0)
    assert engine.read_bytes == sum(t.numel() * t.element_size() for t in stored.values())


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-5), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("kind", ["qwen", "tied"])
def test_one_rank_computes_what_the_torch_engine_does(
    kind: str, dtype: str, close: float, qwen_folder: Path, tied_folder: Path, tmp_path: Path
) -> None:
    """Logprobs and norms of gradients; adapters with moments go there and back."""
    folder = qwen_folder if kind == "qwen" else tied_folder
    ours = load_engine(folder, dtype=dtype)
    plain = TorchEngine(folder, device="cpu", threads=1, dtype=dtype)
    plain.load()
    for engine in (ours, plain):
        engine.create_adapter("a", SPEC)
    for seed in range(2):
        batch = make_batch("a", lengths=UNEQUAL, seed=seed)
        norms = [train(engine, batch).metrics["grad_norm"] for engine in (ours, plain)]
        assert norms[0] == pytest.approx(norms[1], rel=10 * close)
    ours.save_adapter("a", tmp_path / "ours", with_optimizer=True)
    plain.load_adapter("b", tmp_path / "ours", with_optimizer=True, create=True)
    np.testing.assert_allclose(logprobs(ours, "a"), logprobs(plain, "b"), atol=10 * close)
    accumulate(plain, make_batch("b"))
    plain.optimizer_step("b", FAST)
    plain.save_adapter("b", tmp_path / "plain", with_optimizer=True)
    ours.load_adapter("c", tmp_path / "plain", with_optimizer=True, create=True)
    np.testing.assert_allclose(logprobs(ours, "c"), logprobs(plain, "b"), atol=10 * close)


def test_files_that_keep_weights_in_another_form_are_refused_by_name(untied_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(untied_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.qkv"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Unavailable, match=r"layers\.0\.self_attn\.q_proj\.weight is not in the files") as caught:
        load_engine(folder)
    assert "Traceback" not in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_a_weight_that_is_not_as_it_is_stored_is_found(untied_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number off in one weight, as a loader would leave it that got something wrong."""
    from engines.automodel import loading

    real = loading._built

    def wrong(*args: Any) -> Any:
        model = real(*args)
        with torch.no_grad():
            model.get_submodule("model.layers.1.mlp.up_proj").weight[3, 4] += 1e-3
        return model

    monkeypatch.setattr(loading, "_built", wrong)
    with pytest.raises(Unavailable, match=r"did not load model\.layers\.1\.mlp\.up_proj\.weight"):
        load_engine(untied_folder)


# -- two ranks ---------------------------------------------------------------------------------------------------------
def examples(batch: TrainBatch) -> list[Example]:
    return [
        {"tokens": torch.from_numpy(d.tokens), **{key: torch.from_numpy(value) for key, value in d.inputs.items()}}
        for d in batch.datums
    ]


def exported(two: Gang, adapter_id: str, folder: Path) -> tuple[dict[str, Any], Adapter]:
    two.call("save_checkpoint", adapter_id, str(folder), False)
    return json.loads((folder / "adapter_config.json").read_text()), load_file(folder / "adapter_model.safetensors")


def test_accumulated_steps_with_overrides_are_those_of_adamw(
    two: Gang,
    tied_folder: Path,
    tmp_path: Path,
    name: str,  # noqa: F811
) -> None:
    """PEFT and torch.optim take the same batches: what `zero_grad` cleared never counts, overrides rule one step."""
    two.call("create_adapter", f"{name}-first", SPEC)
    two.call("forward_backward", make_batch(f"{name}-first", lengths=UNEQUAL))
    two.call("optimizer_step", f"{name}-first", FAST)  # B is no longer zero
    reference = Reference(tied_folder, *exported(two, f"{name}-first", tmp_path / "start"))
    two.call("load_checkpoint", name, str(tmp_path / "start"), False, True)
    two.call("forward_backward", make_batch(name, lengths=(4, 9), seed=9))
    two.call("optimizer_zero_grad", name)
    plain = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.0}
    for number, change in enumerate([{}, {"lr": 3e-3, "betas": (0.5, 0.9)}, {"eps": 1e-2, "weight_decay": 0.3}, {}]):
        params = plain | change
        for seed, lengths in enumerate([UNEQUAL, (5,)]):
            batch = make_batch(name, lengths=lengths, seed=10 * number + seed)
            found = two.call("forward_backward", batch)
            expected = reference.forward_backward(examples(batch), "cross_entropy")
            for ours, theirs in zip(found.logprobs, expected, strict=True):
                np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
        two.call("optimizer_step", name, OptimStepParams(**params))
        reference.step(**params)
    trained, expected_weights = exported(two, name, tmp_path / "end")[1], reference.get()
    assert trained.keys() == expected_weights.keys()
    for key, tensor in trained.items():
        torch.testing.assert_close(tensor, expected_weights[key], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["qwen", "olmo"])
def test_two_ranks_of_other_architectures(kind: str, qwen_folder: Path, olmo_folder: Path, tmp_path: Path) -> None:
    """With a class of Automodel's own and without: logprobs, and the norm of the gradient, of transformers and PEFT."""
    folder = qwen_folder if kind == "qwen" else olmo_folder
    with gang(folder, tmp_path / "data", 2, engine="automodel", engine_python=sys.executable) as ranks:
        ranks.call("create_adapter", "a", SPEC)
        ranks.call("forward_backward", make_batch("a", lengths=(12, 5)))
        ranks.call("optimizer_step", "a", FAST)
        reference = Reference(folder, *exported(ranks, "a", tmp_path / "saved"))
        batch = make_batch("a", lengths=UNEQUAL, seed=1)
        found = ranks.call("forward_backward", batch)
        for ours, theirs in zip(
            found.logprobs, reference.forward_backward(examples(batch), "cross_entropy"), strict=True
        ):
            np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)
        norm = sum(float(each.double().square().sum()) for each in reference.gradient().values()) ** 0.5
        assert ranks.call("optimizer_step", "a").metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_every_rank_keeps_its_slices_only(two: Gang, tied_folder: Path) -> None:
    stored = sum(t.numel() * t.element_size() for t in load_file(tied_folder / "model.safetensors").values())
    facts = two.call("facts")
    assert sum(each["read"] for each in facts) == stored
    assert all(0.45 * stored < each["read"] < 0.55 * stored for each in facts)
