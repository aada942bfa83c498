"""Fifteen seconds of wild bodies; `make fuzz` goes on for as long as it is told."""

from __future__ import annotations

import random

import pytest

from benchmarks.fuzz import fuzz, samples
from benchmarks.fuzz_changes import changed_fields
from schemas.errors import TinsmithError


@pytest.mark.slow
def test_only_errors_of_our_own_leave_the_decoders() -> None:
    figures = fuzz(15, seed=random.SystemRandom().randrange(2**32))
    assert figures.inputs > 200
    assert figures.refused
    assert figures.accepted


def test_changes_reach_behind_the_first_look() -> None:
    draw = random.Random(1)
    for sample in samples():
        if sample.frame is not None:
            continue
        codes = set()
        for _ in range(400):
            try:
                sample.read(changed_fields(sample.body, sample.form, draw))
                codes.add("accepted")
            except TinsmithError as error:
                codes.add(error.code)
        assert len(codes - {"invalid_json", "invalid_protobuf"}) >= 2, (sample.body[:80], codes)
