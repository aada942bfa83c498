"""Tiny base models for engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines.torch_engine.hardware import keep_sums
from tests.support.tiny_model import make_tiny_model

pytest.register_assert_rewrite("tests.engines.contract")
keep_sums()  # before the first product of this process, whichever test computes it


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Many small operations: one thread is faster, and the cores are shared."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with an output head of its own."""
    return make_tiny_model(tmp_path_factory.mktemp("untied") / "tiny-untied", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama whose head is its input embedding."""
    return make_tiny_model(tmp_path_factory.mktemp("tied") / "tiny-tied", tie_word_embeddings=True)
