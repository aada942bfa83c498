"""Engine `torchtitan` on one rank: the contract, and its numbers against transformers and PEFT.

Run it with the engine's own interpreter: `.engines/torchtitan/bin/python -m pytest -n 0` and this file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines.base_models import DEFAULT_MODEL
from engines.fsdp.loading import whole
from engines.registry import get_engine
from engines.sampling.torch_sampler import TorchSampler
from engines.torch_engine.adapter_pool import AdapterPool
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.packing import Pack
from engines.torch_engine.training_pass import TrainingPass
from engines.torchtitan.engine import TorchTitanEngine
from schemas.errors import Unavailable
from schemas.operations import LoraSpec, Sample, SampleResult, SampleTurn, SamplingParams
from tests.engines.batches import make_batch
from tests.engines.contract import FAST, SPEC, EngineContract, accumulate, logprobs, train
from tests.engines.field.titan_models import MODELS, make_model, reference_gradient, skip_without_titan
from tests.engines.test_reference import ours

skip_without_titan()

CLOSE = 2e-5
"""Of the largest gradient."""


def load_engine(folder: Path, kind: type[TorchEngine] = TorchTitanEngine, **options: Any) -> TorchEngine:
    engine = kind(folder, device="cpu", threads=1, **{"dtype": "float32"} | options)
    engine.load()
    return engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, name) for name in MODELS}


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> dict[str, TorchEngine]:
    return {name: load_engine(folder) for name, folder in folders.items()}


@pytest.fixture(params=list(MODELS))
def case(
    request: pytest.FixtureRequest, folders: dict[str, Path], engines: dict[str, TorchEngine]
) -> Iterator[tuple[Path, TorchEngine]]:
    """Each model's folder, and its engine without adapters."""
    engine = engines[request.param]
    engine._pool = AdapterPool(None, None)
    yield folders[request.param], engine
    assert engine._open is None


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self, engines: dict[str, TorchEngine]) -> TorchEngine:
        engines["llama"]._pool = AdapterPool(None, None)
        return engines["llama"]


def weights(engine: TorchEngine) -> dict[str, Tensor]:
    return {name.replace(".base.", "."): whole(p).clone() for name, p in engine.model.named_parameters()}


# -- numbers -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("families", [(True, True, True), (True, False, False), (False, False, True)])
def test_gradients_and_logprobs_are_those_of_transformers_and_peft(
    case: tuple[Path, TorchEngine], families: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    """From an adapter that PEFT has read from our export, so that names and the order of rows are its own."""
    folder, engine = case
    engine.create_adapter("a", LoraSpec(4, 3, *families))
    train(engine, make_batch("a", lengths=(12, 5)))
    engine.save_adapter("a", tmp_path / "saved", with_optimizer=False)
    batch = make_batch("a", lengths=(3, 40, 1, 17), seed=1)
    expected, theirs = reference_gradient(folder, tmp_path / "saved", batch)
    result = accumulate(engine, batch)
    for found, own in zip(result.logprobs, expected, strict=True):
        np.testing.assert_allclose(found, own, atol=1e-4)
    found_gradient = ours(engine, "a", "gradient")
    assert found_gradient.keys() == theirs.keys()
    largest = max(float(each.abs().max()) for each in theirs.values())
    for name, own_gradient in theirs.items():
        np.testing.assert_allclose(found_gradient[name].numpy(), own_gradient.numpy(), rtol=0, atol=CLOSE * largest)
    assert all(float(each.abs().max()) > 1e-3 * largest for each in theirs.values())


def test_the_weights_are_those_of_the_files_and_training_leaves_them(case: tuple[Path, TorchEngine]) -> None:
    folder, engine = case
    engine.create_adapter("a", SPEC)
    for seed in range(2):
        train(engine, make_batch("a", seed=seed))
    found, stored = weights(engine), load_file(folder / "model.safetensors")
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert isinstance(engine, TorchTitanEngine)
    assert engine.read_bytes == sum(tensor.numel() * 4 for tensor in stored.values())


def test_torchtitans_own_adapter_of_state_dicts_gives_the_same_weights(
    folders: dict[str, Path], engines: dict[str, TorchEngine]
) -> None:
    """Its rows of q and k are ours in another order: the one in which outputs are put on their way to its attention."""
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    from engines.torchtitan.model import paired

    (decoder,) = engines["llama"].model.model._decoder
    adapter = Llama3StateDictAdapter(decoder.config, None)
    theirs = adapter.from_hf(load_file(folders["llama"] / "model.safetensors"))
    own = {name.replace(".linear.", "."): whole(p) for name, p in decoder.named_parameters()}
    assert own.keys() == theirs.keys()
    for name, tensor in theirs.items():
        heads = {"wq": 4, "wk": 2}.get(name.split(".")[-2])
        ordered = own[name] if heads is None else paired(own[name].t(), heads).t()
        torch.testing.assert_close(ordered, tensor, rtol=0, atol=0)


def test_checkpointed_layers_give_the_same_gradient(folders: dict[str, Path]) -> None:
    found = []
    for mode in ("off", "on"):
        engine = load_engine(folders["llama-tied"], gradient_checkpointing=mode)
        assert len(engine.model.checkpointed_layers) == 2
        engine.create_adapter("a", SPEC)
        train(engine, make_batch("a"))
        accumulate(engine, make_batch("a", seed=1))
        found.append(engine._pool.get("a").gradient.flat)
    assert found[0] is not None
    assert found[1] is not None
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_pass_that_fails_leaves_the_model_ready_for_the_next(
    engines: dict[str, TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines["llama"]
    engine._pool = AdapterPool(None, None)
    engine.create_adapter("a", SPEC)
    accumulate(engine, make_batch("a"))
    hidden: Callable[[TrainingPass, Pack], Tensor] = TrainingPass._hidden
    layer = engine.model.checkpointed_layers[1]
    failures = iter([True, False, False, False])

    def once(run: TrainingPass, geometry: Pack) -> Tensor:
        if not next(failures):
            return hidden(run, geometry)
        handle = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError()))
        try:
            return hidden(run, geometry)
        finally:
            handle.remove()

    engine.create_adapter("b", SPEC)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingPass, "_hidden", once)
        with pytest.raises(Exception, match="memory"):
            accumulate(engine, make_batch("b"))
    accumulate(engine, make_batch("b"))
    one, other = (engine._pool.get(name).gradient.flat for name in ("a", "b"))
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_bfloat16_is_as_far_from_float32_as_with_the_torch_engine(case: tuple[Path, TorchEngine]) -> None:
    """Both round the base weights, each its own activations; neither may be much worse than the other."""
    folder, exact = case
    gaps = []
    for engine in (
        load_engine(folder, dtype="bfloat16"),
        load_engine(folder, TorchEngine, dtype="bfloat16"),
        exact,
    ):
        engine.create_adapter("a", SPEC)
        engine.optimizer_step("a")
        accumulate(engine, make_batch("a"))
        gaps.append(engine._pool.get("a").gradient.flat)
    titan, torch_, wanted = gaps
    assert titan is not None
    assert torch_ is not None
    assert wanted is not None
    assert 0 < float((titan - wanted).norm()) < 2 * float((torch_ - wanted).norm())


# -- files -------------------------------------------------------------------------------------------------------------
def test_checkpoints_go_to_the_torch_engine_and_back_with_the_optimizer(
    case: tuple[Path, TorchEngine], tmp_path: Path
) -> None:
    """Bit for bit, and the next steps agree."""
    folder, titan = case
    other = load_engine(folder, TorchEngine)
    titan.create_adapter("a", SPEC)
    for seed in range(2):
        train(titan, make_batch("a", seed=seed))
    saved = titan.save_adapter("a", tmp_path / "titan", with_optimizer=True)
    assert other.load_adapter("a", tmp_path / "titan", with_optimizer=True, create=True) == saved
    for seed in range(2, 4):
        metrics = [train(engine, make_batch("a", seed=seed)).metrics for engine in (titan, other)]
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-3)
    np.testing.assert_allclose(logprobs(titan, "a"), logprobs(other, "a"), atol=2e-3)
    other.save_adapter("a", tmp_path / "other", with_optimizer=True)
    titan.load_adapter("back", tmp_path / "other", with_optimizer=True, create=True)
    state, expected = titan._pool.get("back"), other._pool.get("a")
    torch.testing.assert_close(state.flat, expected.flat, rtol=0, atol=0)
    for name, moment in expected.moments.items():
        torch.testing.assert_close(state.moments[name], moment, rtol=0, atol=0)
    np.testing.assert_allclose(logprobs(titan, "back"), logprobs(other, "a"), atol=1e-4)


def test_weights_in_bfloat16_and_in_several_files(tmp_path: Path, folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "halves", max_shard_size="40KB")
    assert len(list((tmp_path / "halves").glob("*.safetensors"))) > 1
    engine = load_engine(tmp_path / "halves")
    found = weights(engine)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach().float(), rtol=0, atol=0)


def test_another_version_of_torchtitan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.torchtitan.engine.VERSION", "0.2.0")
    with pytest.raises(Unavailable, match=r"needs torchtitan 0\.2\.0; 0\.3\.0 is installed"):
        get_engine("torchtitan")


# -- what there is no model for ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "mistral"}, "model_type llama and qwen3; this base model's is 'mistral'"),
        ({"attention_bias": True}, "attention_bias of the base model is True; its llama3 has False"),
        ({"hidden_act": "gelu"}, "hidden_act of the base model is 'gelu'; its llama3 has 'silu'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type of the base model is 'linear'; its llama3 has 'default' or 'llama3'",
        ),
        ({"intermediate_size": 48}, r"layers\.0\.mlp\.down_proj\.weight is not in the files in the form"),
        ({"num_hidden_layers": 1}, r"layers\.1\.input_layernorm\.weight is in the files"),
    ],
)
def test_other_models_are_refused_by_name(
    changes: dict[str, Any], told: str, tmp_path: Path, folders: dict[str, Path]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(folders["llama"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(Unavailable, match=told):
        load_engine(folder)


def test_a_weight_that_is_missing_is_named(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = tmp_path / "other"
    shutil.copytree(folders["llama"], folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Unavailable, match=r"model\.norm\.weight"):
        load_engine(folder)


def test_qwen3_with_windows_is_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = tmp_path / "other"
    shutil.copytree(folders["qwen3"], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_sliding_window": True, "sliding_window": 4}))
    with pytest.raises(Unavailable, match="use_sliding_window"):
        load_engine(folder)


# -- sampling ----------------------------------------------------------------------------------------------------------
def test_samples_are_those_of_the_torch_engine(case: tuple[Path, TorchEngine], tmp_path: Path) -> None:
    """Token for token, with and without an adapter, several sequences of a prompt."""
    folder, titan = case
    titan.create_adapter("a", SPEC)
    train(titan, make_batch("a"))
    titan.save_adapter("a", tmp_path / "saved", with_optimizer=False)
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=5, stop=())
    samples = {
        f"s{i}": Sample(np.arange(5, 12 + 9 * i), params, 1 + i, None if i else str(tmp_path / "saved"), True)
        for i in range(3)
    }
    found = []
    for engine in (titan, load_engine(folder, TorchEngine)):
        sampler, ended = TorchSampler(engine.model, engine.router, None), {}
        turn = SampleTurn(samples, steps=50)
        while len(ended) < len(samples):
            ended |= sampler.turn(turn).ended
            turn = SampleTurn(steps=50)
        found.append(ended)
    for name in samples:
        one, other = found[0][name], found[1][name]
        assert isinstance(one, SampleResult), one
        assert isinstance(other, SampleResult), other
        assert [s.tokens.tolist() for s in one.sequences] == [s.tokens.tolist() for s in other.sequences]
        np.testing.assert_allclose(one.prompt_logprobs, other.prompt_logprobs, atol=1e-4)
        for own, expected in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_allclose(own.logprobs, expected.logprobs, atol=1e-4)


# -- a real model ------------------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@pytest.mark.real_model
@pytest.mark.timeout(1800)
def test_smollm2_against_transformers_and_peft(tmp_path: Path) -> None:
    """The server's own environment has what converts the model; this one need not."""
    server = Path(__file__).parents[3] / ".venv/bin/python"
    if not server.exists():
        pytest.skip("the server's environment is missing: make setup")
    command = [str(server), "-m", "engines.base_models", DEFAULT_MODEL, "--data-dir", str(tmp_path / "data")]
    made = subprocess.run(command, cwd=server.parents[2], capture_output=True, text=True, check=True)
    folder = Path(made.stdout.strip().splitlines()[-1])
    engine = load_engine(folder)
    engine.create_adapter("a", LoraSpec(8, 3, train_unembed=False))
    train(engine, make_batch("a", lengths=(12, 5)), FAST)
    engine.save_adapter("a", tmp_path / "saved", with_optimizer=False)
    batch = make_batch("a", lengths=(30, 12), seed=1)
    expected, theirs = reference_gradient(folder, tmp_path / "saved", batch)
    result = accumulate(engine, batch)
    for found, own in zip(result.logprobs, expected, strict=True):
        np.testing.assert_allclose(found, own, atol=1e-3)
    found_gradient = ours(engine, "a", "gradient")
    largest = max(float(each.abs().max()) for each in theirs.values())
    for name, own_gradient in theirs.items():
        np.testing.assert_allclose(found_gradient[name].numpy(), own_gradient.numpy(), rtol=0, atol=1e-4 * largest)
