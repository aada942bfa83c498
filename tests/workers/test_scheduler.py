"""Turns: no project and no model is passed over, whatever the others have queued."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from schemas.operations import Operation, OperationResult, ZeroGrad
from workers.scheduler import TrainingLine
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


def take_all(line: TrainingLine) -> list[Entry]:
    """Everything in line, at the same cost each."""
    taken = []
    while (model_id := next(line.order(), None)) is not None:
        line.charge(model_id, 1)
        taken.append(line.pop(model_id))
    return taken


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
    taken = take_all(line)
    assert len(taken) == amounts.total()
    per_project: Counter[str] = Counter()
    for (project_id, _), amount in amounts.items():
        per_project[project_id] += amount
    assert_turns([item.ticket.project_id for item in taken], per_project)
    for project_id in per_project:
        models = [item.ticket.model_id or "" for item in taken if item.ticket.project_id == project_id]
        assert_turns(models, Counter({m: amount for (p, m), amount in amounts.items() if p == project_id}))
    for model_id in {item.ticket.model_id or "" for item in taken}:
        seq_ids = [item.seq_id for item in taken if item.ticket.model_id == model_id]
        assert seq_ids == sorted(seq_ids)


def test_a_held_model_stays_in_line_without_a_waiting_operation() -> None:
    line = TrainingLine(60.0)
    line.open_model("m")
    line.add("m", entry("P", "m", 0), 0.0)
    line.hold("m")
    line.pop("m")
    assert list(line.order()) == ["m"]
    line.release("m")
    assert list(line.order()) == []


def test_a_reason_counts_the_tokens_that_others_are_owed() -> None:
    line = TrainingLine(60.0)
    for model_id, project_id in (("a", "P"), ("b", "Q"), ("c", "R")):
        line.open_model(model_id)
        line.add(model_id, entry(project_id, model_id, 0), 0.0)
    waiting = line.head("a")
    assert waiting is not None
    line.charge("a", 5000)
    line.charge("b", 2000)
    assert line.reason(waiting, 120) == (
        "waiting for its turn: 2 other projects are training, about 8,120 tokens ahead"
    )
    line.close_model("b")
    line.charge("c", 5000)
    assert line.reason(waiting) == "waiting for its turn: 1 other project is training, about 0 tokens ahead"
    line.close_model("c")
    assert line.reason(waiting) == "waiting for its turn: next"
    line.close_model("a")
    assert line.reason(waiting) == "about to be answered"


def test_a_model_that_waits_for_a_gap_does_not_hold_up_its_project() -> None:
    line = TrainingLine(60.0)
    for model_id in ("blocked", "free"):
        line.open_model(model_id)
    blocked, free = entry("P", "blocked", 1), entry("P", "free", 0)
    line.add("blocked", blocked, 0.0)
    line.add("free", free, 0.0)
    assert line.reason(blocked) == "waiting for seq_id 0 of this model"
    assert take_all(line) == [free]
    assert line.next_deadline() == 60.0
    assert [item for item, _ in line.expire(60.0)] == [blocked]
    assert line.next_deadline() is None
    assert line.close_model("free") == []


def test_a_refusal_that_closes_a_gap_puts_the_model_in_line() -> None:
    line = TrainingLine(60.0)
    line.open_model("m")
    line.add("m", entry("P", "m", 1), 0.0)
    assert list(line.order()) == []
    line.note_refused("m", 0)
    assert list(line.order()) == ["m"]


def test_closing_returns_what_waited_and_forgets_the_model() -> None:
    line = TrainingLine(60.0)
    line.open_model("m")
    late, early = entry("P", "m", 3), entry("P", "m", 0)
    line.add("m", late, 0.0)
    line.add("m", early, 0.0)
    assert line.close_model("m") == [early, late]
    assert list(line.order()) == []
    assert line.close_model("m") == []
