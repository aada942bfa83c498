"""The training state of an adapter: AdamW as in torch, all or nothing, the same bits alone and in company."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from engines.dimuon import dimuon_step
from engines.lora import views
from engines.peft_format import OptimizerState
from engines.torch_engine import adapter, stepping
from engines.torch_engine.adapter import AdapterState, Gradient, Step, state_bytes, step_many
from schemas.errors import EngineFailure, InvalidRequest, ModelLost, NonFiniteGradient, OutOfMemory, TinsmithError
from schemas.operations import DimuonStepParams, OptimStepParams
from tests.engines.adapter_states import collect, content, make_state, same

ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
FAST = OptimStepParams(lr=0.01)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(seed: int = 0, **shape: Any) -> AdapterState:
    """An adapter with a history of two steps."""
    state = make_state(seed, **shape)
    for number in range(2):
        collect(state, seed + number)
        state.step(None, 0.0)
    return state


# -- one vector ------------------------------------------------------------------------------------------------------
def test_weights_are_views_of_one_vector_and_a_copy_of_what_was_given() -> None:
    given = make_state(3)
    state = AdapterState.of(given.spec, given.weights)
    state.flat.zero_()
    assert all(not tensor.any() for tensor in state.weights.tensors)
    assert all(tensor.any() for tensor in given.weights.tensors)
    assert sum(tensor.numel() for tensor in state.weights.tensors) == state.parameters
    flat, pairs = state.blank()
    pairs["layers.1.proj"][0].fill_(1.0)
    assert flat.sum() == state.spec.rank * 24
    assert state.size_bytes == state_bytes(state.parameters, "adamw") == 16 * state.parameters
    assert state_bytes(10, "dimuon") == 120


@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
def test_the_memory_of_an_optimizer_makes_the_same_state_again(optimizer: Any) -> None:
    state = trained(optimizer=optimizer)
    twin = AdapterState.of(state.spec, state.weights, optimizer, state.memory())
    assert same(content(state), content(twin))
    for one in (state, twin):
        collect(one, 7)
        one.step(None, 0.5)
    assert same(content(state), content(twin))
    assert state.memory().step == 3
    other: Any = "adamw" if optimizer == "dimuon" else "dimuon"
    with pytest.raises(InvalidRequest, match=optimizer):
        AdapterState.of(state.spec, state.weights, other, state.memory())


def test_gradients_add_up_and_keep_the_first_that_was_not_finite() -> None:
    total = Gradient()
    total.merge(Gradient())
    assert (total.flat, total.passes) == (None, 0)
    total.add(torch.ones(3), 1, None)
    total.add(torch.ones(3), 2, (1, 5))
    total.merge(Gradient(torch.ones(3), 1, (0, None)))
    assert total.flat is not None
    assert total.flat.tolist() == [3.0, 3.0, 3.0]
    assert (total.passes, total.poisoned) == (4, (2, 5))


# -- the numbers -----------------------------------------------------------------------------------------------------
def reference(state: AdapterState, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW([state.flat.clone().requires_grad_(True)], **{**ADAM, **settings})


@pytest.mark.parametrize("width", [24, 40_000])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"lr": 0.3},
        {"lr": 0.0},
        {"betas": (0.5, 0.6)},
        {"betas": (0.0, 0.0)},
        {"eps": 1e-2},
        {"eps": 1e-37},
        {"weight_decay": 0.9},
        {"clip": 0.5},
        {"clip": 1e9},
    ],
    ids=str,
)
def test_each_field_acts_as_in_torch_and_for_one_step_only(change: dict[str, Any], width: int) -> None:
    state = make_state(width=width, modules=2)
    plain, fused = reference(state, foreach=False), reference(state, fused=True)
    settings = {**ADAM, **change}
    clip = settings.pop("clip", 0.0)
    for number, params in enumerate((ADAM, settings, ADAM)):
        collect(state, number)
        active = clip if number == 1 else 0.0
        for optimizer in (plain, fused):
            (weights,) = optimizer.param_groups[0]["params"]
            assert state.gradient.flat is not None
            weights.grad = state.gradient.flat.clone()
            if active:
                torch.nn.utils.clip_grad_norm_([weights], active)
            optimizer.param_groups[0].update(params)
            optimizer.step()
        metrics = state.step(OptimStepParams(**params), active)
        assert metrics["learning_rate"] == params["lr"]
        assert state.gradient.flat is None
    torch.testing.assert_close(state.flat, plain.param_groups[0]["params"][0].detach(), rtol=1e-5, atol=1e-7)
    if clip == 0.0:
        assert torch.equal(state.flat, fused.param_groups[0]["params"][0].detach())


def test_without_overrides_the_defaults_of_the_sdk_rule() -> None:
    state = make_state()
    optimizer = reference(state, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, fused=True)
    for number, params in enumerate((OptimStepParams(lr=0.5, eps=1.0), None, OptimStepParams())):
        collect(state, number)
        (weights,) = optimizer.param_groups[0]["params"]
        assert state.gradient.flat is not None
        weights.grad = state.gradient.flat.clone()
        optimizer.param_groups[0].update({"lr": 0.5, "eps": 1.0} if number == 0 else {"lr": 1e-4, "eps": 1e-12})
        optimizer.step()
        state.step(params, 0.0)
    assert torch.equal(state.flat, weights.detach())


@pytest.mark.parametrize("width", [24, 40_000])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e10, 1e14])
def test_norms_are_exact_whatever_the_size_of_the_numbers(scale: float, width: int) -> None:
    state = make_state(width=width)
    collect(state, 1, scale)
    assert state.gradient.flat is not None
    expected, former = float(state.gradient.flat.double().norm()), state.flat.double()
    metrics = state.step(OptimStepParams(lr=1e-3, eps=1e-20), 0.0)
    assert math.isclose(metrics["grad_norm"], expected, rel_tol=1e-7)
    assert math.isclose(metrics["update_norm"], float((state.flat.double() - former).norm()), rel_tol=1e-5)


def test_a_step_without_a_gradient_follows_the_momentum() -> None:
    state = trained()
    first, second = state.step(FAST, 0.0), state.step(FAST, 0.0)
    assert first["grad_norm"] == second["grad_norm"] == 0.0
    assert first["update_norm"] > second["update_norm"] > 0
    still = make_state().step(FAST, 1.0)
    assert still == {"grad_norm": 0.0, "learning_rate": 0.01, "update_norm": 0.0}


def test_an_open_stage_counts_and_stays_open() -> None:
    apart, together = trained(), trained()
    collect(apart, 1)
    apart.gradient.add(torch.full((apart.parameters,), 2.0), 1, None)
    collect(together, 1)
    together.stage = Gradient()
    together.stage.add(torch.full((together.parameters,), 2.0), 1, None)
    assert apart.step(FAST, 3.0) == together.step(FAST, 3.0)
    assert torch.equal(apart.flat, together.flat)
    assert together.stage is not None
    assert (together.stage.flat, together.gradient.flat) == (None, None)
    together.stage.add(torch.ones(together.parameters), 1, None)
    assert together.step(FAST, 0.0)["grad_norm"] == pytest.approx(math.sqrt(together.parameters))


# -- all or nothing --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
@pytest.mark.parametrize(
    ("poisoned", "staged", "told"),
    [
        ((0, 3), None, r"data\[3\] of forward_backward 2 of 2 since"),
        ((0, None), None, r"brought by forward_backward 2 of 2 since"),
        (None, None, "the sum of 2 forward_backward calls"),
        (None, (0, 1), r"data\[1\] of forward_backward 3 of 3 since"),
        ((0, 3), (0, 1), r"data\[3\] of forward_backward 2 of 3 since"),
    ],
)
def test_a_gradient_that_is_not_finite_names_its_origin_and_is_cleared(
    optimizer: Any, poisoned: Any, staged: Any, told: str
) -> None:
    state, twin = trained(optimizer=optimizer), trained(optimizer=optimizer)
    before = content(state)
    collect(state, 1)
    state.gradient.add(torch.full((state.parameters,), math.nan), 1, poisoned)
    if staged is not None:
        state.stage = Gradient(torch.ones(state.parameters), 1, staged)
    with pytest.raises(NonFiniteGradient, match=told):
        state.step(None, 1.0)
    assert same(content(state), before)
    assert state.stage is None or state.stage.flat is None
    for one in (state, twin):
        collect(one, 5)
        one.step(None, 1.0)
    assert same(content(state), content(twin))


def test_a_norm_that_the_moments_could_not_hold_is_refused_unless_clipped() -> None:
    state = trained()
    collect(state, 1, 1e20)
    with pytest.raises(NonFiniteGradient, match="norm"):
        state.step(FAST, 0.0)
    collect(state, 1, 1e17)
    assert state.step(FAST, 1.0)["grad_norm"] > 1e17
    assert state.flat.isfinite().all()


@pytest.mark.parametrize(
    ("params", "clip", "field"),
    [
        (OptimStepParams(lr=-1.0), 0.0, "adam_params.learning_rate"),
        (OptimStepParams(lr=0.5, betas=(0.9, 1.0)), 0.0, "adam_params.beta2"),
        (OptimStepParams(lr=0.5, eps=1e-60), 0.0, "adam_params.eps"),
        (OptimStepParams(lr=1e300), 0.0, "adam_params.learning_rate"),
        (OptimStepParams(lr=1e38, weight_decay=1e38), 0.0, "adam_params."),
        (OptimStepParams(lr=3e38, betas=(0.0, 0.0)), 0.0, "adam_params.learning_rate"),
        (OptimStepParams(lr=0.5), math.nan, "adam_params.grad_clip_norm"),
        (OptimStepParams(lr=0.5), -1.0, "adam_params.grad_clip_norm"),
        (DimuonStepParams(lr=0.5), 0.0, "optimizer_params"),
    ],
)
@pytest.mark.parametrize("width", [24, 40_000])
def test_a_refused_step_changes_nothing(params: Any, clip: float, field: str, width: int) -> None:
    state = trained(width=width)
    state.flat[-1] = 3e38
    state = AdapterState.of(state.spec, state.weights, "adamw", state.memory())
    collect(state, 4)
    before = content(state)
    with pytest.raises(InvalidRequest) as caught:
        state.step(params, clip)
    assert (caught.value.field or "").startswith(field)
    assert same(content(state), before)
    state.step(FAST, 0.0)
    assert state.steps == 3


def test_moments_that_no_step_makes_are_refused_with_nothing_changed() -> None:
    state = trained()
    memory = state.memory()
    squares = [tensor.clone() for tensor in memory.slots["exp_avg_sq"]]
    squares[1][0, 0] = -4.0
    slots = {"exp_avg": memory.slots["exp_avg"], "exp_avg_sq": squares}
    state = AdapterState.of(state.spec, state.weights, "adamw", OptimizerState("adamw", 2, slots))
    collect(state, 4)
    before = content(state)
    with pytest.raises(InvalidRequest, match="infinite"):
        state.step(FAST, 0.0)
    assert same(content(state), before)


def test_a_long_run_of_wild_steps_never_leaves_float32() -> None:
    """Whatever is proved finite beforehand is finite: both ways of stepping occur, and refusals change nothing."""
    state = make_state(modules=1)
    generator = torch.Generator().manual_seed(0)
    surely = refused = 0
    for number in range(300):
        powers = torch.randint(-30, 37, (3,), generator=generator).tolist()
        collect(state, number, 10.0 ** min(16, powers[0]))
        before = content(state)
        params = OptimStepParams(lr=10.0 ** powers[1], eps=10.0 ** min(0, powers[2]), betas=(0.5, 0.9))
        surely += adapter._prepare(0, state, params, 0.0).surely_finite()
        try:
            state.step(params, 0.0)
        except InvalidRequest:
            refused += 1
            assert same(content(state), before)
            state.clear()
        assert all(bool(tensor.isfinite().all()) for tensor in content(state).values())
    assert surely > 20
    assert refused > 20


def broken(function: Any, calls: int) -> Any:
    """The function, which does its work and then finds no memory at the given call."""
    count = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        result = function(*args, **kwargs)
        if count == calls:
            raise torch.OutOfMemoryError("in the midst")
        return result

    return run


@pytest.mark.parametrize("calls", [1, 2])
def test_an_adapter_whose_step_broke_off_is_lost_and_says_so(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    large, other = trained(width=40_000), trained(1)
    for state in (large, other):
        collect(state, 4)
    monkeypatch.setattr(stepping, "adamw", broken(adamw, calls))
    lost, fine = step_many([(large, FAST, 0.0), (other, OptimStepParams(lr=0.5), 0.0)])
    assert isinstance(lost, ModelLost)
    assert isinstance(fine, dict)
    monkeypatch.undo()
    with pytest.raises(ModelLost, match="halfway"):
        large.step(FAST, 0.0)


@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
def test_a_step_that_was_not_proved_finite_is_put_back_when_it_breaks_off(
    monkeypatch: pytest.MonkeyPatch, optimizer: Any
) -> None:
    state, twin = trained(optimizer=optimizer), trained(optimizer=optimizer)
    for one in (state, twin):
        collect(one, 4)
    before = content(state)
    params = OptimStepParams(lr=1.0, eps=1e-37) if optimizer == "adamw" else None
    monkeypatch.setattr(stepping, "adamw", broken(adamw, 1))
    monkeypatch.setattr(adapter, "dimuon_step", broken(dimuon_step, 1))
    with pytest.raises(OutOfMemory):
        state.step(params, 0.0)
    monkeypatch.undo()
    assert same(content(state), before)
    assert state.step(params, 0.0) == twin.step(params, 0.0)
    assert same(content(state), content(twin))


# -- many at once ----------------------------------------------------------------------------------------------------
SIZES = (24, 7, 500, 40_000, 24, 33, 24, 9)


def company() -> list[tuple[AdapterState, OptimStepParams | DimuonStepParams | None, float]]:
    """Adapters of many sizes and histories, most with the same hyperparameters; two of them cannot step."""
    states = [trained(seed, width=width) for seed, width in enumerate(SIZES)]
    states[5] = trained(5, optimizer="dimuon")
    for seed, state in enumerate(states):
        for number in range(seed % 3):
            collect(state, number)
            state.step(None, 0.0)
        collect(state, 50 + seed)
    states[2].gradient.add(torch.full((states[2].parameters,), math.inf), 1, (0, 0))
    params: list[Any] = [FAST] * len(states)
    params[5], params[6] = None, OptimStepParams(lr=-1.0)
    clips = [0.0, 0.5, 0.0, 1e9, 0.1, 0.0, 0.0, 0.0]
    return list(zip(states, params, clips, strict=True))


def outcome(step: Step) -> tuple[dict[str, Tensor], Any]:
    (found,) = step_many([step])
    return content(step[0]), told(found)


def told(found: dict[str, float] | TinsmithError) -> Any:
    return (type(found), found.message) if isinstance(found, TinsmithError) else found


@pytest.mark.parametrize("count", [1, 2])
def test_an_adapter_has_the_same_bits_alone_and_in_company(threads: None, count: int) -> None:
    alone = [outcome(step) for step in company()]
    torch.set_num_threads(count)
    for order in (range(len(SIZES)), reversed(range(len(SIZES)))):
        places = list(order)
        everybody = company()
        found = step_many([everybody[place] for place in places])
        for place, result in zip(places, found, strict=True):
            assert told(result) == alone[place][1]
            assert same(content(everybody[place][0]), alone[place][0])
    assert sum(isinstance(result, dict) for _, result in alone) == len(SIZES) - 2


def test_steps_of_equal_hyperparameters_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def counting(weights: list[Tensor], *args: Any, **kwargs: Any) -> None:
        lengths.append(len(weights))
        adamw(weights, *args, **kwargs)

    states = [trained(seed) for seed in range(6)]
    monkeypatch.setattr(stepping, "adamw", counting)
    rates = [0.1, 0.2, 0.1, 0.1, 0.2, 0.1]
    step_many([(state, OptimStepParams(lr=rate), 0.0) for state, rate in zip(states, rates, strict=True)])
    assert sorted(lengths) == [2, 4]


def test_nobody_steps_twice_at_once() -> None:
    state = trained()
    before = content(state)
    with pytest.raises(EngineFailure):
        step_many([(state, FAST, 0.0), (state, FAST, 0.0)])
    assert same(content(state), before)
    assert step_many([]) == []


def test_moments_belong_to_their_modules() -> None:
    """A gradient in one module moves that module only."""
    state = make_state()
    flat, pairs = state.blank()
    pairs["layers.1.proj"][1].fill_(1.0)
    before = content(state)
    state.gradient.add(flat, 1, None)
    state.step(FAST, 0.0)
    moved = {name for name, tensor in content(state).items() if not torch.equal(tensor, before[name])}
    assert moved == {"weights", "exp_avg", "exp_avg_sq", "steps", "layers.1.proj.1"}
    kept = views(state.moments["exp_avg"], state.weights.pairs)
    assert {name for name, pair in kept.items() if any(bool(side.any()) for side in pair)} == {"layers.1.proj"}
