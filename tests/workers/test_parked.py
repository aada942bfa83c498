"""Who waits for room in the worker's memory."""

from __future__ import annotations

from workers.parked import PATIENCE, Parked


def test_a_parked_model_waits_until_something_has_ended() -> None:
    parked = Parked()
    parked.add("a")
    assert (parked.blocks("a"), parked.blocks("b")) == (True, False)
    parked.freed()
    assert not parked.blocks("a")


def test_after_some_refusals_everybody_else_waits() -> None:
    parked = Parked()
    for _ in range(PATIENCE):
        assert not parked.blocks("b")
        parked.add("a")
    assert (parked.blocks("a"), parked.blocks("b")) == (True, True)
    parked.freed()
    assert (parked.blocks("a"), parked.blocks("b")) == (False, True)
    parked.passed("a")
    assert not parked.blocks("b")
    parked.add("b")
    parked.freed()
    assert not parked.blocks("a")


def test_a_new_worker_has_refused_nobody() -> None:
    parked = Parked()
    for _ in range(PATIENCE):
        parked.add("a")
    parked.clear()
    assert (parked.blocks("a"), parked.blocks("b")) == (False, False)
    parked.passed("never seen")
