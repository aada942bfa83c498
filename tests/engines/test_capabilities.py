"""What engines declare: it is true of the classes, refuses by name, and is what the documentation says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from app import engines_docs
from engines.automodel.engine import AutomodelEngine
from engines.capabilities import Capabilities
from engines.fsdp.engine import FsdpEngine
from engines.registry import ENGINES, SAMPLERS, capabilities
from engines.torch_engine.engine import TorchEngine
from engines.veomni.engine import VeomniEngine
from schemas.errors import InvalidRequest
from schemas.operations import LoraSpec

ROOT = Path(__file__).parents[2]
SMALL = Capabilities("small", devices=("cpu",), optimizers=("adamw",), samplers=("torch",))


def test_the_classes_have_what_the_registry_tells() -> None:
    for kind in (TorchEngine, FsdpEngine, AutomodelEngine, VeomniEngine):
        name = kind.capabilities.engine
        assert capabilities(name) is kind.capabilities
        assert ENGINES[name].endswith(f":{kind.__name__}")


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_declares_itself(name: str) -> None:
    can = capabilities(name)
    assert can.engine == name
    assert set(can.samplers) <= set(SAMPLERS)
    assert "cpu" in can.devices
    assert "adamw" in can.optimizers


def test_asking_imports_no_library() -> None:
    """The settings and `tinsmith serve --help` ask."""
    code = (
        "import sys; from engines.registry import ENGINES, capabilities; [capabilities(name) for name in ENGINES]; "
        "sys.exit(len({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_is_beyond_them_is_refused_by_field_value_and_what_is_accepted() -> None:
    for refused, field, words in (
        (lambda: SMALL.check_device("cuda:1"), "device", ["'cuda", "small", "auto, cpu"]),
        (lambda: SMALL.check_ranks(3), "ranks", ["3", "one process", ": 1"]),
        (lambda: SMALL.check_sampler("vllm"), "sampler", ["'vllm'", ": torch"]),
        (lambda: SMALL.check_optimizer("dimuon"), "optimizer_config.type", ["'dimuon'", ": adamw"]),
    ):
        with pytest.raises(InvalidRequest) as caught:
            refused()
        assert caught.value.field == field
        assert all(word in caught.value.message for word in words), caught.value.message
    SMALL.check_device("auto")
    SMALL.check_device("cpu")
    SMALL.check_ranks(1)
    SMALL.check_sampler("torch")
    SMALL.check_optimizer("adamw")


def test_an_engine_itself_refuses_too(untied_folder: Path, tmp_path: Path) -> None:
    """Whoever asks it without the edge; nothing is created, and a saved adapter of such an optimizer is not loaded."""

    class Small(TorchEngine):
        capabilities = SMALL

    engine, other = (
        Small(untied_folder, device="cpu", threads=1, dtype="float32"),
        TorchEngine(untied_folder, device="cpu", threads=1, dtype="float32"),
    )
    engine.load()
    other.load()
    with pytest.raises(InvalidRequest, match="dimuon"):
        engine.create_adapter("a", LoraSpec(2, 0), "dimuon")
    other.create_adapter("a", LoraSpec(2, 0), "dimuon")
    other.save_adapter("a", tmp_path / "saved", with_optimizer=True)
    with pytest.raises(InvalidRequest, match="dimuon"):
        engine.load_adapter("a", tmp_path / "saved", with_optimizer=True, create=True)
    engine.create_adapter("a", LoraSpec(2, 0))


def test_the_table_in_the_documentation_is_up_to_date() -> None:
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert text == engines_docs.page(text), "run `make docs`"
    assert all(f"`{name}`" in engines_docs.matrix() for name in ENGINES)
    with pytest.raises(ValueError, match="no place"):
        engines_docs.page("no marks")
