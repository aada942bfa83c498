"""Equal shares: no key that has work falls behind, idling earns nothing, and having been ahead is not forgiven."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.fairness import FairShare


def serve(shares: FairShare[str], rounds: int, cost: float = 1.0) -> list[str]:
    order = []
    for _ in range(rounds):
        key = shares.order()[0]
        shares.charge(key, cost)
        order.append(key)
    return order


def entered(*keys: str) -> FairShare[str]:
    shares: FairShare[str] = FairShare()
    for key in keys:
        shares.enter(key)
    return shares


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 1000)), min_size=1, max_size=200))
def test_keys_with_work_are_never_further_apart_than_one_piece(pieces: list[tuple[str, int]]) -> None:
    shares = entered(*"abcd")
    served = dict.fromkeys("abcd", 0)
    for _, cost in pieces:
        key = shares.order()[0]
        shares.charge(key, cost)
        served[key] += cost
        assert max(served.values()) - min(served.values()) <= max(cost for _, cost in pieces)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["enter", "leave", "serve"]), st.integers(1, 50))),
    st.integers(1, 50),
)
def test_whoever_comes_and_goes_a_key_that_stays_waits_for_at_most_one_piece_of_each_other(
    events: list[tuple[str, str, int]], first: int
) -> None:
    """However others enter, leave and enter again, between two turns of the one that stays each gets at most its
    lead plus one piece: they cannot gain by idling."""
    shares = entered("stays")
    shares.charge("stays", first)
    since = {"a": 0, "b": 0, "c": 0}
    largest = 50
    for key, event, cost in events:
        if event == "enter":
            shares.enter(key)
        elif event == "leave":
            shares.leave(key)
        else:
            key = shares.order()[0]
            shares.charge(key, cost)
            if key == "stays":
                since = dict.fromkeys(since, 0)
            else:
                since[key] += cost
                assert since[key] <= 2 * largest, f"{key} had {since[key]} while another key waited"


def test_equals_take_turns_and_a_newcomer_is_next() -> None:
    shares = entered("a", "b")
    assert serve(shares, 4) == ["a", "b", "a", "b"]
    shares.enter("c")
    assert serve(shares, 4) == ["c", "a", "b", "c"]


def test_idling_earns_no_credit() -> None:
    shares = entered("busy", "idle")
    shares.leave("idle")
    serve(shares, 100)
    shares.enter("idle")
    assert sorted(serve(shares, 10)) == ["busy"] * 5 + ["idle"] * 5


def test_leaving_and_entering_again_forgives_nothing() -> None:
    shares = entered("large", "small")
    shares.charge("large", 100)
    shares.leave("large")
    shares.enter("large")
    assert serve(shares, 100) == ["small"] * 100
    assert shares.ahead("large") == 0
    shares.charge("large", 7)
    assert shares.ahead("large") == 7


def test_when_all_were_idle_the_next_busy_time_begins_with_equals() -> None:
    shares = entered("a", "b")
    shares.charge("a", 100)
    for key in "ab":
        shares.leave(key)
    for key in "ba":
        shares.enter(key)
    assert shares.ahead("a") == shares.ahead("b") == 0
    assert len(shares) == 2


def test_a_key_that_is_forgotten_or_out_cannot_be_charged() -> None:
    shares = entered("a")
    shares.forget("a")
    shares.forget("never seen")
    assert "a" not in shares
    with pytest.raises(KeyError):
        shares.charge("a", 1)
