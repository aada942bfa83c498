"""Tokenizers that clients find in the hub's cache by the name of the base model."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from app.cli import app
from app.tokenizers import install
from tests.support.tiny_model import make_tiny_model

NAME = "acme/tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_the_name_finds_the_tokenizer_offline(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cached files"):
        AutoTokenizer.from_pretrained(NAME, cache_dir=tmp_path, local_files_only=True)
    install(NAME, folder, tmp_path)
    found = AutoTokenizer.from_pretrained(NAME, cache_dir=tmp_path, local_files_only=True)
    text = "The anvil rang."
    assert found.encode(text) == AutoTokenizer.from_pretrained(folder).encode(text)


def test_weights_are_not_copied_and_a_second_time_changes_nothing(folder: Path, tmp_path: Path) -> None:
    first = install(NAME, folder, tmp_path)
    assert install(NAME, folder, tmp_path) == first
    assert list(tmp_path.rglob("*.safetensors")) == []
    assert len(list(tmp_path.rglob("tokenizer.json"))) == 1


def test_what_the_hub_gave_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    current = tmp_path / "models--acme--tiny" / "refs" / "main"
    current.parent.mkdir(parents=True)
    current.write_text("0123456789abcdef")
    with pytest.raises(ValueError, match="another version: 0123456789abcdef"):
        install(NAME, folder, tmp_path)
    assert current.read_text() == "0123456789abcdef"


@pytest.mark.parametrize("name", ["../x", "a/b/c", "", "a/..", "/a"])
def test_a_name_cannot_lead_out_of_the_cache(name: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the name of a model"):
        install(name, folder, tmp_path)


def test_a_folder_without_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tokenizer", NAME, str(tmp_path)])
    assert result.exit_code == 1
    assert "holds no tokenizer" in result.output


def test_the_command_installs_into_the_cache_of_the_hub(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    result = CliRunner().invoke(app, ["tokenizer", NAME, str(folder)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "models--acme--tiny" / "refs" / "main").exists()
