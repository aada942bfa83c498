"""The losses as pure functions: the formula stands beside the code. Sums over positions, never means.

Notation: lp = logprob of the target under the current weights, q = `logprobs` input (the sampler's), A = `advantages`,
w = `weights`, r = exp(lp - q), sg = stop gradient. All tensors have the shape of the datum's `target_tokens`. Positions
that cannot matter (w = 0, A = 0) are selected away and not multiplied: 0 * inf would be NaN. Not responsible for
validating inputs (`torch_engine/validation.py`) or for logprobs (`torch_engine/head.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from engines.loss_term import Config, Inputs, LossTerm
from engines.stable_reinforce import stable_reinforce
from schemas.errors import InvalidRequest
from schemas.losses import LOSSES


def cross_entropy(lp: Tensor, inputs: Inputs, config: Config) -> LossTerm:
    """-sum w * lp, lp of shape [N] or [N, K]; w of any sign, 1 everywhere if absent.

    Source: Tinker documentation, "Losses".
    """
    weights = inputs.get("weights")
    if weights is None:
        return LossTerm(-lp.sum())
    return LossTerm(-torch.where(weights != 0, weights * lp, 0.0).sum())


def importance_sampling(lp: Tensor, inputs: Inputs, config: Config) -> LossTerm:
    """-sum r * A. Source: Tinker documentation, "Losses" (the REINFORCE gradient corrected for the sampler)."""
    advantages = inputs["advantages"]
    log_ratio = (lp - inputs["logprobs"]).masked_fill(advantages == 0, 0.0)
    return LossTerm(-(torch.exp(log_ratio) * advantages).sum())


def ppo(lp: Tensor, inputs: Inputs, config: Config) -> LossTerm:
    """-sum min(r * A, clip(r, lo, hi) * A).

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; lo and hi are bounds of the ratio itself.
    """
    return _clipped_objective(lp - inputs["logprobs"], inputs, config)


def cispo(lp: Tensor, inputs: Inputs, config: Config) -> LossTerm:
    """-sum sg(clip(r, lo, hi)) * lp * A.

    Source: MiniMax-M1, arXiv 2506.13585, eq. 4. Clipped positions keep their gradient.
    """
    advantages = inputs["advantages"]
    low, high = _bounds(lp, inputs, config)
    ratio = torch.exp((lp - inputs["logprobs"]).detach())
    term = torch.clamp(ratio, low, high) * lp * advantages
    return LossTerm(-torch.where(advantages != 0, term, 0.0).sum(), (ratio < low) | (ratio > high))


def dro(lp: Tensor, inputs: Inputs, config: Config) -> LossTerm:
    """-sum (lp * A - beta / 2 * (lp - q)^2); every position counts in the quadratic term, A = 0 included.

    Source: Richemond et al. 2024, arXiv 2405.19107, in the form of the Tinker documentation.
    """
    gap = lp - inputs["logprobs"]
    return LossTerm(-(lp * inputs["advantages"] - 0.5 * config["beta"] * gap.square()).sum())


def gspo(lp: Tensor, inputs: Inputs, config: Config) -> LossTerm:
    """PPO form with r_t = s * exp(lp_t - sg(lp_t)), s = sg(exp(mean over mask != 0 of (lp - q))).

    Source: Zheng et al. 2025, arXiv 2507.18071, eq. 5 and 13 (GSPO-token). Without any masked-in position s = 1.
    """
    counted = inputs["sequence_ratio_mask"] != 0
    gaps = (lp.detach() - inputs["logprobs"])[counted]
    log_s = gaps.mean() if gaps.numel() else lp.new_zeros(())
    return _clipped_objective(log_s + (lp - lp.detach()), inputs, config)


def _clipped_objective(log_ratio: Tensor, inputs: Inputs, config: Config) -> LossTerm:
    """-sum min(r * A, clip(r, lo, hi) * A) for r = exp(log_ratio).

    min() takes the bound where A > 0 and r > hi or A < 0 and r < lo; there the objective is constant, and the
    ratio (which may have overflowed) must not enter the product, for 0 * inf is NaN in the backward pass.
    """
    advantages = inputs["advantages"]
    low, high = _bounds(log_ratio, inputs, config)
    ratio = torch.exp(log_ratio.detach())
    over, under = (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low)
    free = torch.exp(log_ratio.masked_fill(over | under | (advantages == 0), 0.0))
    effective = torch.where(over, high, torch.where(under, low, free))
    return LossTerm(-(effective * advantages).sum(), over | under)


def _bounds(like: Tensor, inputs: Inputs, config: Config) -> tuple[Tensor, Tensor]:
    """Clip bounds of the ratio per position: the datum's own tensors rule over the configuration."""
    low, high = inputs.get("clip_low_threshold"), inputs.get("clip_high_threshold")
    return (
        torch.full_like(like, config["clip_low_threshold"]).detach() if low is None else low,
        torch.full_like(like, config["clip_high_threshold"]).detach() if high is None else high,
    )


LossFunction = Callable[[Tensor, Inputs, Config], LossTerm]

LOSS_FUNCTIONS: Mapping[str, LossFunction] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}


def resolve_loss(name: str, config: Config) -> tuple[LossFunction, dict[str, float]]:
    """The function and its complete configuration. Raises `InvalidRequest` for an unknown loss or key."""
    function = LOSS_FUNCTIONS.get(name)
    if function is None:
        raise InvalidRequest(f"unknown loss_fn {name!r}; known: {', '.join(LOSS_FUNCTIONS)}", field="loss_fn")
    known = LOSSES[name].config
    for key in config:
        if key not in known:
            accepted = ", ".join(known) or "none"
            raise InvalidRequest(f"{name} takes no configuration {key!r}; it takes: {accepted}", field="loss_fn_config")
    return function, {**known, **config}


def datum_metrics(term: LossTerm, lp: Tensor, inputs: Inputs) -> dict[str, float]:
    """What one datum adds to the metrics; names have exactly one colon, the part after it says how they merge.

    `loss:sum`; a custom loss's own; for losses with q, over the positions where A or q is not 0 (prompts have both 0):
    `logprob_gap_abs:mean` and `:max` = |lp - q|, `ratio:mean` = r, `kl_sample_train:mean` = q - lp (an estimate of
    KL(sampler || trainer)), and `clip_fraction:mean` where clipping exists. A datum without such positions agrees
    perfectly: gap 0, ratio 1.
    """
    reported = term.loss if term.value is None else term.value
    metrics = {"loss:sum": float(reported.detach().double()), **term.metrics}
    if "logprobs" not in inputs:
        return metrics
    counted = (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)
    gap = (lp.detach() - inputs["logprobs"])[counted].double()
    if not gap.numel():
        gap = torch.zeros(1, dtype=torch.float64)
    metrics["logprob_gap_abs:mean"] = float(gap.abs().mean())
    metrics["logprob_gap_abs:max"] = float(gap.abs().max())
    # 700: the largest exponent of a float64; a metric stays a number even if the ratio overflows.
    metrics["ratio:mean"] = float(torch.exp(gap.clamp(max=700.0)).mean())
    metrics["kl_sample_train:mean"] = float(-gap.mean())
    if term.clipped is not None:
        clipped = term.clipped[counted].double()
        metrics["clip_fraction:mean"] = float(clipped.mean()) if clipped.numel() else 0.0
    return metrics


def merge_metrics(per_datum: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a batch from those of its datums: `:sum` adds, `:mean` averages over datums, `:max` takes the largest.

    Clients merge chunks of a batch the same way, weighting `:mean` by the number of datums, so chunking is invisible.
    """
    merged: dict[str, float] = {}
    for name in per_datum[0] if per_datum else ():
        values = [metrics[name] for metrics in per_datum]
        reduction = name.partition(":")[2]
        if reduction == "max":
            merged[name] = max(values)
        else:
            merged[name] = sum(values) / (len(values) if reduction == "mean" else 1)
    return merged
