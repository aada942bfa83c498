"""What a rank of a sharded model reads and keeps, on a model that is large beside everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from tests.engines.batches import make_batch
from tests.engines.contract import SPEC
from tests.engines.gang import gang
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.exhaustive


def test_no_rank_reads_or_keeps_the_whole_model(tmp_path: Path) -> None:
    """Of two ranks each reads half of the file's bytes, and has half of the weights after a training pass."""
    folder = make_tiny_model(tmp_path / "large", hidden=1024, layers=8)
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        stored = sum(4 * tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118 (no mapping)
    assert stored > 250e6
    for ranks in (1, 2):
        with gang(folder, tmp_path / f"data-{ranks}", ranks) as started:
            started.call("create_adapter", "a", SPEC)
            started.call("forward_backward", make_batch("a", lengths=(20, 30)))
            facts = started.call("facts")
        assert sum(each["read"] for each in facts) == stored
        assert all(each["kept"] < 1.02 * stored / ranks for each in facts)
