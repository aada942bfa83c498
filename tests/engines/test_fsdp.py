"""The FSDP engine on one rank: the common contract, and how work is divided. Several ranks: `test_fsdp_ranks.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.fsdp.engine import FsdpEngine
from tests.engines.contract import EngineContract


def load_engine(folder: Path) -> FsdpEngine:
    engine = FsdpEngine(folder, device="cpu", threads=1)
    engine.load()
    return engine


class TestContract(EngineContract):
    @pytest.fixture
    def engine(self, untied_folder: Path) -> FsdpEngine:
        return load_engine(untied_folder)
