"""Passes for models whose state is more than keys and values (recurrent layers, other caches): one request at a time.

The state is the cache that transformers makes for the architecture. Not responsible for drawing.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engines.lora import AdapterWeights, Router
from engines.sampling.holders import AnyHolder
from schemas.errors import EngineFailure


class PlainHolder:
    """A transformers cache and the number of positions in it."""

    def __init__(self) -> None:
        self.cache: Any = None
        self.rows = 1
        self.length = 0

    @property
    def tokens(self) -> int:
        """Rows times positions."""
        return self.rows * self.length

    def needed(self, new: int) -> int:
        """See `AnyHolder.needed`."""
        return self.rows * (self.length + new)

    def select(self, rows: Sequence[int]) -> None:
        """See `AnyHolder.select`."""
        if list(rows) != list(range(self.rows)):
            self.cache.reorder_cache(torch.tensor(list(rows)))
        self.rows = len(rows)

    def free(self) -> None:
        """Nothing is kept outside of memory."""


class PlainPass:
    """A Hugging Face causal model with a `Router` attached, used for inference only."""

    shares = False

    def __init__(self, model: Any, router: Router) -> None:
        self._model = model
        self._router = router
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_keep = "logits_to_keep" in accepted
        self.device: torch.device = model.get_input_embeddings().weight.device

    def open(self) -> PlainHolder:
        """An empty holder."""
        return PlainHolder()

    def run_spans(self, spans: Sequence[tuple[AnyHolder, Tensor, int, AdapterWeights | None]]) -> list[Tensor]:
        """See `AnyPass.run_spans`. A failed span has spoilt its holder."""
        return [self._run(holder, tokens, keep, adapter) for holder, tokens, keep, adapter in spans]

    def _run(self, holder: AnyHolder, tokens: Tensor, keep: int, adapter: AdapterWeights | None) -> Tensor:
        assert isinstance(holder, PlainHolder)
        rows, new = tokens.shape
        arguments: dict[str, Any] = {"cache": holder.cache, "use_cache": True}
        if self._takes_positions:
            places = holder.length + torch.arange(new, device=self.device)
            arguments["position_ids"] = places.unsqueeze(0).expand(rows, -1)
        if self._takes_keep:
            arguments["logits_to_keep"] = max(1, keep)
        with self._router.use([(adapter, slice(0, rows))]):
            output = self._model(input_ids=tokens.to(self.device), **arguments)
        cache = getattr(output, "cache", None)
        if cache is None:
            raise EngineFailure(f"{type(self._model).__name__} keeps no cache, so it cannot be sampled")
        holder.cache = cache
        holder.length += new
        logits: Tensor = output.logits[:, output.logits.shape[1] - keep :]
        return logits.float()
