"""A turn of many operations against another program, datum by datum, in float64.

transformers' eager attention and PEFT know nothing of packing; losses and their gradients are written down anew.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas.operations import Datum, Float32, TrainBatch
from tests.engines.properties.conftest import Labs
from tests.engines.properties.data import FEW, SMALL, Plan, plans
from tests.engines.properties.lab import ARCHITECTURES, gradient
from tests.engines.properties.turns import Outcome, run, succeeded
from tests.support.reference import Adapter, Example, Reference, loss_of


def example(datum: Datum) -> Example:
    """The datum as the reference takes it; what is not a token is float64."""
    inputs = {name: torch.as_tensor(np.asarray(values)) for name, values in datum.inputs.items()}
    wide = {name: t if name == "target_tokens" else t.double() for name, t in inputs.items()}
    return {"tokens": torch.as_tensor(np.asarray(datum.tokens)), **wide}


def score(reference: Reference, datum: Datum) -> Float32:
    """The logprobs of the targets."""
    with torch.no_grad():
        return reference.logprobs(example(datum)).numpy().astype(np.float32)


def loss_value(batch: TrainBatch, lp: torch.Tensor, x: Example, at: torch.Tensor | None = None) -> torch.Tensor:
    """The loss of one datum; the custom one is the sum of w * lp."""
    if batch.loss_fn == "custom":
        return (x["weights"] * lp).sum()
    return loss_of(batch.loss_fn, lp, x, dict(batch.loss_config), at)


def close(found: Adapter, expected: Adapter, bound: float) -> None:
    """Every tensor, relative to the largest one: none may be wrong in the shade of a larger one."""
    assert found.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        gap = float((found[name].double() - tensor).abs().max())
        assert gap <= bound * max(float(tensor.abs().max()), 0.01 * largest, 1e-3), (name, gap)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "free"])
@pytest.mark.parametrize("name", ARCHITECTURES)
@FEW
@given(data=st.data())
def test_a_turn_of_many_operations_is_each_datum_alone(labs: Labs, name: str, exact: bool, data: st.DataObject) -> None:
    lab = labs(name, exact=exact)
    tenants = data.draw(st.lists(st.sampled_from(lab.specs), min_size=1, max_size=4), label="tenants")
    drawn = [data.draw(plans(most=3), label="plan") for _ in tenants]
    adapters = {f"{spec}-{i}": spec for i, spec in enumerate(tenants)}
    operations = {
        f"op-{adapter}": plan.batch(adapter, partial(score, lab.reference(spec)))
        for (adapter, spec), plan in zip(adapters.items(), drawn, strict=True)
    }
    with lab.adapters(adapters) as engine:
        outcomes = run(engine, operations)
        gradients = {adapter: gradient(engine, adapter) for adapter in adapters}
    for (adapter, spec), batch in zip(adapters.items(), operations.values(), strict=True):
        check(lab.reference(spec), batch, outcomes[f"op-{adapter}"], gradients[adapter])


def check(reference: Reference, batch: TrainBatch, outcome: Outcome, found: Adapter) -> None:
    """Logprobs, the loss and the gradient of one operation."""
    result = succeeded(outcome)
    total = 0.0
    assert len(result.logprobs) == len(batch.datums)
    for datum, given_lp in zip(batch.datums, result.logprobs, strict=True):
        x = example(datum)
        lp = reference.logprobs(x)
        assert given_lp.dtype == np.float32
        np.testing.assert_allclose(given_lp, lp.detach().numpy(), rtol=0, atol=2e-5)
        value = loss_value(batch, lp, x)
        total += value.item()
        if batch.backward:
            value.backward()  # type: ignore[no-untyped-call]
    assert abs(result.metrics["loss:sum"] - total) <= 1e-4 * max(1.0, abs(total))
    zeros = {name: torch.zeros_like(parameter) for name, parameter in reference.parameters.items()}
    close(found, {**zeros, **reference.gradient()}, 1e-4)


@SMALL
@given(
    loss=st.sampled_from(["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce"]),
    seed=st.integers(0, 1 << 16),
    config=st.integers(0, 1),
)
def test_the_gradient_is_the_slope_of_the_loss(labs: Labs, loss: str, seed: int, config: int) -> None:
    """By finite differences in float64 of the reference's forward pass: nobody's backward pass is trusted."""
    lab = labs("phi")
    reference = lab.reference("all", "sdpa")  # of this architecture nothing is computed in less than float64
    plan = Plan(loss, (5, 1, 12), seed=seed, config=config)
    batch = plan.batch("a", partial(score, reference))
    with lab.adapters({"a": "all"}) as engine:
        run(engine, {"op": batch})
        found = gradient(engine, "a")
    start = reference.get()
    generator = torch.Generator().manual_seed(seed)
    direction = {n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in start.items()}
    examples = [example(datum) for datum in batch.datums]
    with torch.no_grad():
        fixed = [reference.logprobs(x) for x in examples]

        def value(step: float) -> float:
            reference.put({name: start[name] + step * direction[name] for name in start})
            return sum(
                float(loss_value(batch, reference.logprobs(x), x, at)) for x, at in zip(examples, fixed, strict=True)
            )

        try:
            h = 1e-6
            slope = (value(h) - value(-h)) / (2 * h)
        finally:
            reference.put(start)
    ours = sum(float((found[name].double() * direction[name]).sum()) for name in start)
    size = sum(float(tensor.double().square().sum()) for tensor in found.values()) ** 0.5
    assert abs(ours - slope) <= 2e-4 * max(size, 1e-3)
