"""The torch engine: the common contract, and what only it promises (memory, files on disk, its base weights)."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engines.registry import get_engine
from engines.torch_engine.engine import TorchEngine
from engines.torch_engine.packing import Pack
from engines.torch_engine.training_pass import TrainingPass
from schemas.errors import EngineFailure, InvalidRequest, OutOfMemory, Unavailable
from schemas.operations import Datum, OptimStepParams, TrainBatch
from tests.engines.batches import make_batch
from tests.engines.contract import FAST, SPEC, EngineContract, accumulate, logprobs, train


def load_engine(folder: Path) -> TorchEngine:
    engine = TorchEngine(folder, device="cpu", threads=1, dtype="float32")
    engine.load()
    return engine


@pytest.fixture
def engine(untied_folder: Path) -> TorchEngine:
    return load_engine(untied_folder)


class TestContract(EngineContract):
    @pytest.fixture(params=["untied", "tied"])
    def engine(self, request: pytest.FixtureRequest, untied_folder: Path, tied_folder: Path) -> TorchEngine:
        return load_engine(untied_folder if request.param == "untied" else tied_folder)


def checksum(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_info(untied_folder: Path) -> None:
    assert get_engine("torch") is TorchEngine
    engine = TorchEngine(untied_folder, device="cpu", dtype="float32")
    with pytest.raises(EngineFailure):
        _ = engine.model
    info = engine.load()
    model = AutoModelForCausalLM.from_pretrained(untied_folder)
    assert info.parameters == sum(p.numel() for p in model.parameters())
    assert (info.vocab_size, info.context_length, info.dtype, info.num_layers) == (259, 256, "float32", 2)
    assert info.eos_token_ids == (2,)
    assert info.adapter_families == {"attn", "mlp", "unembed"}
    assert engine.info == info
    assert engine.tokenizer_folder == untied_folder
    assert engine.create_adapter("a", SPEC) == sum(t.numel() for t in engine.adapter_weights("a").tensors)


@pytest.mark.parametrize("folder", ["untied_folder", "tied_folder"])
def test_base_weights_never_change(folder: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    engine = load_engine(request.getfixturevalue(folder))
    before = checksum(engine.model)
    engine.create_adapter("a", SPEC)
    for seed in range(3):
        train(engine, make_batch("a", seed=seed), OptimStepParams(lr=0.1, weight_decay=0.5))
    engine.save_adapter("a", tmp_path / "c", with_optimizer=True)
    engine.load_adapter("a", tmp_path / "c", with_optimizer=True, create=False)
    assert checksum(engine.model) == before
    assert not any(p.requires_grad or p.grad is not None for p in engine.model.parameters())


def test_weights_missing_means_one_everywhere(engine: TorchEngine) -> None:
    engine.create_adapter("a", SPEC)
    datum = make_batch("a").datums[0]
    plain = {"target_tokens": datum.inputs["target_tokens"]}
    ones = {**plain, "weights": np.ones(len(datum.tokens), np.float32)}
    absent, present = (
        engine.forward(TrainBatch("a", (Datum(datum.tokens, i),), "cross_entropy")) for i in (plain, ones)
    )
    assert absent.metrics == present.metrics
    assert absent.metrics["loss:sum"] == pytest.approx(-absent.logprobs[0].sum(), rel=1e-5)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
    ids=["python", "cuda", "cpu"],
)
def test_out_of_memory_before_a_gradient_makes_smaller_passes(
    engine: TorchEngine, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of more than one datum do not fit: the datums go one by one, and the numbers are the same."""
    for name in ("a", "b"):
        engine.create_adapter(name, SPEC)
    expected = accumulate(engine, make_batch("b", lengths=(9, 5, 12)))
    hidden = TrainingPass._hidden

    def failing(run: TrainingPass, geometry: Pack) -> torch.Tensor:
        if len(geometry.spans) > 1:
            raise error
        return hidden(run, geometry)

    monkeypatch.setattr(TrainingPass, "_hidden", failing)
    result = accumulate(engine, make_batch("a", lengths=(9, 5, 12)))
    assert result.metrics == expected.metrics
    assert torch.equal(gradient(engine, "a"), gradient(engine, "b"))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_out_of_memory_in_the_middle_of_a_backward_pass(
    engine: TorchEngine, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create_adapter("a", SPEC)
    accumulate(engine, make_batch("a"))
    kept = gradient(engine, "a").clone()

    def failing(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr("engines.torch_engine.training_pass.torch.autograd.backward", failing)
    with pytest.raises(OutOfMemory, match=r"data\[0\]"):
        accumulate(engine, make_batch("a", seed=4))
    monkeypatch.undo()
    assert torch.equal(gradient(engine, "a"), kept)
    assert engine.router.segments is None
    accumulate(engine, make_batch("a", seed=4))
    assert not torch.equal(gradient(engine, "a"), kept)


def gradient(engine: TorchEngine, adapter_id: str) -> torch.Tensor:
    """The accumulated gradient, one vector."""
    flat = engine._pool.get(adapter_id).gradient.flat
    assert flat is not None
    return flat


def test_a_restart_continues_bit_for_bit(untied_folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys, hashlib, numpy as np; from pathlib import Path;"
        "from tests.engines.test_torch_engine import *;"
        "e = load_engine(Path(sys.argv[1]));"
        "e.load_adapter('a', Path(sys.argv[2]), with_optimizer=True, create=True);"
        "[train(e, make_batch('a', seed=s)) for s in (7, 8)];"
        "print(hashlib.sha256(logprobs(e, 'a').tobytes()).hexdigest())"
    )
    engine = load_engine(untied_folder)
    engine.create_adapter("a", SPEC)
    train(engine, make_batch("a"))
    engine.save_adapter("a", tmp_path / "c", with_optimizer=True)
    command = [sys.executable, "-c", script, str(untied_folder), str(tmp_path / "c")]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=True
    )
    for seed in (7, 8):
        train(engine, make_batch("a", seed=seed))
    assert done.stdout.split()[-1] == hashlib.sha256(logprobs(engine, "a").tobytes()).hexdigest()


# -- folders ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def saved(engine: TorchEngine, tmp_path: Path) -> Path:
    engine.create_adapter("a", SPEC)
    train(engine, make_batch("a"))
    engine.save_adapter("a", tmp_path / "c", with_optimizer=True)
    return tmp_path / "c"


def test_a_saved_folder_is_complete_and_equal_to_the_live_weights(engine: TorchEngine, saved: Path) -> None:
    names = {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "tinsmith.json"}
    assert {path.name for path in saved.iterdir()} == names
    assert [path.name for path in saved.parent.iterdir()] == ["c"]
    tensors = load_file(saved / "adapter_model.safetensors")
    for name, (down, up) in engine.adapter_weights("a").pairs.items():
        assert torch.equal(tensors.pop(f"base_model.model.{name}.lora_A.weight"), down)
        assert torch.equal(tensors.pop(f"base_model.model.{name}.lora_B.weight"), up)
        assert up.any()
    assert not tensors
    config = json.loads((saved / "adapter_config.json").read_text())
    assert config["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    assert (config["r"], config["lora_alpha"], config["bias"], config["task_type"]) == (4, 32, "none", "CAUSAL_LM")
    assert config["base_model_name_or_path"] == "tiny-untied"


def test_an_empty_folder_in_place_is_replaced(engine: TorchEngine, tmp_path: Path) -> None:
    engine.create_adapter("a", SPEC)
    (tmp_path / "made").mkdir()
    assert engine.save_adapter("a", tmp_path / "made", with_optimizer=False).size_bytes > 0
    assert (tmp_path / "made" / "tinsmith.json").is_file()


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def resign(folder: Path) -> None:
    """Make the checksums right again, so that only the later checks can object."""
    manifest = json.loads((folder / "tinsmith.json").read_text())
    manifest["sha256"] = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in manifest["sha256"]}
    (folder / "tinsmith.json").write_text(json.dumps(manifest))


def edit(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)
        resign(folder)

    return apply


def edit_json(name: str, **values: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))
        resign(folder)

    return apply


WEIGHTS, MOMENTS = "adapter_model.safetensors", "optimizer.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "weights byte": lambda f: flip_last_byte(f / WEIGHTS),
    "optimizer byte": lambda f: flip_last_byte(f / MOMENTS),
    "config byte": lambda f: (f / "adapter_config.json").write_text("{}"),
    "weights missing": lambda f: (f / WEIGHTS).unlink(),
    "optimizer missing": lambda f: (f / MOMENTS).unlink(),
    "manifest missing": lambda f: (f / "tinsmith.json").unlink(),
    "manifest no json": lambda f: (f / "tinsmith.json").write_text("{" * 5000),
    "manifest list": lambda f: (f / "tinsmith.json").write_text("[]"),
    "version": edit_json("tinsmith.json", format_version=99),
    "geometry": edit_json("tinsmith.json", lora={"rank": "4"}),
    "rank": edit_json("adapter_config.json", r=8),
    "alpha": edit_json("adapter_config.json", lora_alpha=16),
    "weights link": lambda f: (
        (f / WEIGHTS).rename(f.parent / "elsewhere"),
        (f / WEIGHTS).symlink_to(f.parent / "elsewhere"),
    ),
    "not safetensors": lambda f: ((f / WEIGHTS).write_bytes(b"\x80\x04pickle"), resign(f)),
    "nan": edit(WEIGHTS, lambda t: t[Q].fill_(float("nan"))),
    "dtype": edit(WEIGHTS, lambda t: t.update({Q: t[Q].half()})),
    "missing tensor": edit(WEIGHTS, lambda t: t.pop(Q)),
    "extra tensor": edit(WEIGHTS, lambda t: t.update({"x": torch.zeros(1)})),
    "other shape": edit(WEIGHTS, lambda t: t.update({Q: torch.zeros(4, 5)})),
    "other rank": edit(WEIGHTS, lambda t: t.update({Q: torch.zeros(3, 32)})),
    "infinite moment": edit(MOMENTS, lambda t: t[f"exp_avg.{Q}"].fill_(float("inf"))),
    "missing moment": edit(MOMENTS, lambda t: t.pop(f"exp_avg.{Q}")),
    "negative step": edit(MOMENTS, lambda t: t["step"].fill_(-1)),
    "moment shape": edit(MOMENTS, lambda t: t.update({f"exp_avg.{Q}": torch.zeros(1)})),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused(engine: TorchEngine, saved: Path, damage: str) -> None:
    DAMAGE[damage](saved)
    before = logprobs(engine, "a")
    with pytest.raises(InvalidRequest) as caught:
        engine.load_adapter("a", saved, with_optimizer=True, create=False)
    assert str(saved.parent) not in caught.value.message
    np.testing.assert_array_equal(logprobs(engine, "a"), before)


def test_a_failed_write_leaves_nothing_behind(
    engine: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create_adapter("a", SPEC)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr("engines.peft_format.os.rename", full)
    with pytest.raises(EngineFailure, match="No space left") as caught:
        engine.save_adapter("a", tmp_path / "c", with_optimizer=True)
    assert str(tmp_path) not in caught.value.message
    assert list(tmp_path.iterdir()) == []


# -- loading ---------------------------------------------------------------------------------------------------------
def test_unusable_settings_and_folders_are_refused(untied_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="float16"):
        TorchEngine(untied_folder, device="cpu", dtype="float16").load()
    with pytest.raises(InvalidRequest, match="device"):
        TorchEngine(untied_folder, device="tpu").load()
    with pytest.raises(Unavailable) as caught:
        TorchEngine(tmp_path, device="cpu").load()
    assert str(tmp_path) not in caught.value.message
    with pytest.raises(InvalidRequest, match=r"known: .*fsdp.*, torch,"):
        get_engine("jax")


def test_bfloat16_base_with_float32_adapters(untied_folder: Path) -> None:
    engine = TorchEngine(untied_folder, device="cpu", dtype="bfloat16", threads=1)
    assert engine.load().dtype == "bfloat16"
    engine.create_adapter("a", SPEC)
    start = accumulate(engine, make_batch("a")).metrics["loss:sum"]
    for _ in range(5):
        engine.optimizer_step("a", FAST)
        end = accumulate(engine, make_batch("a")).metrics["loss:sum"]
    assert end < start
    assert all(t.dtype == torch.float32 for t in engine.adapter_weights("a").tensors)


def test_a_loaded_adapter_keeps_the_order_of_its_modules(engine: TorchEngine, saved: Path) -> None:
    """Norms are sums in this order: another one could differ in the last bit after a load."""
    engine.load_adapter("b", saved, with_optimizer=True, create=True)
    assert list(engine.adapter_weights("b").pairs) == list(engine.adapter_weights("a").pairs)
    kept = [engine._pool.get(name).memory().slots["exp_avg"] for name in ("b", "a")]
    for one, other in zip(*kept, strict=True):
        assert torch.equal(one, other)
