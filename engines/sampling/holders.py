"""What a sampler asks of the keys and values of one request, whoever keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engines.lora import AdapterWeights


class AnyHolder(Protocol):
    """The cache of one request: one row for its prompt, then a row per sample."""

    @property
    def tokens(self) -> int:
        """What it takes of the budget of tokens."""
        ...

    def needed(self, new: int) -> int:
        """What it would take with `new` more positions per row."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Make `rows` (repeats allowed) the content."""
        ...

    def free(self) -> None:
        """Give up whatever is not memory."""
        ...


class AnyPass(Protocol):
    """Runs new tokens through the model."""

    device: torch.device
    shares: bool
    """Whether spans of several requests go through together, prompts in pieces, and holders are `kv.Holder`s."""

    def open(self) -> AnyHolder:
        """The empty holder of a new request."""
        ...

    def run_spans(self, spans: Sequence[tuple[AnyHolder, Tensor, int, AdapterWeights | None]]) -> list[Tensor]:
        """(holder, tokens int64 [rows, n], keep, adapter) -> logits float32 [rows, keep, V] of each."""
        ...
