"""One operation of a turn fails: it fails alone, by name, and nobody else's bits change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidRequest, NonFiniteGradient, NotFound, TinsmithError
from schemas.operations import AdapterStep, Datum, DatumRange, OptimStep, OptimStepParams, StepResult, TrainBatch
from tests.engines.properties.conftest import Labs
from tests.engines.properties.data import FEW, VOCAB, Plan, plans
from tests.engines.properties.lab import CONTEXT, Lab, bits, gradient, weights
from tests.engines.properties.turns import Bits, Cuts, Outcome, run

STILL = OptimStepParams(lr=0.0)
FAST = OptimStepParams(lr=1e-2, eps=1e-8)


def changed(batch: TrainBatch, index: int, tokens: Any = None, **inputs: Any) -> TrainBatch:
    """The batch with one datum changed; an input that is None is left out."""
    datums = list(batch.datums)
    merged = {name: value for name, value in {**datums[index].inputs, **inputs}.items() if value is not None}
    datums[index] = Datum(datums[index].tokens if tokens is None else tokens, merged)
    return replace(batch, datums=tuple(datums))


def wrongs(batch: TrainBatch, index: int) -> dict[str, TrainBatch]:
    """Operations that must be refused, each for one datum's sake."""
    n = len(batch.datums[index].tokens)
    targets = batch.datums[index].inputs["target_tokens"]
    return {
        "token beyond the vocabulary": changed(batch, index, np.full(n, VOCAB)),
        "negative token": changed(batch, index, np.full(n, -1)),
        "no tokens": changed(batch, index, np.zeros(0, np.int64)),
        "too long": changed(
            batch, index, np.zeros(CONTEXT + 1, np.int64), target_tokens=np.zeros(CONTEXT + 1, np.int64)
        ),
        "target beyond the vocabulary": changed(batch, index, target_tokens=np.full(n, VOCAB)),
        "a target too many": changed(batch, index, target_tokens=np.zeros(n + 1, np.int64)),
        "no targets": changed(batch, index, target_tokens=None),
        "weights are not numbers": changed(batch, index, weights=np.full(targets.shape, np.nan, np.float32)),
        "infinite weights": changed(batch, index, weights=np.full(targets.shape, np.inf, np.float32)),
        "a weight too few": changed(batch, index, weights=np.zeros(n - 1, np.float32)),
        "an input of another loss": changed(batch, index, advantages=np.zeros(n, np.float32)),
    }


WRONGS = tuple(wrongs(Plan("cross_entropy", (3,)).batch("a"), 0))


@FEW
@given(data=st.data())
def test_a_bad_datum_fails_its_own_operation_only(lab: Lab, data: st.DataObject) -> None:
    """In between good neighbours, some on the same adapter, which had collected a gradient before."""
    spec = data.draw(st.sampled_from(lab.specs))
    good = {f"good{i}": data.draw(plans(most=3)).batch(("bad", "other")[i % 2]) for i in range(4)}
    kind = data.draw(st.sampled_from(WRONGS))
    index = data.draw(st.integers(0, 2))
    wrong = wrongs(Plan("cross_entropy", (5, 9, 4), seed=3).batch("bad"), index)[kind]
    place = data.draw(st.integers(0, 3))
    names = [*list(good)[:place], "wrong", *list(good)[place:]]
    found = []
    for operations in ({name: {**good, "wrong": wrong}[name] for name in names}, good):
        with lab.adapters({"bad": spec, "other": spec}) as engine:
            run(engine, {"before": Plan("cross_entropy", (6,), seed=9).batch("bad")})
            outcomes = run(engine, operations)
            refused = outcomes.pop("wrong", None)
            if "wrong" in operations:
                assert isinstance(refused, InvalidRequest), kind
                assert (refused.field or "").startswith(f"data[{index}]"), refused.field
            neighbours = {name: Bits.of(outcome) for name, outcome in outcomes.items()}
            found.append((neighbours, [bits(gradient(engine, adapter)) for adapter in ("bad", "other")]))
    assert found[0] == found[1]


@FEW
@given(data=st.data())
def test_a_ratio_that_is_not_finite_poisons_its_own_adapter_only(lab: Lab, data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(lab.specs))
    index = data.draw(st.integers(0, 2))
    batch = Plan("importance_sampling", (5, 9, 4), seed=3).batch("bad")
    n = len(batch.datums[index].tokens)
    infinite = changed(batch, index, logprobs=np.full(n, -1e4, np.float32), advantages=np.ones(n, np.float32))
    beside = data.draw(plans(most=3)).batch("other")
    found = []
    for operations in ({"one": beside, "bad": infinite, "two": beside}, {"one": beside, "two": beside}):
        with lab.adapters({"bad": spec, "other": spec}) as engine:
            outcomes = run(engine, operations)
            start = bits(weights(engine, "bad"))
            clean = Plan("cross_entropy", (6,), seed=9).batch("bad")
            steps = [AdapterStep(f"step-{name}", name, OptimStep(FAST)) for name in ("bad", "other")]
            if "bad" in outcomes:
                outcomes.pop("bad")
                run(engine, {"clean": clean})
                failed, stepped = engine.optimizer_steps(steps)
                assert isinstance(failed, NonFiniteGradient)
                assert f"data[{index}] of forward_backward 1 of 2" in failed.message
                assert bits(weights(engine, "bad")) == start
                assert not any(tensor.any() for tensor in gradient(engine, "bad").values())
            else:
                (stepped,) = engine.optimizer_steps(steps[1:])
            assert isinstance(stepped, StepResult)
            # The poisoned adapter goes on as if nothing had been.
            run(engine, {"clean": clean})
            again = bits(gradient(engine, "bad"))
            results = {name: Bits.of(outcome) for name, outcome in outcomes.items()}
            found.append((results, stepped, bits(weights(engine, "other")), again))
    assert found[0] == found[1]


@FEW
@given(data=st.data())
def test_an_adapter_that_has_diverged_fails_alone(lab: Lab, data: st.DataObject) -> None:
    # Not on the head alone: what caps its logits keeps them finite, whatever the weights are.
    spec = data.draw(st.sampled_from([spec for spec in lab.specs if spec != "head"]))
    batch = Plan("cross_entropy", (5, 1, 9), seed=data.draw(st.integers(0, 99))).batch("bad")
    beside = data.draw(plans(most=3)).batch("other")
    cuts: Cuts = data.draw(
        st.sampled_from(
            [[[("one", 99), ("bad", 3), ("two", 99)]], [[("bad", 1)], [("one", 99), ("bad", 2), ("two", 99)]]]
        )
    )
    found = []
    for broken in (True, False):
        with lab.adapters({"bad": spec, "other": spec}) as engine:
            if broken:
                run(engine, {"op": batch})
                engine.optimizer_step("bad", OptimStepParams(lr=1e30))
            ended: dict[str, Outcome] = {}
            operations = {"one": beside, **({"bad": batch} if broken else {}), "two": beside}
            for name, operation in operations.items():
                engine.open_operation(name, operation)
            done = dict.fromkeys(operations, 0)
            for turn in cuts:
                ranges = []
                for name, count in turn:
                    if name in operations and name not in ended:
                        stop = min(done[name] + count, len(operations[name].datums))
                        ranges.append(DatumRange(name, done[name], stop))
                        done[name] = stop
                ended.update(engine.compute(ranges))
            if broken:
                failed = ended.pop("bad")
                assert isinstance(failed, InvalidRequest)
                assert failed.code == "diverged"
                assert not any(tensor.any() for tensor in gradient(engine, "bad").values())
            found.append(({name: Bits.of(outcome) for name, outcome in ended.items()}, bits(gradient(engine, "other"))))
    assert found[0] == found[1]


@FEW
@given(data=st.data())
def test_an_operation_that_is_dropped_half_way_leaves_nothing(lab: Lab, data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(lab.specs))
    dropped = replace(Plan("cross_entropy", (5, 7, 4), seed=2).batch("a"), backward=data.draw(st.booleans()))
    after = data.draw(plans(most=3)).batch("a")
    found = []
    for begun in (0, 1, 2, None):
        with lab.adapters({"a": spec}) as engine:
            run(engine, {"before": Plan("cross_entropy", (6,), seed=9).batch("a")})
            if begun is not None:
                engine.open_operation("dropped", dropped)
                if begun:
                    assert engine.compute([DatumRange("dropped", 0, begun)]) == {}
                engine.drop_operation("dropped")
            engine.drop_operation("unheard of")
            found.append((Bits.of(run(engine, {"after": after})["after"]), bits(gradient(engine, "a"))))
            gone = engine.compute([DatumRange("dropped", 1, 3)])["dropped"]
            assert isinstance(gone, NotFound)
            assert bits(gradient(engine, "a")) == found[-1][1]
    assert found.count(found[0]) == len(found)


BAD_STEPS: dict[str, Callable[[], OptimStep]] = {
    "learning_rate": lambda: OptimStep(OptimStepParams(lr=-1.0)),
    "beta2": lambda: OptimStep(OptimStepParams(betas=(0.9, 1.0))),
    "eps": lambda: OptimStep(OptimStepParams(eps=0.0)),
    "weight_decay": lambda: OptimStep(OptimStepParams(weight_decay=float("nan"))),
    "grad_clip_norm": lambda: OptimStep(FAST, -1.0),
}


@pytest.mark.parametrize("field", BAD_STEPS)
def test_a_bad_step_fails_alone(labs: Labs, field: str) -> None:
    lab = labs("llama")
    names = ("a", "bad", "b")
    batches = {name: Plan("cross_entropy", (6, 3), seed=5).batch(name) for name in names}
    with lab.adapters(dict.fromkeys(names, "all")) as engine:
        run(engine, batches)
        before = bits(gradient(engine, "bad")), bits(weights(engine, "bad"))
        steps = [AdapterStep(name, name, BAD_STEPS[field]() if name == "bad" else OptimStep(FAST)) for name in names]
        unknown = AdapterStep("unknown", "unknown", OptimStep(FAST))
        one, failed, other, missing = engine.optimizer_steps([*steps, unknown])
        assert isinstance(failed, TinsmithError)
        assert isinstance(missing, NotFound)
        assert field in f"{failed.message} {failed.hint} {getattr(failed, 'field', '')}"
        assert (bits(gradient(engine, "bad")), bits(weights(engine, "bad"))) == before
        assert one == other
        assert bits(weights(engine, "a")) == bits(weights(engine, "b")) != before[1]
