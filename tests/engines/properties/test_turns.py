"""Bit for bit in float32 on the CPU: an operation's numbers are its own, whatever is in the pass or in flight.

Each case runs twice from the same adapters: once packed into turns with everything else, once with every operation
alone in a turn of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from engines.torch_engine.engine import TorchEngine
from schemas.operations import AdapterStep, DatumRange, OptimStep, OptimStepParams, StepResult, TrainBatch
from tests.engines.properties.conftest import Labs
from tests.engines.properties.data import FEW, SMALL, Plan, plans
from tests.engines.properties.lab import Lab, bits, gradient, weights
from tests.engines.properties.turns import Bits, Cuts, run, succeeded

ADAM = OptimStepParams(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)


def alone(lab: Lab, adapters: Mapping[str, str], operations: Mapping[str, TrainBatch]) -> tuple[object, object]:
    """Bits of every result and every gradient when each operation has a turn of its own."""
    with lab.adapters(adapters) as engine:
        results = {name: Bits.of(run(engine, {name: batch})[name]) for name, batch in operations.items()}
        return results, {adapter: bits(gradient(engine, adapter)) for adapter in adapters}


def together(
    lab: Lab, adapters: Mapping[str, str], operations: Mapping[str, TrainBatch], cuts: Cuts | None = None
) -> tuple[object, object]:
    """The same of all operations in flight at once."""
    with lab.adapters(adapters) as engine:
        results = {name: Bits.of(outcome) for name, outcome in run(engine, operations, cuts).items()}
        return results, {adapter: bits(gradient(engine, adapter)) for adapter in adapters}


@st.composite
def crowds(draw: st.DrawFn, lab: Lab, most: int = 4) -> tuple[dict[str, str], dict[str, TrainBatch]]:
    """Adapters (id to spec) and their operations (id to batch), one or two each, in order."""
    adapters = {f"t{i}": draw(st.sampled_from(lab.specs)) for i in range(draw(st.integers(1, most)))}
    operations = {}
    for adapter in adapters:
        for k in range(draw(st.integers(1, 3))):  # three sums show their order, two do not
            plan = draw(plans(most=3))
            note(f"{adapter}.{k} ({adapters[adapter]}): {plan}")
            operations[f"{adapter}.{k}"] = plan.batch(adapter)
    return adapters, operations


@st.composite
def cut(draw: st.DrawFn, operations: Mapping[str, TrainBatch]) -> Cuts:
    """Any way to compute these operations in turns: those of one adapter in order, a few datums at a time."""
    waiting: dict[str, list[tuple[str, int]]] = {}
    for name, batch in operations.items():
        waiting.setdefault(batch.adapter_id, []).append((name, len(batch.datums)))
    turns: list[list[tuple[str, int]]] = []
    while waiting:
        turn = []
        for adapter in draw(st.permutations(sorted(waiting))):
            for _ in range(draw(st.integers(0 if len(waiting) > 1 or not turns else 1, 2))):
                if adapter not in waiting:
                    break
                name, left = waiting[adapter].pop(0)
                count = draw(st.integers(1, left))
                turn.append((name, count))
                if count < left:
                    waiting[adapter].insert(0, (name, left - count))
                    break  # the rest of this operation comes in a later turn
                if not waiting[adapter]:
                    del waiting[adapter]
        if turn:
            turns.append(turn)
    note(f"turns: {turns}")
    return turns


def test_packs_are_in_use(lab: Lab, labs: Labs) -> None:
    """Else everything here would hold of an engine that computes one datum at a time, too.

    It falls back to that where it finds packing wrong, or its low bits in want of company: those of routed experts are,
    for an expert sees any number of rows, on processors that sum fewer rows in another order.
    """
    assert lab.engine.info.batch_invariant
    assert lab.engine.info.packed or (lab.name == "qwen3_moe" and os.environ.get("MKL_CBWR") != "AUTO,STRICT")
    free = labs(lab.name, exact=False)
    assert free.engine.info.packed
    with free.adapters({"a": "head", "b": "head"}) as engine:
        engine.take_stats()
        run(engine, {name: Plan("cross_entropy", (5, 9)).batch(name) for name in ("a", "b")})
        stats = engine.take_stats()
    assert (stats.sequences, stats.passes) == (4, 1)


@FEW
@given(data=st.data())
def test_one_turn_is_each_alone(lab: Lab, data: st.DataObject) -> None:
    adapters, operations = data.draw(crowds(lab))
    assert together(lab, adapters, operations) == alone(lab, adapters, operations)


@FEW
@given(data=st.data())
def test_any_cut_into_turns_is_each_alone(lab: Lab, data: st.DataObject) -> None:
    adapters, operations = data.draw(crowds(lab, 3))
    cuts = data.draw(cut(operations))
    assert together(lab, adapters, operations, cuts) == alone(lab, adapters, operations)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@settings(SMALL, max_examples=2)
@given(data=st.data())
def test_two_threads(labs: Labs, name: str, data: st.DataObject) -> None:
    """Among longer datums, so that kernels really share their work out."""
    lab = labs(name, threads=2)
    adapters, operations = data.draw(crowds(lab))
    long = {f"{adapter}.2": Plan("cross_entropy", (64, 63, 64), seed=1).batch(adapter) for adapter in adapters}
    assert together(lab, adapters, {**operations, **long}) == alone(lab, adapters, {**operations, **long})


@FEW
@given(data=st.data())
def test_a_datum_has_the_logprobs_that_it_has_alone(lab: Lab, data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(lab.specs))
    plan = data.draw(plans(most=5))
    batch = plan.batch("a")
    with lab.adapters({"a": spec}) as engine:
        packed = succeeded(run(engine, {"op": batch})["op"]).logprobs
        for datum, lp in zip(batch.datums, packed, strict=True):
            single = run(engine, {"op": replace(batch, datums=(datum,))})["op"]
            assert succeeded(single).logprobs[0].tobytes() == lp.tobytes()
            forward = run(engine, {"op": replace(batch, datums=(datum,), backward=False)})["op"]
            assert succeeded(forward).logprobs[0].tobytes() == lp.tobytes()


@FEW
@given(data=st.data())
def test_chunks_in_any_order_add_up_to_the_whole(lab: Lab, data: st.DataObject) -> None:
    """Not bit for bit: addition is not associative. Chunks of one datum each, in any order."""
    spec = data.draw(st.sampled_from(lab.specs))
    batch = replace(data.draw(plans(most=5)).batch("whole"), backward=True)
    order = data.draw(st.permutations(range(len(batch.datums))))
    chunks = {f"op{i}": replace(batch, adapter_id="chunks", datums=(batch.datums[i],)) for i in order}
    with lab.adapters({"whole": spec, "chunks": spec}) as engine:
        outcomes = run(engine, {"op": batch, **chunks})
        one, other = gradient(engine, "whole"), gradient(engine, "chunks")
    expected = succeeded(outcomes["op"]).logprobs
    for i, lp in enumerate(expected):
        assert succeeded(outcomes[f"op{i}"]).logprobs[0].tobytes() == lp.tobytes()
    largest = max(float(tensor.abs().max()) for tensor in one.values())
    for name, tensor in one.items():
        assert float((tensor - other[name]).abs().max()) <= 2e-6 * max(largest, 1e-3), name


@dataclass
class Tenant:
    """A script of operations (batches) and steps (numbers: the clip norm), and how far it has come."""

    adapter: str
    script: list[TrainBatch | float]
    at: int = 0
    done: int = 0

    @property
    def ended(self) -> bool:
        return self.at == len(self.script)


def play(engine: TorchEngine, tenants: list[Tenant], rng: np.random.Generator) -> dict[str, list[object]]:
    """Run all scripts at once, each tenant going on by a random amount in each turn; what each one saw."""
    seen: dict[str, list[object]] = {tenant.adapter: [] for tenant in tenants}
    while not all(tenant.ended for tenant in tenants):
        ranges: list[DatumRange] = []
        steps: list[AdapterStep] = []
        for index in rng.permutation(len(tenants)):
            tenant = tenants[index]
            if not tenant.ended and rng.random() < 0.7:
                advance(engine, tenant, rng, ranges, steps)
        outcomes = engine.compute(ranges)
        for part in ranges:
            if part.operation_id in outcomes:
                seen[part.operation_id.split("/")[0]].append(Bits.of(outcomes[part.operation_id]))
        for step, result in zip(steps, engine.optimizer_steps(steps), strict=True):
            assert isinstance(result, StepResult), result
            seen[step.adapter_id].append({name: value.hex() for name, value in result.metrics.items()})
    return seen


def advance(
    engine: TorchEngine, tenant: Tenant, rng: np.random.Generator, ranges: list[DatumRange], steps: list[AdapterStep]
) -> None:
    """The tenant's part of one turn: some datums of its next operation (then perhaps more), at most one step."""
    while not tenant.ended and rng.random() < 0.8:
        part = tenant.script[tenant.at]
        name = f"{tenant.adapter}/{tenant.at}"
        if isinstance(part, float):
            steps.append(AdapterStep(name, tenant.adapter, OptimStep(ADAM, part)))
            tenant.at += 1
            return
        if tenant.done == 0:
            engine.open_operation(name, part)
        stop = int(rng.integers(tenant.done, len(part.datums))) + 1
        ranges.append(DatumRange(name, tenant.done, stop))
        tenant.done = stop
        if stop < len(part.datums):
            return
        tenant.at, tenant.done = tenant.at + 1, 0


@st.composite
def scripts(draw: st.DrawFn, adapter: str) -> list[TrainBatch | float]:
    """Two rounds of one or two operations and a step."""
    script: list[TrainBatch | float] = []
    for _ in range(2):
        made = draw(st.lists(plans(most=3), min_size=1, max_size=2))
        note(f"{adapter}: {made}")
        script += [plan.batch(adapter) for plan in made]
        script.append(draw(st.sampled_from([0.0, 0.5])))
    return script


@FEW
@given(data=st.data(), seed=st.integers(0, 1 << 16))
def test_tenants_that_train_at_once_are_each_tenant_alone(lab: Lab, data: st.DataObject, seed: int) -> None:
    """Several runs with their own operations, steps and clip norms, cut into turns at random, for several steps."""
    adapters = {f"t{i}": data.draw(st.sampled_from(lab.specs)) for i in range(data.draw(st.integers(2, 4)))}
    parts = {adapter: data.draw(scripts(adapter)) for adapter in adapters}
    with lab.adapters(adapters) as engine:
        rng = np.random.default_rng(seed)
        seen = play(engine, [Tenant(adapter, script) for adapter, script in parts.items()], rng)
        after = {adapter: bits(weights(engine, adapter)) for adapter in adapters}
    for adapter, spec in adapters.items():
        with lab.adapters({adapter: spec}) as engine:
            expected: list[object] = []
            for part in parts[adapter]:
                if isinstance(part, float):
                    result = engine.optimizer_step(adapter, ADAM, grad_clip_norm=part)
                    expected.append({name: value.hex() for name, value in result.metrics.items()})
                else:
                    expected.append(Bits.of(run(engine, {"op": part})["op"]))
            assert seen[adapter] == expected
            assert after[adapter] == bits(weights(engine, adapter))
