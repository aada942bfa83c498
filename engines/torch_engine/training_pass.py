"""One pass of the base model over a pack of datums of many runs, forward and, where asked, backward.

Every datum has its own adapter, its own loss and its own place for its gradient; only the products with the frozen base
weights are shared. Not responsible for which datums make a pass, or for what their numbers are used for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.lora import AdapterWeights, Pairs, Router
from engines.torch_engine.attention import packed
from engines.torch_engine.faults import unexpected
from engines.torch_engine.head import OutputHead
from engines.torch_engine.memory_errors import is_out_of_memory
from engines.torch_engine.meter import Meter
from engines.torch_engine.operations import DatumLoss
from engines.torch_engine.packing import Filling, Pack, pack
from schemas.errors import TinsmithError
from schemas.operations import Int64


@dataclass(frozen=True, slots=True)
class PassItem:
    """One datum in a pass. `gradient` None = forward only."""

    tokens: Int64
    adapter: AdapterWeights
    loss: DatumLoss
    gradient: Pairs | None


@dataclass(eq=False, slots=True)
class TrainingPass:
    """How passes run on one model.

    Args:
        packs: whether several sequences may share a pass; else each `run` takes one item.
        filling: to how many rows packs are filled up.
        merge: whether neighbouring datums of one adapter share its small products (their sums then depend on the
            company; fewer kernels for a GPU).
    """

    model: Any
    router: Router
    head: OutputHead
    meter: Meter
    packs: bool = True
    filling: Filling = field(default_factory=Filling)
    merge: bool = False

    @property
    def device(self) -> torch.device:
        """Where the tokens go in."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def run(self, items: Sequence[PassItem], *, body: bool | None = None) -> list[Tensor | TinsmithError]:
        """Logprobs of each item's targets, float32 on the device, or its own error (a loss may raise anything);
        gradients are added into the items' own places.

        All items have a gradient, or none has. `body` says whether the pass goes back through the body (None: if an
        adapter among the items has something there). `meter.writing` tells whether gradients may have been written when
        something raises; what an item with an error has collected is of no use.
        """
        backward = items[0].gradient is not None
        geometry = pack([item.tokens for item in items], self.device, self.filling if self.packs else Filling())
        trains_body = backward and any(self.has_body(item.adapter) for item in items) if body is None else body
        segments, gradients = self._segments(items, geometry)
        with self._attention(geometry), self.router.use(segments, gradients if trains_body else None):
            with torch.set_grad_enabled(trains_body):
                hidden = self._hidden(geometry)
            self.meter.writing = backward
            upstream = torch.zeros_like(hidden, requires_grad=False) if trains_body else None
            results = [
                self._score(item, hidden.detach()[span], None if upstream is None else upstream[span])
                for item, span in zip(items, geometry.spans, strict=True)
            ]
            if upstream is not None:
                torch.autograd.backward([hidden], [upstream])
        self.meter.count(geometry, [item.loss.trained_rows for item in items], trains_body)
        return results

    def idle(self, body: bool) -> None:
        """A pass over nothing, forward and, with `body`, backward: for a rank that has no work where others have."""
        geometry = pack([np.zeros(1, np.int64)], self.device, self.filling if self.packs else Filling())
        nobody = [(None, slice(0, geometry.rows))]
        with self._attention(geometry), self.router.use(nobody, [{}] if body else None):
            with torch.set_grad_enabled(body):
                hidden = self._hidden(geometry)
            if body:
                torch.autograd.backward([hidden], [torch.zeros_like(hidden)])

    def _hidden(self, geometry: Pack) -> Tensor:
        """Hidden states [T, H] float32."""
        arguments = {"position_ids": geometry.positions} if self.packs else {}
        output = self.model.base_model(input_ids=geometry.tokens, use_cache=False, **arguments)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden.float()

    def _score(self, item: PassItem, hidden: Tensor, upstream: Tensor | None) -> Tensor | TinsmithError:
        """Logprobs of one datum; d loss / d hidden goes into `upstream` [N, H]."""
        began = time.perf_counter()
        targets = item.loss.inputs["target_tokens"]
        try:
            with torch.no_grad():
                if item.gradient is None:
                    return self.head.logprobs(hidden, targets, item.adapter)
                lp, gradient = self.head.logprobs_and_gradient(hidden, targets, item.adapter, item.gradient, item.loss)
                # A diverged datum must not spread: its operation fails, whatever its gradient would be.
                if upstream is not None and bool(torch.isfinite(lp).all()):
                    upstream.copy_(gradient)
                return lp
        except TinsmithError as error:
            return error
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return unexpected(error, "the loss of a datum")
        finally:
            self.meter.add("head", time.perf_counter() - began)

    def _segments(
        self, items: Sequence[PassItem], geometry: Pack
    ) -> tuple[list[tuple[AdapterWeights | None, slice]], list[Pairs]]:
        segments: list[tuple[AdapterWeights | None, slice]] = []
        gradients: list[Pairs] = []
        for item, span in zip(items, geometry.spans, strict=True):
            own = item.gradient or {}
            if self.merge and segments and segments[-1][0] is item.adapter and gradients[-1] is own:
                segments[-1] = (item.adapter, slice(segments[-1][1].start, span.stop))
                continue
            segments.append((item.adapter, span))
            gradients.append(own)
        if geometry.spans[-1].stop < geometry.rows:
            segments.append((None, slice(geometry.spans[-1].stop, geometry.rows)))
            gradients.append({})
        return segments, gradients

    def _attention(self, geometry: Pack) -> AbstractContextManager[None]:
        return packed(self.model, geometry) if self.packs else nullcontext()

    def has_body(self, adapter: AdapterWeights) -> bool:
        """Whether an adapter covers more than the output head."""
        return any(name != self.head.linear.name for name in adapter.pairs)
