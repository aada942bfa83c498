"""The toy sampler at 20 tokens per second and row, so that samples last long enough to be cut off.

It does not start while the file exists that is given as the source of the base model.
"""

from __future__ import annotations

from pathlib import Path

from schemas.errors import Unavailable
from tests.support.toy_worker import INFO, ToySampler
from workers.build import Progress
from workers.rollout import RolloutWorker
from workers.spec import WorkerSpec


def build(spec: WorkerSpec, progress: Progress) -> RolloutWorker:
    if spec.source is not None and Path(spec.source).exists():
        raise Unavailable("the toy shall not start")
    return RolloutWorker(ToySampler(step_seconds=0.05, max_rows=spec.max_sample_rows), INFO)
