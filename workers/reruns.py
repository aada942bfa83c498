"""What makes a second run of a sample look like the first one to whoever waits for it.

A worker, or a replica, may die while a sample runs. It then runs again with the same seed, so it draws the same tokens,
and its stream goes on where it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from schemas.errors import Cancelled, TinsmithError
from schemas.operations import Sample, SampleDelta, TopK

MAX_RERUNS = 2
"""How often work that a dying worker took with it is run again, if running it again is harmless."""


def seeded(sample: Sample, request_id: str) -> Sample:
    """The sample with a seed: one that has none gets the same one whenever it runs."""
    if sample.params.seed is not None:
        return sample
    seed = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") >> 1
    return replace(sample, params=replace(sample.params, seed=seed))


def unheard(told: dict[int, int], drawn: dict[int, int], delta: SampleDelta) -> SampleDelta | None:
    """The part of new tokens that no earlier run has told; None if all of them were told.

    Args:
        told: by sequence, how many tokens the listener has had; brought up to date.
        drawn: by sequence, how many tokens this run has drawn; brought up to date.
    """
    before = drawn.get(delta.index, 0)
    after = drawn[delta.index] = before + len(delta.tokens)
    known = told.get(delta.index, 0) - before
    if known >= len(delta.tokens):
        return None
    told[delta.index] = after
    if known <= 0:
        return delta
    topk = None if delta.topk is None else TopK(delta.topk.ids[known:], delta.topk.logprobs[known:])
    return SampleDelta(delta.index, delta.tokens[known:], delta.logprobs[known:], topk, delta.stop_reason)


def unheeded(outcome: TinsmithError, told: Mapping[int, int]) -> Cancelled:
    """The end of a sample that nobody wants any more, however it came about.

    It took at least what its listener has had (`told`, by sequence), also if the run that drew it was lost.
    """
    found = outcome if isinstance(outcome, Cancelled) else Cancelled()
    return Cancelled(
        prompt_tokens=found.prompt_tokens,
        cached_tokens=found.cached_tokens,
        drawn_tokens=max(found.drawn_tokens, sum(told.values())),
    )
