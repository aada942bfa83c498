"""What every loss takes and returns. Not responsible for any formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LossTerm:
    """Loss of one datum: `loss` scalar, differentiable in lp; `clipped` bool [N], where clipping held, if any.

    `value` is the loss to report, if `loss` only has its gradient; `metrics` are a custom loss's own.
    """

    loss: Tensor
    clipped: Tensor | None = None
    value: Tensor | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
