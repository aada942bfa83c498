"""Settings of the workers reach them: none is shown in the help and then ignored."""

from __future__ import annotations

from pathlib import Path

from app.groups import local_groups
from app.settings import Settings
from workers.local import LocalWorkerGroup


def test_the_settings_reach_the_worker(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path, dtype="bfloat16", device="cpu", threads=3, sample_logprobs="plain", worker_start_timeout=5.0
    )
    group = local_groups(settings)("acme/tiny", "/models/tiny")
    assert isinstance(group, LocalWorkerGroup)
    spec = group._spec
    assert (spec.model, spec.source, spec.data_dir) == ("acme/tiny", "/models/tiny", str(tmp_path))
    assert (spec.engine, spec.dtype, spec.device, spec.threads) == ("torch", "bfloat16", "cpu", 3)
    assert spec.sample_logprobs == "plain"
    assert group._start_timeout == 5.0
