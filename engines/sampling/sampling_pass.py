"""One pass of the base model over new tokens of many requests: pieces of prompts and rows that draw, side by side.

All new tokens lie behind one another in one row, as in training; each request attends to its own keys and values. On
the CPU in float32 a token's numbers do not depend on what else is in the pass: products run over multiples of
`Router.row_unit` rows, and attention runs per request on a grid of its own positions. Not responsible for which
requests take part.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from engines.lora import AdapterWeights, Router, Segments
from engines.sampling.holders import AnyHolder
from engines.sampling.kv import GROWTH, Holder
from engines.torch_engine.attention import attended, attending, capped_attention, check_known, sequences, visible
from engines.torch_engine.head import OutputHead
from engines.torch_engine.packing import Filling
from schemas.errors import EngineFailure

_log = logging.getLogger(__name__)

_NAME = "tinsmith_sampling"


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens int64 [rows, n] of one holder; logits of the last `keep` positions of each row are wanted."""

    holder: Holder
    tokens: Tensor
    keep: int
    adapter: AdapterWeights | None

    @property
    def count(self) -> int:
        """rows * n."""
        return self.tokens.numel()


@dataclass(frozen=True, slots=True)
class _Spans:
    """The spans of a pass, and where each begins."""

    parts: Sequence[tuple[Span, int]]


class SamplingPass:
    """Runs spans on one model whose attention goes through the interface (`torch_engine.attention.can_pack`)."""

    shares = True

    def __init__(self, model: Any, router: Router, head: OutputHead, filling: Filling) -> None:
        self._model = model
        self._router = router
        self._head = head
        self._filling = filling
        self._threads = filling.threads if filling.widths else None
        self.device: torch.device = model.get_input_embeddings().weight.device

    def open(self) -> Holder:
        """An empty holder."""
        return Holder()

    def fits(self) -> bool:
        """Whether this model's attention can be computed here: tried out with a prompt of two tokens."""
        try:
            with torch.inference_mode():
                self.run([Span(self.open(), torch.zeros(1, 2, dtype=torch.int64), 1, None)])
        except (EngineFailure, RuntimeError, TypeError) as error:
            _log.warning("%s is sampled one request at a time: %s", type(self._model).__name__, error)
            return False
        return True

    def run_spans(self, spans: Sequence[tuple[AnyHolder, Tensor, int, AdapterWeights | None]]) -> list[Tensor]:
        """See `AnyPass.run_spans`."""
        return self.run([Span(cast(Holder, holder), tokens, keep, adapter) for holder, tokens, keep, adapter in spans])

    def run(self, spans: Sequence[Span]) -> list[Tensor]:
        """Append the tokens to their holders; returns logits float32 [rows, keep, V] per span.

        What raises has changed nothing that counts: the same spans can be run again.
        """
        starts, total = [], 0
        for span in spans:
            starts.append(total)
            total += span.count
        filling = self._filling.rows(total) - total
        tokens = torch.cat([*(span.tokens.reshape(-1) for span in spans), torch.zeros(filling, dtype=torch.int64)])
        places = [_places(span) for span in spans]
        positions = torch.cat([*places, torch.zeros(filling, dtype=torch.int64)])
        segments = _segments([(span.adapter, span.count) for span in spans], filling)
        with _at_most(self._threads):
            return self._computed(spans, starts, tokens, positions, segments)

    def _computed(
        self, spans: Sequence[Span], starts: Sequence[int], tokens: Tensor, positions: Tensor, segments: Segments
    ) -> list[Tensor]:
        over = _Spans(list(zip(spans, starts, strict=True)))
        with attending(self._model, _NAME, over), self._router.use(segments):
            hidden = self._model.base_model(
                input_ids=tokens.to(self.device).unsqueeze(0),
                position_ids=positions.to(self.device).unsqueeze(0),
                use_cache=False,
            ).last_hidden_state[0]
        logits = self._logits(spans, starts, hidden)
        for span in spans:
            span.holder.advance(span.tokens.shape[1])
        return logits

    def _logits(self, spans: Sequence[Span], starts: Sequence[int], hidden: Tensor) -> list[Tensor]:
        rows, counts = [], []
        for span, start in zip(spans, starts, strict=True):
            sequences, length = span.tokens.shape
            index = torch.arange(sequences)[:, None] * length + torch.arange(length - span.keep, length)[None]
            rows.append((start + index).reshape(-1))
            counts.append((span.adapter, sequences * span.keep))
        wanted = torch.cat(rows)
        if not len(wanted):
            return [hidden.new_empty(len(span.tokens), 0, self._head.vocab_size) for span in spans]
        filling = -len(wanted) % self._filling.multiple
        chosen = functional.pad(hidden.index_select(0, wanted.to(hidden.device)), (0, 0, 0, filling))
        with self._router.use(_segments(counts, filling)):
            logits = self._head.logits(chosen)
        parts = torch.split(logits[: len(wanted)], [count for _, count in counts])
        # The width is named: beside rows that draw there may be a piece of a prompt of which no logits are wanted.
        return [part.view(len(span.tokens), span.keep, part.shape[1]) for span, part in zip(spans, parts, strict=True)]


@contextmanager
def _at_most(threads: int | None) -> Iterator[None]:
    """No more threads than these inside (None: as many as there are)."""
    former = torch.get_num_threads()
    if threads is None or threads >= former:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def _places(span: Span) -> Tensor:
    rows, length = span.tokens.shape
    return (span.holder.length + torch.arange(length)).repeat(rows)


def _segments(parts: Sequence[tuple[AdapterWeights | None, int]], filling: int) -> Segments:
    """Neighbours with one adapter make one segment; the rows that only fill the pass have none."""
    segments: list[tuple[AdapterWeights | None, slice]] = []
    start = 0
    for adapter, count in [*parts, (None, filling)]:
        if not count:
            continue
        if segments and segments[-1][0] is adapter:
            segments[-1] = (adapter, slice(segments[-1][1].start, start + count))
        else:
            segments.append((adapter, slice(start, start + count)))
        start += count
    return segments


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv_heads, T, d] -> ([1, T, heads, d], None), as the interface wants."""
    spans = attended(module)
    if not isinstance(spans, _Spans) or attention_mask is not None:
        raise EngineFailure("attention of samples outside of a pass of samples")
    check_known(unused)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    # The rows behind the last span fill the pass; what they compute is nobody's.
    output = query.new_zeros(query.shape[2], query.shape[1], value.shape[3])
    rowwise, both = query[0].transpose(0, 1), None
    for span, start in spans.parts:
        rows, length = span.tokens.shape
        if length == 1 and softcap is None and (sliding_window is None or span.holder.length < sliding_window):
            both = torch.stack((key[0], value[0])).transpose(1, 2) if both is None else both
            own = slice(start, start + rows)
            keys, values = span.holder.append(layer, both[:, own])
            output[own] = _one(rowwise[own], keys, values, scaling)
            continue
        q, k, v = (sequences(tensor, start, rows, length) for tensor in (query, key, value))
        keys, values = span.holder.write(layer, k, v)
        out = _causal(q, keys, values, scaling, softcap, sliding_window)
        output[start : start + span.count] = out.transpose(1, 2).reshape(span.count, *output.shape[1:])
    return output.unsqueeze(0), None


def _one(q: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """Attention of the last position, q [rows, heads, d], to all [rows, kv_heads, L, d]: [rows, heads, d].

    Nothing is hidden from it, so heads that share keys are as good as positions of one head: one small product each.
    """
    rows, heads, width = q.shape
    grouped = q.reshape(rows, keys.shape[1], heads // keys.shape[1], width)
    out = functional.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
    return out.reshape(rows, heads, values.shape[3])


def _causal(
    q: Tensor, keys: Tensor, values: Tensor, scaling: float | None, softcap: float | None, window: int | None
) -> Tensor:
    """Attention of the last n positions to all [rows, kv_heads, L, d], in pieces on the grid of positions.

    A kernel splits its rows in a way that depends on how many there are; on the grid that is the same however a prompt
    was cut into passes, and whatever of it was found in the prefix cache.
    """
    total, length = keys.shape[2], q.shape[2]
    first = total - length
    borders = [first, *range((first // GROWTH + 1) * GROWTH, total, GROWTH), total]
    shared = q.shape[1] != keys.shape[1]
    pieces = []
    for start, stop in pairwise(borders):
        part, seen_keys, seen_values = q[:, :, start - first : stop - first], keys[:, :, :stop], values[:, :, :stop]
        if stop - start == 1 and softcap is None and (window is None or stop <= window):
            pieces.append(_one(part[:, :, 0], seen_keys, seen_values, scaling).unsqueeze(2))
            continue
        mask = visible(stop, window, q.device, start)
        if softcap is not None:
            pieces.append(capped_attention(part, seen_keys, seen_values, mask, scaling, softcap))
        else:
            pieces.append(
                functional.scaled_dot_product_attention(
                    part, seen_keys, seen_values, attn_mask=mask, scale=scaling, enable_gqa=shared
                )
            )
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


AttentionInterface.register(_NAME, attend)
