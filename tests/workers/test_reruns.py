"""A stream that begins again: every token once, in order, however the runs before were cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from schemas.operations import Sample, SampleDelta, SamplingParams, TopK
from workers.reruns import seeded, unheard


def delta(index: int, first: int, last: int, *, top: bool = False) -> SampleDelta:
    tokens = np.arange(first, last, dtype=np.int32)
    ids = np.stack([tokens, tokens + 1], axis=1)
    return SampleDelta(index, tokens, -tokens.astype(np.float32), TopK(ids, -ids.astype(np.float32)) if top else None)


@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("cuts", list(itertools.product([(3, 7), (1, 2, 8), (10,)], [(2, 4, 6, 10), (10,), (5, 10)])))
def test_every_token_is_told_once_over_two_runs(cuts: tuple[tuple[int, ...], tuple[int, ...]], top: bool) -> None:
    told: dict[int, int] = {}
    heard: dict[int, list[SampleDelta]] = {0: [], 1: []}
    for run in cuts:
        drawn: dict[int, int] = {}
        for first, last in itertools.pairwise((0, *run)):
            for index in (0, 1):
                new = unheard(told, drawn, delta(index, first, last, top=top))
                if new is not None:
                    heard[index].append(new)
    for deltas in heard.values():
        tokens = np.concatenate([one.tokens for one in deltas])
        np.testing.assert_array_equal(tokens, np.arange(10))
        np.testing.assert_array_equal(np.concatenate([one.logprobs for one in deltas]), -tokens.astype(np.float32))
        if top:
            ids = np.concatenate([one.topk.ids for one in deltas if one.topk is not None])
            np.testing.assert_array_equal(ids, np.stack([tokens, tokens + 1], axis=1))


def test_a_seed_depends_on_the_request_alone_and_a_given_one_stays() -> None:
    sample = Sample(np.array([1]), SamplingParams(max_tokens=1), 1, None)
    seeds = {name: seeded(sample, name).params.seed for name in ("a", "b")}
    assert seeds["a"] == seeded(sample, "a").params.seed
    assert seeds["a"] != seeds["b"]
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds.values())
    given = Sample(np.array([1]), SamplingParams(max_tokens=1, seed=7), 1, None)
    assert seeded(given, "a") is given
