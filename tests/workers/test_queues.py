"""The order within a model: property tests over arrivals, refusals and holes, and each rule by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidRequest, SeqIdConflict
from workers.queues import ModelQueue


def drain_ready(queue: ModelQueue[int]) -> list[int]:
    started = []
    while queue.peek() is not None:
        started.append(queue.pop())
    return started


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)), st.data())
def test_any_arrival_order_with_refusals_executes_in_order(
    arrival: list[int], refused: set[int], data: st.DataObject
) -> None:
    queue: ModelQueue[int] = ModelQueue(60.0)
    known: set[int] = set()
    started: list[int] = []
    for seq_id in arrival:
        known.add(seq_id)
        if seq_id in refused:
            queue.note_refused(seq_id)
        else:
            queue.add(seq_id, seq_id, 0.0)
        if data.draw(st.booleans()):
            new = drain_ready(queue)
            assert all(set(range(item)) <= known for item in new), "started before a predecessor was known"
            started += new
    started += drain_ready(queue)
    assert started == sorted(set(range(8)) - refused)
    assert len(queue) == 0


@given(st.permutations(range(10)), st.sets(st.integers(0, 9), max_size=4), st.floats(0, 50))
def test_holes_fail_exactly_what_waits_behind_them_and_nothing_is_lost(
    arrival: list[int], holes: set[int], spread: float
) -> None:
    queue: ModelQueue[int] = ModelQueue(60.0)
    started, failed = [], {}
    present = [seq_id for seq_id in arrival if seq_id not in holes]
    for index, seq_id in enumerate(present):
        queue.add(seq_id, seq_id, index * spread / 10)
        started += drain_ready(queue)
    assert queue.expire(now=59.9) == []
    for item, error in queue.expire(now=1000.0):
        failed[item] = error
    first_hole = min(holes, default=10)
    assert started == list(range(first_hole))
    assert sorted(failed) == sorted(set(present) - set(started))
    assert all(error.code == "seq_id_gap" and f"seq_id {first_hole} " in error.message for error in failed.values())
    following = max(present, default=-1) + 1
    if present:
        assert queue.add(None, 99, 1000.0) == following
        assert drain_ready(queue) == [99]


def test_chunks_arrive_two_three_one() -> None:
    queue: ModelQueue[int] = ModelQueue(60.0, first_seq=1)
    queue.add(2, 2, 0.0)
    queue.add(3, 3, 0.0)
    assert queue.peek() is None
    assert queue.missing() == 1
    queue.add(1, 1, 1.0)
    assert drain_ready(queue) == [1, 2, 3]


def test_gap_timer_starts_with_the_first_waiting_later_operation() -> None:
    queue: ModelQueue[int] = ModelQueue(60.0)
    queue.add(5, 5, 10.0)
    queue.add(3, 3, 40.0)
    assert queue.gap_deadline() == 70.0
    assert queue.expire(69.0) == []
    assert [item for item, _ in queue.expire(70.0)] == [3, 5]
    assert queue.gap_deadline() is None


def test_corrected_request_is_accepted_while_nothing_later_started() -> None:
    queue: ModelQueue[int] = ModelQueue(60.0)
    queue.note_refused(0)
    queue.add(0, 0, 0.0)
    queue.add(1, 1, 0.0)
    assert drain_ready(queue) == [0, 1]


def test_corrected_request_after_a_later_start_is_refused_clearly() -> None:
    queue: ModelQueue[int] = ModelQueue(60.0)
    queue.note_refused(0)
    queue.add(1, 1, 0.0)
    assert drain_ready(queue) == [1]
    with pytest.raises(InvalidRequest, match="seq_id 0 comes too late: seq_id 1") as caught:
        queue.add(0, 0, 0.0)
    assert caught.value.code == "seq_id_passed"
    assert caught.value.field == "seq_id"


def test_same_seq_twice_conflicts() -> None:
    queue: ModelQueue[int] = ModelQueue(60.0)
    queue.add(1, 1, 0.0)
    with pytest.raises(SeqIdConflict):
        queue.add(1, 1, 0.0)


def test_without_seq_id_runs_after_everything_queued() -> None:
    queue: ModelQueue[int] = ModelQueue(60.0)
    queue.add(0, 0, 0.0)
    queue.add(2, 2, 0.0)
    queue.note_refused(4)
    assert queue.add(None, 100, 0.0) == 5
    queue.add(1, 1, 0.0)
    queue.note_refused(3)
    assert drain_ready(queue) == [0, 1, 2, 100]


def test_far_future_seq_id_costs_nothing() -> None:
    queue: ModelQueue[int] = ModelQueue(60.0)
    queue.add(2**62, 7, 0.0)
    assert queue.missing() == 0
    [(item, error)] = queue.expire(60.0)
    assert item == 7
    assert "seq_id 0 " in error.message


def test_drain_empties_in_order() -> None:
    queue: ModelQueue[int] = ModelQueue(60.0)
    queue.add(4, 4, 0.0)
    queue.add(1, 1, 0.0)
    assert queue.drain() == [1, 4]
    assert len(queue) == 0


def test_items_that_are_put_back_start_again_before_everything_else() -> None:
    """Refused numbers between them, and a hole behind them, are nobody's concern meanwhile."""
    queue: ModelQueue[str] = ModelQueue(5.0)
    for seq_id in (0, 1, 3, 5):
        queue.add(seq_id, str(seq_id), 0.0)
    queue.note_refused(2)
    assert [queue.pop(), queue.pop(), queue.pop()] == ["0", "1", "3"]
    assert queue.missing() == 4
    queue.put_back([(1, "1"), (3, "3")])
    assert (queue.missing(), queue.gap_deadline(), queue.peek(), len(queue)) == (None, None, "1", 3)
    assert [queue.ahead(seq_id) for seq_id in (1, 3, 5)] == [0, 1, 2]
    assert queue.pop() == "1"
    queue.put_back([(1, "1")])
    assert [queue.pop(), queue.pop()] == ["1", "3"]
    assert [item for item, _ in queue.expire(5.0)] == ["5"]
    queue.put_back([(5, "5")])
    queue.add(6, "6", 9.0)
    assert queue.drain() == ["5", "6"]
    assert len(queue) == 0
