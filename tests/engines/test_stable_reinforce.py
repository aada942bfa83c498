"""The properties that docs/losses.md states of stable_reinforce."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines.losses import datum_metrics, resolve_loss
from engines.stable_reinforce import GREATEST_WEIGHT, stable_reinforce


def tensors(n: int = 12, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """lp and inputs in float64; the first three positions are a prompt (A = q = 0)."""
    generator = torch.Generator().manual_seed(seed)
    lp = -torch.rand(n, generator=generator).double() * 4 - 0.5
    advantages = torch.randn(n, generator=generator).double()
    q = lp + torch.randn(n, generator=generator).double() * 2
    advantages[:3], q[:3] = 0.0, 0.0
    return lp.requires_grad_(True), {"logprobs": q, "advantages": advantages}


def gradient(lp: Tensor, inputs: dict[str, Tensor], kl_coeff: float) -> Tensor:
    (found,) = torch.autograd.grad(stable_reinforce(lp, inputs, {"kl_coeff": kl_coeff}).loss, lp)
    return found


@pytest.mark.parametrize("kl_coeff", [0.0, 0.1, 5.0])
def test_on_policy_the_gradient_is_that_of_reinforce(kl_coeff: float) -> None:
    lp, inputs = tensors()
    inputs["logprobs"] = torch.where(inputs["logprobs"] != 0, lp.detach(), 0.0)
    torch.testing.assert_close(gradient(lp, inputs, kl_coeff), -inputs["advantages"])


def test_off_policy_each_position_is_weighed_by_its_truncated_ratio() -> None:
    lp, inputs = tensors()
    ratio = torch.exp(lp.detach() - inputs["logprobs"])
    expected = -torch.clamp(ratio, max=GREATEST_WEIGHT) * inputs["advantages"]
    torch.testing.assert_close(gradient(lp, inputs, 0.0), torch.where(inputs["advantages"] != 0, expected, 0.0))
    assert bool((ratio > GREATEST_WEIGHT).any()), "the test must see the bound at work"
    assert bool((ratio < 1).any())


@pytest.mark.parametrize("gap", [-500.0, -40.0, -1.0, 1.0, 40.0, 500.0])
def test_the_gradient_is_bounded_whatever_the_ratio(gap: float) -> None:
    lp, inputs = tensors()
    inputs["logprobs"] = torch.where(inputs["logprobs"] != 0, lp.detach() - gap, 0.0)
    for kl_coeff in (0.0, 0.3):
        found = gradient(lp, inputs, kl_coeff)
        assert bool(torch.isfinite(found).all())
        assert bool((found.abs() <= GREATEST_WEIGHT * inputs["advantages"].abs() + kl_coeff + 1e-12).all())
    assert bool(torch.isfinite(stable_reinforce(lp, inputs, {"kl_coeff": 0.3}).loss))


def test_the_penalty_agrees_with_finite_differences() -> None:
    lp, inputs = tensors()

    def penalty(at: Tensor) -> float:
        terms = (
            stable_reinforce(at, {**inputs, "advantages": inputs["advantages"] * 0}, {"kl_coeff": k}) for k in (0, 1)
        )
        without, with_it = (float(term.loss) for term in terms)
        return with_it - without

    analytic = gradient(lp, inputs, 1.0) - gradient(lp, inputs, 0.0)
    step = 1e-6
    for i in range(len(lp)):
        moved = torch.zeros_like(lp)
        moved[i] = step
        numeric = (penalty(lp.detach() + moved) - penalty(lp.detach() - moved)) / (2 * step)
        assert abs(numeric - float(analytic[i])) < 1e-6
    assert not analytic[:3].any(), "prompt positions are not pulled"
    towards = (lp.detach() - inputs["logprobs"])[3:]
    assert bool((torch.sign(analytic[3:]) == torch.sign(towards)).all()), "descent leads back to the sampler"


def test_near_the_sampler_the_penalty_is_the_kl_divergence() -> None:
    """Its mean over samples of q is KL(q || p) to second order."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(50, generator=generator).double()
    q = torch.log_softmax(logits, 0)
    p = torch.log_softmax(logits + 0.05 * torch.randn(50, generator=generator).double(), 0)
    divergence = float((q.exp() * (q - p)).sum())
    inputs = {"logprobs": q, "advantages": torch.zeros_like(q)}
    (slope,) = torch.autograd.grad(stable_reinforce(p.requires_grad_(True), inputs, {"kl_coeff": 1.0}).loss, p)
    estimate = float((q.exp() * 0.5 * (p - q).square()).sum().detach())
    torch.testing.assert_close(slope, (p - q).detach())
    assert abs(estimate - divergence) < 0.1 * divergence


def test_metrics_say_how_many_weights_were_cut() -> None:
    lp, inputs = tensors()
    function, config = resolve_loss("stable_reinforce", {})
    assert config == {"kl_coeff": 0.0}
    metrics = datum_metrics(function(lp, inputs, config), lp, inputs)
    ratio = torch.exp(lp.detach() - inputs["logprobs"])[3:]
    assert metrics["clip_fraction:mean"] == pytest.approx(float((ratio > GREATEST_WEIGHT).double().mean()))
