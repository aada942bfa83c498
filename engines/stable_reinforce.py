"""StableReinforce: REINFORCE that stays bounded when the sampler and the trainer disagree.

The formula of the hosted service is not public; this is an objective of our own behind the same interface, derived in
`docs/losses.md`. Notation as in `engines/losses.py`. Not responsible for where q comes from: the edge puts in what was
recorded when a sequence was sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.loss_term import Config, Inputs, LossTerm

GREATEST_WEIGHT = 2.0
"""Bound of the importance weight: a position counts at most twice, however much likelier its token has become."""


def stable_reinforce(lp: Tensor, inputs: Inputs, config: Config) -> LossTerm:
    """-sum sg(min(r, 2)) * A * lp + kl_coeff * sum h(lp - q), h the Huber function of `huber`.

    The first sum has the REINFORCE gradient where the policies agree (r = 1). The second pulls the policy back to the
    one that sampled, at the positions that were sampled (A or q not 0); its gradient is 0 where they agree. Per
    position the gradient in lp is at most 2 |A| + kl_coeff, whatever r is.
    """
    advantages = inputs["advantages"]
    gap = lp - inputs["logprobs"]
    sampled = (advantages != 0) | (inputs["logprobs"] != 0)
    ratio = torch.exp(gap.detach())
    policy = torch.where(advantages != 0, torch.clamp(ratio, max=GREATEST_WEIGHT) * lp * advantages, 0.0)
    penalty = torch.where(sampled, huber(gap), 0.0)
    return LossTerm(config["kl_coeff"] * penalty.sum() - policy.sum(), sampled & (ratio > GREATEST_WEIGHT))


def huber(gap: Tensor) -> Tensor:
    """gap^2 / 2 up to |gap| = 1, |gap| - 1/2 beyond: the squared log-ratio, whose mean over samples is the KL
    divergence to second order in either direction, with a slope of at most 1."""
    size = gap.abs()
    return torch.where(size <= 1, 0.5 * gap.square(), size - 0.5)
