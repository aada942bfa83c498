"""The line of waiting samples: order within a project, equal shares between projects, what people are told."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.workers.test_scheduler import assert_turns, entry
from workers.sample_line import SampleLine
from workers.tickets import Entry


def sample(project_id: str, name: str = "") -> Entry:
    return entry(project_id, None, None, name)


def take(line: SampleLine, most: int = 8) -> Entry:
    """Start the next sample: one sequence, a prompt of two tokens."""
    head = line.peek()
    assert head is not None
    line.take(head, prompt=2, sequences=1, most=most)
    return head


def serve(line: SampleLine, lengths: dict[str, int], *, most: int, rounds: int) -> Counter[str]:
    """Tokens that each project draws while samples run one after the other and nobody's queue becomes empty."""
    drawn: Counter[str] = Counter()
    for _ in range(rounds):
        head = take(line, most)
        project_id = head.ticket.project_id
        drawn[project_id] += lengths[project_id]
        line.end(head, drawn=lengths[project_id])
    return drawn


@given(st.lists(st.sampled_from("PQR"), min_size=1, max_size=20), st.sets(st.integers(0, 19)))
def test_equal_samples_go_round_projects_in_order_and_without_dropped_ones(projects: list[str], gone: set[int]) -> None:
    line = SampleLine()
    entries = [sample(project_id, str(index)) for index, project_id in enumerate(projects)]
    for item in entries:
        line.add(item)
    dropped = {entries[index] for index in gone if index < len(entries)}
    assert all(line.discard(item) for item in dropped)
    assert not any(line.discard(item) for item in dropped)
    order: list[Entry] = []
    while line.peek() is not None:
        order.append(take(line))
        line.end(order[-1], drawn=8)
    alive = [item for item in entries if item not in dropped]
    for project_id in set(projects):
        mine = [item for item in alive if item.ticket.project_id == project_id]
        assert [item for item in order if item.ticket.project_id == project_id] == mine
        assert line.waiting(project_id) == 0
    assert_turns([item.ticket.project_id for item in order], Counter(item.ticket.project_id for item in alive))


def test_projects_get_equal_tokens_and_not_equal_numbers_of_samples() -> None:
    line = SampleLine()
    for number in range(2000):
        line.add(sample("long", f"l{number}"))
        line.add(sample("short", f"s{number}"))
    drawn = serve(line, {"long": 400, "short": 20}, most=4096, rounds=1500)
    assert 0.8 < (drawn["long"] / drawn["short"]) < 1.25, drawn


def test_a_project_with_long_answers_pays_before_it_has_filled_the_worker() -> None:
    line = SampleLine()
    for number in range(500):
        line.add(sample("long", f"l{number}"))
    serve(line, {"long": 2000}, most=4096, rounds=50)
    for number in range(500):
        line.add(sample("short", f"s{number}"))
    running: list[Entry] = []
    for _ in range(400):  # the short ones end at once, the long ones not at all
        head = take(line, 4096)
        if head.ticket.project_id == "short":
            line.end(head, drawn=10)
        else:
            running.append(head)
    assert len(running) < 60, "rows that long answers hold"


def test_one_that_runs_again_comes_before_the_new_ones_of_its_project() -> None:
    line = SampleLine()
    first, second, third = (sample("P", name) for name in "abc")
    for item in (first, second, third):
        line.add(item)
    assert [take(line), take(line)] == [first, second]
    for item in (second, first):
        line.end(item)
        line.add_first(item)
    assert list(line.upcoming(9)) == [first, second, third]


def test_reasons_count_what_is_ahead() -> None:
    line = SampleLine()
    mine = [sample("P", str(number)) for number in range(3)]
    for item in mine:
        line.add(item)
    assert line.reason(mine[2]) == "2 samples of this project ahead"
    assert line.reason(mine[1]) == "1 sample of this project ahead"
    assert line.reason(mine[0]) == "next, when running samples leave room"
    take(line)
    line.add(sample("Q", "other"))
    assert line.reason(mine[1]) == "waiting for its turn: 1 other project first"
    assert line.reason(mine[0]) == "about to start"


def test_nothing_is_kept_of_projects_and_samples_that_are_done() -> None:
    line = SampleLine()
    for number in range(100):
        line.add(sample(f"P{number}", str(number)))
    while line.peek() is not None:
        line.end(take(line), drawn=3)
    assert not line._waiting
    assert not line._inside
    assert not line._paid
    assert len(line._shares) == 0


def test_what_was_cut_off_is_paid_for_and_makes_nobody_look_shorter() -> None:
    """Two projects with equal samples, of which one always leaves after 400 tokens: it pays for them."""
    line = SampleLine()
    drawn: Counter[str] = Counter()
    for project_id in ("stays", "leaves"):
        for _ in range(60):
            line.add(sample(project_id))
    for _ in range(60):
        head = take(line, most=1000)
        whole = head.ticket.project_id == "stays"
        line.end(head, drawn=400, whole=whole)
        drawn[head.ticket.project_id] += 400
    assert abs(drawn["stays"] - drawn["leaves"]) <= 800, drawn
    for _ in range(5):
        head = take(line, most=1000)
        line.end(head, drawn=0, whole=False)
    assert line._drawn["leaves"] >= 256, "a sample that left at once says nothing of how long others are"
