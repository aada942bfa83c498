"""Optimizer steps of many adapters together: torch.optim.AdamW's own result, and each adapter's as if it were alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, note
from hypothesis import strategies as st

from engines.torch_engine.engine import TorchEngine
from schemas.operations import AdapterStep, DimuonStepParams, OptimStep, OptimStepParams, StepParams, StepResult
from tests.engines.properties.conftest import Labs
from tests.engines.properties.data import SMALL, Plan
from tests.engines.properties.lab import Lab, bits, gradient, weights
from tests.engines.properties.turns import run
from tests.support.reference import Adapter


@dataclass(frozen=True)
class Round:
    """What happens to one adapter between two steps, and the step (None: it takes none)."""

    operations: int
    cleared: bool
    adam: tuple[tuple[str, Any], ...] | None
    clip: float

    @property
    def params(self) -> OptimStepParams:
        return OptimStepParams(**dict(self.adam or ()))


ADAMS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-4, 3e-3, 0.05]),
        "betas": st.sampled_from([(0.9, 0.95), (0.0, 0.0), (0.5, 0.999), (0.95, 0.1)]),
        "eps": st.sampled_from([1e-12, 1e-8, 1e-2, 1.0]),
        "weight_decay": st.sampled_from([0.0, 0.1, 2.0]),
    }
).map(lambda fields: tuple(fields.items()))
ROUNDS = st.builds(
    Round,
    operations=st.sampled_from([1, 1, 2, 0]),
    cleared=st.sampled_from([False, False, False, True]),
    adam=st.one_of(ADAMS, ADAMS, ADAMS, st.none()),
    clip=st.sampled_from([0.0, 0.0, 1e-3, 1.0, 1e9]),
)


def collect(engine: TorchEngine, adapter: str, number: int, part: Round) -> None:
    """The gradient before a step: of several operations, of which a `zero_grad` may have cleared the first ones."""
    if part.cleared:
        run(engine, {"cleared": Plan("cross_entropy", (4,), seed=77).batch(adapter)})
        engine.optimizer_zero_grad(adapter)
    for k in range(part.operations):
        run(engine, {"op": Plan("cross_entropy", (6, 3), seed=10 * number + k).batch(adapter)})


class Expected:
    """The weights of one adapter under torch.optim.AdamW in float64, from the engine's own gradients."""

    def __init__(self, start: Adapter) -> None:
        self.parameters = {name: tensor.double().requires_grad_(True) for name, tensor in start.items()}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), foreach=False)

    def step(self, found: Adapter, part: Round) -> tuple[float, float]:
        """The norms of the gradient (before clipping) and of the update."""
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.grad = found[name].double()
        bound = part.clip or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), bound, foreach=False))
        self.optimizer.param_groups[0].update(dict(part.adam or ()))
        self.optimizer.step()
        moved = [(p.detach() - before[name]).flatten() for name, p in self.parameters.items()]
        return norm, float(torch.cat(moved).norm())


def fresh(lab: Lab, adapter: str, spec: str) -> None:
    """The stock's weights with fresh moments."""
    lab.engine.remove_adapter(adapter)
    lab.engine.load_adapter(adapter, lab.folder / spec, with_optimizer=False, create=True)


@SMALL
@given(data=st.data())
def test_every_field_in_every_step_is_as_in_torch(labs: Labs, data: st.DataObject) -> None:
    """Two or three adapters of different sizes step in the same call with fields of their own, six times over."""
    lab = labs("llama")
    adapters = {f"a{i}": data.draw(st.sampled_from(lab.specs)) for i in range(data.draw(st.integers(2, 3)))}
    shared = data.draw(st.booleans())
    with lab.adapters(adapters) as engine:
        for adapter, spec in adapters.items():
            fresh(lab, adapter, spec)
        expected = {adapter: Expected(weights(engine, adapter)) for adapter in adapters}
        for number in range(6):
            parts = {adapter: data.draw(ROUNDS) for adapter in adapters}
            if shared:
                parts = dict.fromkeys(adapters, parts["a0"])
            note(f"{number}: {parts}")
            steps = []
            norms = {}
            for adapter, part in parts.items():
                collect(engine, adapter, number, part)
                if part.adam is not None:
                    norms[adapter] = expected[adapter].step(gradient(engine, adapter), part)
                    steps.append(AdapterStep(adapter, adapter, OptimStep(part.params, part.clip)))
            for step, result in zip(steps, engine.optimizer_steps(steps), strict=True):
                assert isinstance(result, StepResult), result
                norm, moved = norms[step.adapter_id]
                assert abs(result.metrics["grad_norm"] - norm) <= 1e-6 * norm
                # The norm of float32 weights' change: it carries their rounding.
                assert abs(result.metrics["update_norm"] - moved) <= 1e-4 * moved + 1e-6
                assert result.metrics["learning_rate"] == dict(parts[step.adapter_id].adam or ())["lr"]
                assert not any(tensor.any() for tensor in gradient(engine, step.adapter_id).values())
            for adapter in adapters:
                for name, tensor in weights(engine, adapter).items():
                    wanted = expected[adapter].parameters[name].detach()
                    assert float((tensor.double() - wanted).abs().max()) <= 2e-6 * (1 + float(wanted.abs().max())), name


@SMALL
@given(data=st.data())
def test_steps_together_are_each_step_alone(labs: Labs, data: st.DataObject) -> None:
    """Bit for bit, whatever the sizes of the adapters are and whether their fields are equal."""
    lab = labs("llama")
    adapters = {f"a{i}": data.draw(st.sampled_from(lab.specs)) for i in range(data.draw(st.integers(2, 5)))}
    equal = data.draw(st.booleans())
    plan = []
    for number in range(3):
        parts = {adapter: data.draw(ROUNDS) for adapter in adapters}
        plan.append(dict.fromkeys(adapters, parts["a0"]) if equal else parts)
        note(f"{number}: {plan[-1]}")
    found = []
    for together in (True, False):
        seen = []
        with lab.adapters(adapters) as engine:
            for number, parts in enumerate(plan):
                for adapter, part in parts.items():
                    collect(engine, adapter, number, part)
                steps = [
                    AdapterStep(adapter, adapter, OptimStep(part.params, part.clip))
                    for adapter, part in parts.items()
                    if part.adam is not None
                ]
                for group in [steps] if together else [[step] for step in steps]:
                    seen += [getattr(result, "metrics", result) for result in engine.optimizer_steps(group)]
            found.append((seen, {adapter: bits(weights(engine, adapter)) for adapter in adapters}))
    assert found[0] == found[1]


def test_optimizers_of_both_kinds_step_together(labs: Labs) -> None:
    """An AdamW adapter beside a Dimuon one: each takes its own defaults."""
    lab = labs("llama")
    found = []
    for together in (True, False):
        with lab.adapters({"adamw": "all"}) as engine:
            engine.remove_adapter("dimuon")
            engine.load_adapter("dimuon", lab.folder / "all", with_optimizer=False, create=True, optimizer="dimuon")
            try:
                names = ("adamw", "dimuon")
                run(engine, {name: Plan("cross_entropy", (6, 3), seed=5).batch(name) for name in names})
                params: dict[str, StepParams] = {"adamw": OptimStepParams(lr=1e-2), "dimuon": DimuonStepParams(lr=1e-2)}
                steps = [AdapterStep(name, name, OptimStep(params[name])) for name in names]
                for group in [steps] if together else [[step] for step in steps]:
                    assert all(isinstance(result, StepResult) for result in engine.optimizer_steps(group))
                found.append({name: bits(weights(engine, name)) for name in names})
            finally:
                engine.remove_adapter("dimuon")
    assert found[0] == found[1]
    assert found[0]["adamw"] != found[0]["dimuon"]
