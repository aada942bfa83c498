"""What a rank has in place of a sampler when rank 0 alone samples, from weights that are not the ranks' own."""

from __future__ import annotations

from engines.sampling.base import SampleStep, SamplingEngine
from schemas.operations import Sample, SamplerLoad, SampleStats


class Elsewhere(SamplingEngine):
    """Takes every call and has nothing to do; rank 0's answers count."""

    @classmethod
    def check(cls) -> None:
        """Nothing is needed."""

    def add(self, request_id: str, sample: Sample) -> None:
        """Rank 0 has it."""

    def cancel(self, request_id: str) -> None:
        """Rank 0 forgets it, and says what it took."""

    def step(self) -> SampleStep:
        """Nothing ends here."""
        return SampleStep()

    @property
    def load(self) -> SamplerLoad:
        """Empty."""
        return SamplerLoad()

    def take_stats(self) -> SampleStats:
        """Zeros."""
        return SampleStats()
