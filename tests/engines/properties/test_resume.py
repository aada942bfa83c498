"""What an adapter has been through leaves no trace but its weights, moments and gradient: saved and loaded, put aside
to make room for others, or computed by an engine with other limits, it goes on with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.torch_engine.adapter import state_bytes
from engines.torch_engine.engine import TorchEngine
from schemas.operations import AdapterStep, OptimStep, OptimStepParams, StepResult
from tests.engines.properties.conftest import Labs
from tests.engines.properties.data import SMALL, Plan, plans
from tests.engines.properties.lab import SPECS, bits, gradient, weights
from tests.engines.properties.turns import Bits, run

ADAM = OptimStepParams(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)


def state(engine: TorchEngine, adapter: str) -> tuple[object, object]:
    """Weights and accumulated gradient."""
    return bits(weights(engine, adapter)), bits(gradient(engine, adapter))


def rounds(engine: TorchEngine, work: Mapping[str, list[list[Plan]]]) -> dict[str, list[object]]:
    """Rounds of operations and a step, those of all adapters of a round in one turn; what each adapter saw."""
    seen: dict[str, list[object]] = {adapter: [] for adapter in work}
    for number in range(max(map(len, work.values()))):
        now = {adapter: plans[number] for adapter, plans in work.items() if number < len(plans)}
        operations = {f"{a}/{i}": plan.batch(a) for a, made in now.items() for i, plan in enumerate(made)}
        for name, outcome in run(engine, operations).items():
            seen[name.split("/")[0]].append(Bits.of(outcome))
        steps = [AdapterStep(adapter, adapter, OptimStep(ADAM, 1.0)) for adapter in now]
        for step, result in zip(steps, engine.optimizer_steps(steps), strict=True):
            assert isinstance(result, StepResult), result
            seen[step.adapter_id].append(dict(result.metrics))
    return seen


ROUND = st.lists(plans(most=2), min_size=1, max_size=2)


@SMALL
@given(data=st.data())
def test_a_resumed_run_among_neighbours_is_the_uninterrupted_one(
    labs: Labs, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lab = labs(data.draw(st.sampled_from(["llama", "gemma2", "qwen3_moe"])))
    spec = data.draw(st.sampled_from(lab.specs))
    first, second = ([data.draw(ROUND), data.draw(ROUND)] for _ in range(2))
    beside = [data.draw(ROUND) for _ in range(2)]
    folder = tmp_path_factory.mktemp("resumed") / "c"
    with lab.adapters({"live": spec, "neighbour": spec}) as engine:
        rounds(engine, {"neighbour": beside, "live": first})
        engine.save_adapter("live", folder, with_optimizer=True)
        engine.load_adapter("resumed", folder, with_optimizer=True, create=True)
        try:
            # The live run goes on alone, the resumed one in company, its neighbour's operations before its own.
            seen = rounds(engine, {"live": second})["live"]
            again = rounds(engine, {"neighbour": beside, "resumed": second})["resumed"]
            assert again == seen
            assert state(engine, "resumed") == state(engine, "live")
        finally:
            engine.remove_adapter("resumed")


@SMALL
@given(data=st.data())
def test_an_adapter_that_was_put_aside_is_the_same(
    labs: Labs, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Room for two adapters, and five that take turns; some leave with a gradient that waits for its step."""
    lab = labs("llama")
    names = [f"a{i}" for i in range(5)]
    specs = {name: "mlp" if name < "a3" else data.draw(st.sampled_from(lab.specs)) for name in names}
    visits = data.draw(st.lists(st.permutations(names).map(lambda order: order[:2]), min_size=4, max_size=8))
    made = [data.draw(plans(most=2)) for _ in range(4)]
    stepping = [data.draw(st.booleans()) for _ in visits]
    largest = state_bytes(parameters(lab.engine), "adamw")
    folder = tmp_path_factory.mktemp("idle")
    small = lab.another_engine(adapter_memory=2 * largest, idle_folder=folder)
    found = []
    for engine in (small, lab.engine):
        for name, spec in specs.items():
            lab.begin(name, spec, engine)
        seen: list[object] = []
        for number, (visited, steps) in enumerate(zip(visits, stepping, strict=True)):
            operations = {name: made[(number + i) % 4].batch(name) for i, name in enumerate(visited)}
            seen += [Bits.of(outcome) for outcome in run(engine, operations).values()]
            if steps:
                todo = [AdapterStep(name, name, OptimStep(ADAM, 1.0)) for name in names]
                seen += [getattr(result, "metrics", result) for result in engine.optimizer_steps(todo)]
            if engine is small:
                assert engine._pool.resident_bytes <= 2 * largest
        found.append((seen, {name: state(engine, name) for name in names}))
        if engine is small:
            assert list(folder.iterdir()), "nobody was put aside"  # three of them are too large together
        for name in names:
            engine.remove_adapter(name)
    assert not list(folder.iterdir())
    assert found[0] == found[1]


def parameters(engine: TorchEngine) -> int:
    """Of the largest adapter of the stock."""
    counts = [engine.create_adapter(name, spec) for name, spec in SPECS.items()]
    for name in SPECS:
        engine.remove_adapter(name)
    return max(counts)


LIMITS: dict[str, dict[str, Any]] = {
    "one datum at a time": {"micro_batch_tokens": 1},
    "passes of 24 tokens": {"micro_batch_tokens": 24},
    "passes of 100 tokens": {"micro_batch_tokens": 100},
    "everything in one pass": {"micro_batch_tokens": 1 << 20},
    "activations twice": {"gradient_checkpointing": "on"},
    "activations once": {"gradient_checkpointing": "off"},
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_limits_of_an_engine_change_no_bit(labs: Labs, name: str, limits: str) -> None:
    lab = labs(name)
    other = lab.another_engine(**LIMITS[limits])
    found = []
    for engine in (other, lab.engine):
        names = [f"{spec}{i}" for spec in lab.specs for i in range(3)]
        for adapter in names:
            lab.begin(adapter, adapter[:-1], engine)
        work = {
            adapter: [[Plan(("cross_entropy", "ppo", "gspo")[i % 3], (7, 7, 1 + 3 * i, 30), seed=i)]]
            for i, adapter in enumerate(names)
        }
        found.append((rounds(engine, work), {adapter: state(engine, adapter) for adapter in names}))
        for adapter in names:
            engine.remove_adapter(adapter)
    assert found[0] == found[1]
