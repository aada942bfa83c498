"""A stream that begins again: every token once, in order, however the runs before were cut."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest

from schemas.errors import Cancelled, WorkerDied
from schemas.operations import Sample, SampleDelta, SamplingParams, TopK
from store.error_codec import error_from_json, error_to_json
from workers.reruns import seeded, unheard, unheeded


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


def test_a_cancelled_sample_took_at_least_what_was_told_and_keeps_its_counts_on_the_way() -> None:
    took = Cancelled(prompt_tokens=5, cached_tokens=2, drawn_tokens=7)
    for outcome, told, drawn in (
        (took, {}, 7),
        (took, {0: 3, 1: 3}, 7),
        (took, {0: 6, 1: 4}, 10),
        (WorkerDied("gone"), {0: 2}, 2),
    ):
        found = pickle.loads(pickle.dumps(unheeded(outcome, told)))
        assert isinstance(found, Cancelled)
        assert (found.code, found.message, found.status) == ("cancelled", "the sample was cancelled", 410)
        assert found.drawn_tokens == drawn
        assert (found.prompt_tokens, found.cached_tokens) == ((5, 2) if outcome is took else (0, 0))
    assert isinstance(error_from_json(error_to_json(took)), Cancelled)
