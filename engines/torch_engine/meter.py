"""What passes cost: tokens, rows, products and seconds by part, collected until somebody takes them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from engines.lora import Router
from engines.torch_engine.packing import Pack
from schemas.operations import PassStats

PARTS = ("base", "lora", "head", "optimizer")


@dataclass(eq=False, slots=True)
class Meter:
    """Counts of one engine. On a GPU the seconds of a part are those of queueing its work; only their sum is exact.

    `body_parameters` and `head_parameters` are those that a token's products go through.
    """

    router: Router
    body_parameters: int
    head_parameters: int
    writing: bool = False
    """Whether the pass that runs may have written gradients."""
    _counts: Counter[str] = field(default_factory=Counter)
    _seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    _flops: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time that counts: whatever is not booked on another part in it is the base model's."""
        began, lora = time.perf_counter(), self.router.lora_seconds
        booked = sum(self._seconds.values())
        try:
            yield
        finally:
            lora = self.router.lora_seconds - lora
            self._seconds["lora"] += lora
            others = sum(self._seconds.values()) - booked
            self._seconds["base"] += max(0.0, time.perf_counter() - began - others)

    def add(self, part: str, seconds: float) -> None:
        """Book seconds on a part (`head`, `optimizer`)."""
        self._seconds[part] += seconds

    def count(self, geometry: Pack, trained_rows: Sequence[int], trains_body: bool) -> None:
        """Book a finished pass; `trained_rows` of each datum went backward through the head."""
        tokens = geometry.spans[-1].stop
        self._counts.update(tokens=tokens, rows=geometry.rows, sequences=len(geometry.spans), passes=1)
        self._flops += 2.0 * self.body_parameters * geometry.rows * (2 if trains_body else 1)
        self._flops += 2.0 * self.head_parameters * (tokens + sum(trained_rows))

    def take(self) -> PassStats:
        """Everything since the last call."""
        stats = PassStats(
            tokens=self._counts["tokens"],
            rows=self._counts["rows"],
            sequences=self._counts["sequences"],
            passes=self._counts["passes"],
            flops=self._flops,
            seconds=dict(self._seconds),
        )
        self._counts.clear()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._flops = 0.0
        return stats


def product_parameters(model: Any, head_weight: Tensor) -> int:
    """Parameters of the body that one token is multiplied with: linears, and of routed experts those it is sent to."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    total = sum(linear.weight.numel() for linear in linears if linear.weight is not head_weight)
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        share = getattr(config, "num_experts_per_tok", experts) / experts
        stacked = [p.numel() for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name.split(".")]
        total += int(share * sum(stacked))
    return total
