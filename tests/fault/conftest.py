"""The tiny base model of all tests here, and a quiet SDK."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(autouse=True)
def quiet_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the SDK's environment leaks in."""
    for name in [name for name in os.environ if name.startswith("TINKER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
