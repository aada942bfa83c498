"""What turns are made of: order, no gaps, the budget, equal shares, and how much is in memory at once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import InvalidRequest, TinsmithError
from schemas.operations import Datum, Operation, OperationResult, OptimStep, OptimStepParams, TrainBatch, ZeroGrad
from workers.scheduler import TrainingLine
from workers.tickets import Entry, Ticket
from workers.turns import CALL_TOKENS, STEP_TOKENS, Composer, Heads, Turn

Script = Sequence[Operation | TinsmithError]
STEP = OptimStep(OptimStepParams(lr=1.0))


def train(*lengths: int) -> TrainBatch:
    return TrainBatch("m", tuple(Datum(np.zeros(length, np.int64), {}) for length in lengths), "cross_entropy")


@dataclass(frozen=True)
class Taken:
    """One turn, by model: datums as (seq_id, index), and the seq_id of its step."""

    tokens: int
    datums: dict[str, list[tuple[int, int]]]
    steps: dict[str, int]


class Bench:
    """A composer on scripted models; `name` of a model is "project.model"."""

    def __init__(self, scripts: Mapping[str, Script], limit: int = 8) -> None:
        self.line = TrainingLine(60.0)
        self.refused: list[tuple[str, TinsmithError]] = []
        self.loads: list[str] = []
        self.composer = Composer(
            self.line,
            Heads(limit),
            banned=lambda entry: None,
            check=lambda model_id, operation: None,
            refuse=self._refuse,
            wake=lambda: None,
        )
        self.most_held = 0
        for name, script in scripts.items():
            self.add(name, script)

    def add(self, name: str, script: Script) -> None:
        self.line.open_model(name)
        for seq_id, operation in enumerate(script):
            self.line.add(name, self._entry(name, seq_id, operation), 0.0)

    def _entry(self, name: str, seq_id: int, operation: Operation | TinsmithError) -> Entry:
        async def load() -> Operation:
            self.loads.append(f"{name}/{seq_id}")
            if isinstance(operation, TinsmithError):
                raise operation
            return operation

        async def done(outcome: OperationResult | TinsmithError) -> None:
            return None

        is_step = isinstance(operation, OptimStep)
        return Entry(Ticket(f"{name}/{seq_id}", name.partition(".")[0], name, seq_id, load, done, is_step=is_step))

    def _refuse(self, entry: Entry, error: TinsmithError) -> None:
        entry.over = True
        self.refused.append((entry.ticket.request_id, error))

    async def turn(self, budget: int) -> Taken | str | None:
        """The next turn, the name of an operation that goes alone, or None."""
        turn = Turn(budget)
        single = await self.composer.fill(turn)
        self.most_held = max(self.most_held, len(self.composer._heads._held))
        if single is not None:
            assert turn.empty
            return single.ticket.request_id
        if turn.empty:
            return None
        micro = turn.message(())
        datums: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for part in micro.ranges:
            name, _, seq_id = part.operation_id.partition("/")
            datums[name] += [(int(seq_id), index) for index in range(part.start, part.stop)]
        steps = {step.adapter_id: int(step.operation_id.partition("/")[2]) for step in micro.steps}
        assert len(steps) == len(micro.steps), "two steps of one adapter"
        self.composer.prefetch()
        return Taken(turn.tokens, dict(datums), steps)

    async def all(self, budget: int) -> list[Taken | str]:
        turns = []
        while (turn := await self.turn(budget)) is not None:
            turns.append(turn)
        return turns


lengths = st.lists(st.integers(1, 60), min_size=1, max_size=12)
script = st.lists(st.one_of(lengths.map(lambda many: train(*many)), st.just(STEP), st.just(ZeroGrad())), max_size=6)
scripts = st.dictionaries(st.sampled_from(["P.a", "P.b", "Q.c", "R.d", "R.e"]), script, max_size=5)


@settings(deadline=None)
@given(scripts, st.integers(1, 100), st.integers(1, 8))
def test_everything_is_taken_once_in_order_and_within_the_budget(
    many: dict[str, list[Operation]], budget: int, limit: int
) -> None:
    bench = Bench(many, limit)
    turns = asyncio.run(bench.all(budget))
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for turn in turns:
        if isinstance(turn, str):
            name, _, seq_id = turn.partition("/")
            seen[name].append((int(seq_id), -1))
            continue
        sizes = [len(many[name][seq].datums[i].tokens) for name, ds in turn.datums.items() for seq, i in ds]  # type: ignore[union-attr]
        assert turn.tokens == sum(sizes)
        assert turn.tokens <= budget or len(sizes) == 1
        for name in turn.datums.keys() | turn.steps.keys():
            seen[name] += turn.datums.get(name, [])
            if name in turn.steps:
                seen[name].append((turn.steps[name], -1))
    for name, operations in many.items():
        expected = [
            (seq_id, index)
            for seq_id, operation in enumerate(operations)
            for index in (range(len(operation.datums)) if isinstance(operation, TrainBatch) else [-1])
        ]
        assert seen[name] == expected
    assert bench.most_held <= limit
    assert not bench.composer.under_way


@settings(deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=30), st.integers(32, 128), st.integers(1, 5), st.booleans())
def test_a_huge_batch_keeps_a_small_one_waiting_for_no_more_than_a_turn(
    small: list[int], budget: int, head_start: int, same_project: bool
) -> None:
    """While both have work, each gets half of every turn, whatever the other has queued or has had before."""
    name = "P.small" if same_project else "Q.small"

    async def scenario() -> None:
        bench = Bench({"P.huge": [train(*[8] * 500)]})
        for _ in range(head_start):
            await bench.turn(budget)
        bench.add(name, [train(*small), STEP])
        waited = 0
        remaining = sum(small)
        while remaining > 0:
            turn = await bench.turn(budget)
            assert isinstance(turn, Taken)
            got = sum(small[index] for _, index in turn.datums.get(name, []))
            assert got > 0, "a turn passed over the small batch"
            remaining -= got
            waited += 1
            if remaining == 0:
                assert name in turn.steps, "the step behind the small batch had to wait"
        # Half of each turn, but for one datum of either side.
        assert waited <= 1 + sum(small) / max(1, budget / 2 - 8)

    asyncio.run(scenario())


async def test_a_step_goes_with_the_last_datum_even_when_that_fills_the_turn() -> None:
    bench = Bench({"P.a": [train(5, 5), STEP, train(5), STEP]})
    assert await bench.all(10) == [
        Taken(10, {"P.a": [(0, 0), (0, 1)]}, {"P.a": 1}),
        Taken(5, {"P.a": [(2, 0)]}, {"P.a": 3}),
    ]


async def test_chunks_share_a_turn_and_nothing_follows_a_step() -> None:
    bench = Bench({"P.a": [train(1), train(2), STEP, train(3), STEP, STEP]})
    assert await bench.all(100) == [
        Taken(3, {"P.a": [(0, 0), (1, 0)]}, {"P.a": 2}),
        Taken(3, {"P.a": [(3, 0)]}, {"P.a": 4}),
        Taken(0, {}, {"P.a": 5}),
    ]


async def test_a_datum_larger_than_the_budget_goes_alone() -> None:
    bench = Bench({"P.a": [train(3, 50, 3)], "Q.b": [train(4, 4)]})
    turns = await bench.all(10)
    assert Taken(50, {"P.a": [(0, 1)]}, {}) in turns
    assert sum(turn.tokens for turn in turns if isinstance(turn, Taken)) == 64


async def test_a_large_datum_is_not_passed_over_for_ever() -> None:
    bench = Bench({"P.large": [train(*[10] * 3)], "Q.small": [train(*[3] * 50)]})
    turns = await bench.all(10)
    last = max(i for i, turn in enumerate(turns) if isinstance(turn, Taken) and "P.large" in turn.datums)
    assert last <= 12, turns


async def test_a_call_of_its_own_comes_between_turns_in_its_turn() -> None:
    bench = Bench({"P.huge": [train(*[5] * 100)]})
    await bench.turn(10)
    bench.add("Q.other", [ZeroGrad(), train(1)])
    names = [await bench.turn(10) for _ in range(2)]
    assert names[0] == "Q.other/0"


async def test_calls_count_in_the_shares() -> None:
    bench = Bench({"P.a": [ZeroGrad(), train(1)], "Q.b": [train(1)]})
    assert await bench.turn(1) == "P.a/0"
    waiting = bench.line.head("P.a")
    assert waiting is not None
    assert bench.line.reason(waiting).endswith(f"about {CALL_TOKENS} tokens ahead")


async def test_steps_count_in_the_shares() -> None:
    bench = Bench({"P.a": [STEP, STEP], "Q.b": [train(1), train(1)]})
    assert await bench.turn(1) == Taken(1, {"Q.b": [(0, 0)]}, {"P.a": 0})
    waiting = bench.line.head("P.a")
    assert waiting is not None
    assert bench.line.reason(waiting).endswith(f"about {STEP_TOKENS - 1} tokens ahead")


async def test_what_comes_while_a_turn_waits_joins_it_but_not_behind_a_step() -> None:
    bench = Bench({"P.a": [train(2), STEP, train(3)], "P.b": [train(4)]})
    turn = Turn(100)
    await bench.composer.fill(turn)
    bench.add("P.c", [train(5)])
    await bench.composer.fill(turn)
    assert sorted(turn.message(()).opened) == ["P.a/0", "P.b/0", "P.c/0"]


async def test_a_newcomer_that_is_next_displaces_what_was_read_ahead_last() -> None:
    bench = Bench({"P.a": [train(5), train(5)], "Q.b": [train(5), train(5)]}, limit=1)
    await bench.turn(5)
    held = list(bench.composer._heads._held)
    assert [entry.ticket.request_id for entry in held] == ["Q.b/0"]
    bench.add("R.new", [train(5)])
    bench.line.charge("Q.b", 5)
    assert await bench.turn(5) == Taken(5, {"R.new": [(0, 0)]}, {})
    assert len(await bench.all(5)) == 3
    assert bench.loads == ["P.a/0", "Q.b/0", "R.new/0", "P.a/1", "Q.b/0", "Q.b/1"]


async def test_a_batch_without_datums_ends_too() -> None:
    bench = Bench({"P.a": [train(), STEP]})
    turn = Turn(10)
    assert await bench.composer.fill(turn) is None
    [part] = turn.message(()).ranges
    assert (part.start, part.stop) == (0, 0)
    assert not bench.composer.under_way


async def test_an_unreadable_operation_is_refused_and_the_next_one_goes_on() -> None:
    bench = Bench({"P.a": [InvalidRequest("damaged"), train(2)]})
    assert await bench.all(10) == [Taken(2, {"P.a": [(1, 0)]}, {})]
    [(request_id, error)] = bench.refused
    assert (request_id, error.message) == ("P.a/0", "damaged")


async def test_many_models_keep_no_more_batches_in_memory_than_the_limit_and_all_come_to_an_end() -> None:
    names = [f"{project}.{model}" for project in "PQR" for model in range(10)]
    bench = Bench({name: [train(7, 7), STEP, train(7)] for name in names}, limit=3)
    turns = await bench.all(10)
    assert bench.most_held == 3
    assert sum(turn.tokens for turn in turns if isinstance(turn, Taken)) == 30 * 21


async def test_what_was_answered_while_a_turn_was_composed_is_left_out() -> None:
    bench = Bench({"P.a": [train(2), STEP], "P.b": [train(3), STEP]})
    turn = Turn(100)
    await bench.composer.fill(turn)
    for entry in turn.entries():
        entry.over = entry.ticket.model_id == "P.a"
    micro = turn.message(("old",))
    assert list(micro.opened) == ["P.b/0"]
    assert [part.operation_id for part in micro.ranges] == ["P.b/0"]
    assert [step.adapter_id for step in micro.steps] == ["P.b"]
    assert micro.dropped == ("old",)


async def test_a_batch_says_whether_it_is_executed_again() -> None:
    bench = Bench({"P.a": [train(2), train(3)], "Q.b": [train(4)]})
    replayed = bench.line.head("P.a")
    assert replayed is not None
    replayed.again = lambda outcome: None
    turn = Turn(100)
    await bench.composer.fill(turn)
    opened = turn.message(()).opened
    assert {name: batch.again for name, batch in opened.items()} == {"P.a/0": True, "P.a/1": False, "Q.b/0": False}
