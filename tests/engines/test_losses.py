"""Every loss against its closed form and finite differences in float64, and the metrics against plain numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engines.losses import LOSS_FUNCTIONS, datum_metrics, merge_metrics, resolve_loss
from schemas.errors import InvalidRequest
from schemas.losses import LOSSES

N = 40
RNG = np.random.default_rng(3)
LP = -RNG.uniform(0.1, 6.0, N)
Q = LP + RNG.normal(0, 0.4, N)
A = RNG.normal(0, 1.0, N)
W = RNG.normal(0, 1.0, N)
MASK = (RNG.random(N) < 0.6).astype(float)


def tensors(**arrays: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in arrays.items()}


def policy(loss: str, **extra: np.ndarray) -> dict[str, torch.Tensor]:
    arrays = {"logprobs": Q, "advantages": A, **extra}
    if loss == "gspo":
        arrays["sequence_ratio_mask"] = MASK
    return tensors(**arrays)


def ppo_closed(ratio: np.ndarray, low: float | np.ndarray, high: float | np.ndarray) -> float:
    return float(-np.minimum(ratio * A, np.clip(ratio, low, high) * A).sum())


R = np.exp(LP - Q)
S = np.full(N, np.exp((LP - Q)[MASK != 0].mean()))
CLOSED: dict[str, Callable[[], float]] = {
    "cross_entropy": lambda: float(-(W * LP).sum()),
    "importance_sampling": lambda: float(-(R * A).sum()),
    "ppo": lambda: ppo_closed(R, 0.8, 1.2),
    "cispo": lambda: float(-(np.clip(R, 0.0, 4.0) * LP * A).sum()),
    "dro": lambda: float(-(LP * A - 0.025 * (LP - Q) ** 2).sum()),
    "gspo": lambda: ppo_closed(S, 1 - 3e-4, 1 + 4e-4),
    "stable_reinforce": lambda: float(-(np.minimum(R, 2.0) * LP * A).sum()),
}


def inputs_of(loss: str) -> dict[str, torch.Tensor]:
    return tensors(weights=W) if loss == "cross_entropy" else policy(loss)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_value_is_the_closed_form(loss: str) -> None:
    function, config = resolve_loss(loss, {})
    term = function(torch.tensor(LP), inputs_of(loss), config)
    assert float(term.loss) == pytest.approx(CLOSED[loss](), rel=1e-12)


def surrogate(loss: str) -> Callable[[np.ndarray], float]:
    """The function whose plain derivative is the loss's gradient: stop-gradient factors are frozen at LP."""
    if loss == "cispo":
        return lambda lp: float(-(np.clip(R, 0.0, 4.0) * lp * A).sum())
    if loss == "gspo":
        return lambda lp: ppo_closed(S * np.exp(lp - LP), 1 - 3e-4, 1 + 4e-4)
    if loss == "stable_reinforce":
        return lambda lp: float(-(np.minimum(R, 2.0) * lp * A).sum())
    return {
        "cross_entropy": lambda lp: float(-(W * lp).sum()),
        "importance_sampling": lambda lp: float(-(np.exp(lp - Q) * A).sum()),
        "ppo": lambda lp: ppo_closed(np.exp(lp - Q), 0.8, 1.2),
        "dro": lambda lp: float(-(lp * A - 0.025 * (lp - Q) ** 2).sum()),
    }[loss]


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_gradient_is_the_finite_difference(loss: str) -> None:
    function, config = resolve_loss(loss, {})
    lp = torch.tensor(LP, requires_grad=True)
    (grad,) = torch.autograd.grad(function(lp, inputs_of(loss), config).loss, lp)
    value, h = surrogate(loss), 1e-6
    numeric = [(value(LP + h * unit) - value(LP - h * unit)) / (2 * h) for unit in np.eye(N)]
    np.testing.assert_allclose(grad.numpy(), numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {"dro"}))
def test_scaling_weights_scales_value_and_gradient(loss: str) -> None:
    function, config = resolve_loss(loss, {})
    key = "weights" if loss == "cross_entropy" else "advantages"
    inputs = inputs_of(loss)
    results = []
    for factor in (1.0, 3.0):
        lp = torch.tensor(LP, requires_grad=True)
        term = function(lp, {**inputs, key: inputs[key] * factor}, config)
        results.append((term.loss.item(), torch.autograd.grad(term.loss, lp)[0]))
    assert results[1][0] == pytest.approx(3 * results[0][0])
    torch.testing.assert_close(results[1][1], 3 * results[0][1])


def test_cross_entropy_without_weights_counts_every_position() -> None:
    assert float(LOSS_FUNCTIONS["cross_entropy"](torch.tensor(LP), {}, {}).loss) == pytest.approx(-LP.sum())


@pytest.mark.parametrize("loss", ["ppo", "cispo", "gspo"])
def test_clip_tensors_rule_over_the_configuration(loss: str) -> None:
    function, config = resolve_loss(loss, {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5})
    low, high = np.linspace(0.7, 0.99, N), np.linspace(1.01, 1.3, N)
    extra = {"clip_low_threshold": low, "clip_high_threshold": high}
    got = float(function(torch.tensor(LP), policy(loss, **extra), config).loss)
    expected = {
        "ppo": lambda: ppo_closed(R, low, high),
        "gspo": lambda: ppo_closed(S, low, high),
        "cispo": lambda: float(-(np.clip(R, low, high) * LP * A).sum()),
    }[loss]()
    assert got == pytest.approx(expected, rel=1e-12)
    only_low = function(torch.tensor(LP), policy(loss, clip_low_threshold=low), config)
    assert float(only_low.loss) != pytest.approx(got)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo"])
def test_masked_positions_are_selected_not_multiplied(loss: str) -> None:
    function, config = resolve_loss(loss, {})
    lp = torch.tensor(LP).clone()
    lp[0] = -torch.inf
    lp.requires_grad_(True)
    inputs = inputs_of(loss)
    inputs = {name: value.clone() for name, value in inputs.items()}
    for name in ("weights", "advantages", "sequence_ratio_mask"):
        if name in inputs:
            inputs[name][0] = 0.0
    loss_value = function(lp, inputs, config).loss
    (grad,) = torch.autograd.grad(loss_value, lp)
    assert torch.isfinite(loss_value)
    assert torch.isfinite(grad).all()
    assert grad[0] == 0


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_an_overflowing_ratio_on_the_clipped_side_has_gradient_zero(loss: str) -> None:
    function, config = resolve_loss(loss, {})
    lp = torch.tensor([-1.0], requires_grad=True)
    ones = torch.ones(1)
    inputs = {"logprobs": torch.tensor([-500.0]), "advantages": ones, "sequence_ratio_mask": ones}
    term = function(lp, inputs, config)
    assert float(term.loss) == pytest.approx(-config["clip_high_threshold"])
    assert torch.autograd.grad(term.loss, lp)[0].item() == 0.0


def test_metrics_are_means_over_the_positions_that_count() -> None:
    q, a, lp = np.array([0.0, -1.0, -2.0]), np.array([0.0, 1.0, -1.0]), np.array([-3.0, -0.5, -2.4])
    inputs = tensors(logprobs=q, advantages=a)
    function, config = resolve_loss("ppo", {})
    metrics = datum_metrics(function(torch.tensor(lp), inputs, config), torch.tensor(lp), inputs)
    gap = (lp - q)[1:]
    assert metrics == pytest.approx(
        {
            "loss:sum": -(1.2 * 1.0 + 0.8 * -1.0),
            "logprob_gap_abs:mean": np.abs(gap).mean(),
            "logprob_gap_abs:max": np.abs(gap).max(),
            "ratio:mean": np.exp(gap).mean(),
            "kl_sample_train:mean": -gap.mean(),
            "clip_fraction:mean": 1.0,
        }
    )
    assert all(name.count(":") == 1 for name in metrics)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_metric_names(loss: str) -> None:
    function, config = resolve_loss(loss, {})
    lp = torch.tensor(LP)
    names = set(datum_metrics(function(lp, inputs_of(loss), config), lp, inputs_of(loss)))
    gap = {"logprob_gap_abs:mean", "logprob_gap_abs:max", "ratio:mean", "kl_sample_train:mean"}
    clip = {"clip_fraction:mean"}
    expected = {"loss:sum"} | (gap if loss != "cross_entropy" else set())
    assert names == expected | (clip if loss in ("ppo", "cispo", "gspo", "stable_reinforce") else set())


def test_merging_is_independent_of_chunking() -> None:
    rows = [{"loss:sum": float(i), "ratio:mean": i * 2.0, "logprob_gap_abs:max": -float(i)} for i in range(6)]
    whole = merge_metrics(rows)
    assert whole == {"loss:sum": 15.0, "ratio:mean": 5.0, "logprob_gap_abs:max": 0.0}
    parts = [merge_metrics(rows[:2]), merge_metrics(rows[2:])]
    assert parts[0]["loss:sum"] + parts[1]["loss:sum"] == whole["loss:sum"]
    assert (2 * parts[0]["ratio:mean"] + 4 * parts[1]["ratio:mean"]) / 6 == whole["ratio:mean"]


def test_unknown_loss_and_key_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"'foo'.*cross_entropy"):
        resolve_loss("foo", {})
    with pytest.raises(InvalidRequest, match=r"'epsilon'.*clip_low_threshold"):
        resolve_loss("ppo", {"epsilon": 0.2})
    with pytest.raises(InvalidRequest, match="none"):
        resolve_loss("cross_entropy", {"temperature": 1.0})
