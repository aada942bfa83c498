"""Turns: no project and no model is passed over, whatever the others have queued."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from schemas.operations import Operation, OperationResult, ZeroGrad
from workers.scheduler import SampleLine, TrainingLine
from workers.tickets import Entry, Ticket


async def load() -> Operation:
    return ZeroGrad()


async def done(result: OperationResult | Exception) -> None:
    return None


def entry(project_id: str, model_id: str | None, seq_id: int | None, name: str = "") -> Entry:
    return Entry(Ticket(name or f"{project_id}/{model_id}/{seq_id}", project_id, model_id, seq_id, load, done))


def assert_turns(order: list[str], waiting: Counter[str]) -> None:
    """Between two turns of one that has work, every other one has at most one turn."""
    waiting = Counter(waiting)
    since: dict[str, Counter[str]] = {name: Counter() for name in waiting}
    for name in order:
        waiting[name] -= 1
        for other in since:
            if other != name and waiting[other] > 0:
                since[other][name] += 1
                assert since[other][name] <= 1, f"{name} had two turns while {other} waited: {order}"
        since[name] = Counter()


@given(st.lists(st.tuples(st.sampled_from("PQR"), st.sampled_from("xyz"), st.integers(1, 6)), min_size=1, max_size=9))
def test_training_turns_go_round_projects_then_models(load_of: list[tuple[str, str, int]]) -> None:
    line = TrainingLine(60.0)
    amounts: Counter[tuple[str, str]] = Counter()
    for project_id, model_id, amount in load_of:
        amounts[project_id, f"{project_id}.{model_id}"] += amount
    for (project_id, model_id), amount in amounts.items():
        line.open_model(model_id)
        for seq_id in reversed(range(amount)):
            line.add(model_id, entry(project_id, model_id, seq_id), 0.0)
    taken: list[Entry] = []
    while (next_entry := line.pop()) is not None:
        taken.append(next_entry)
    assert len(taken) == amounts.total()
    per_project: Counter[str] = Counter()
    for (project_id, _), amount in amounts.items():
        per_project[project_id] += amount
    assert_turns([item.ticket.project_id for item in taken], per_project)
    for project_id in per_project:
        models = [item.ticket.model_id or "" for item in taken if item.ticket.project_id == project_id]
        assert_turns(models, Counter({m: amount for (p, m), amount in amounts.items() if p == project_id}))
    for model_id in {item.ticket.model_id for item in taken}:
        seq_ids = [item.seq_id for item in taken if item.ticket.model_id == model_id]
        assert seq_ids == sorted(seq_ids)


@given(st.lists(st.sampled_from("PQR"), min_size=1, max_size=20), st.sets(st.integers(0, 19)))
def test_sample_turns_go_round_projects_and_skip_answered_ones(projects: list[str], answered: set[int]) -> None:
    line = SampleLine()
    entries = [entry(project_id, None, None, str(index)) for index, project_id in enumerate(projects)]
    for item in entries:
        line.add(item)
    for index in answered & set(range(len(entries))):
        entries[index].over = True
    order: list[Entry] = []
    while (head := line.peek()) is not None:
        line.take(head)
        order.append(head)
    alive = [item for item in entries if not item.over]
    assert sorted(item.ticket.request_id for item in order) == sorted(item.ticket.request_id for item in alive)
    assert_turns([item.ticket.project_id for item in order], Counter(item.ticket.project_id for item in alive))


def test_a_model_that_waits_for_a_gap_does_not_hold_up_its_project() -> None:
    line = TrainingLine(60.0)
    for model_id in ("blocked", "free"):
        line.open_model(model_id)
    blocked, free = entry("P", "blocked", 1), entry("P", "free", 0)
    line.add("blocked", blocked, 0.0)
    line.add("free", free, 0.0)
    assert line.pop() is free
    assert line.pop() is None
    assert line.next_deadline() == 60.0
    assert [item for item, _ in line.expire(60.0)] == [blocked]
    assert line.next_deadline() is None
    assert line.close_model("free") == []


def test_closing_returns_what_waited_and_forgets_the_model() -> None:
    line = TrainingLine(60.0)
    line.open_model("m")
    late, early = entry("P", "m", 3), entry("P", "m", 0)
    line.add("m", late, 0.0)
    line.add("m", early, 0.0)
    assert line.close_model("m") == [early, late]
    assert line.pop() is None
    assert line.close_model("m") == []
