"""The toy sampler at 20 tokens per second and row, so that samples last long enough to be cut off."""

from __future__ import annotations

from tests.support.toy_worker import INFO, ToySampler
from workers.build import Progress
from workers.rollout import RolloutWorker
from workers.spec import WorkerSpec


def build(spec: WorkerSpec, progress: Progress) -> RolloutWorker:
    return RolloutWorker(ToySampler(step_seconds=0.05, max_rows=spec.max_sample_rows), INFO)
