"""What a rank of a sharded model takes of memory, on a model that is large beside everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from tests.engines.batches import make_batch
from tests.engines.contract import SPEC
from tests.engines.gang import gang
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.exhaustive


def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    """Half of the files is read, half of the weights is kept, and the peak is lower by that, training included."""
    folder = make_tiny_model(tmp_path / "large", hidden=1024, layers=8)
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        stored = sum(4 * tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118 (no mapping)
    assert stored > 250e6
    peaks: dict[int, list[int]] = {}
    for ranks in (1, 2):
        with gang(folder, tmp_path / f"data-{ranks}", ranks) as started:
            started.call("create_adapter", "a", SPEC)
            started.call("forward_backward", make_batch("a", lengths=(20, 30)))
            facts = started.call("facts")
        assert sum(each["read"] for each in facts) == stored
        assert all(each["kept"] < 1.02 * stored / ranks for each in facts)
        peaks[ranks] = [each["peak"] for each in facts]
    assert max(peaks[2]) < peaks[1][0] - 0.4 * stored
