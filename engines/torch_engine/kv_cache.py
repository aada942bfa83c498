"""The attention cache of a batch whose rows have different lengths, on top of transformers' own cache classes.

Rows are left-padded to one length; growing writes in place, and rows can be joined, chosen and dropped. Models whose
cache is more than plain full attention (sliding windows, recurrent states) keep the cache that transformers makes
for them, and cannot be joined. Not responsible for running the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, DynamicLayer

_HEADROOM = 64
"""Positions to grow by at least when a buffer is full; growing by a share of the length keeps copies rare."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped here
    """A full-attention layer whose keys and values [rows, heads, length, width] are views of larger buffers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append states and return all of them; copies only when the buffers are full."""
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < stop:
            self._grow(key_states, value_states, start, stop)
        assert self._buffers is not None
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = states
        self._show(stop)
        return self.keys, self.values

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Replace the content: [rows, heads, length, width] each."""
        self.device = keys.device
        self.is_initialized = True
        self._buffers = (keys, values)
        self._show(keys.shape[-2])

    def keep_first(self, length: int) -> None:
        """Forget what was appended behind `length` (a pass that failed half-way)."""
        if self._buffers is not None and self.get_seq_length() > length:
            self._show(length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the rows `beam_idx` (repeats allowed) the content."""
        if self.is_initialized:
            index = beam_idx.to(self.keys.device)
            self.hold(self.keys.index_select(0, index), self.values.index_select(0, index))

    def _show(self, length: int) -> None:
        assert self._buffers is not None
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def _grow(self, key_states: Tensor, value_states: Tensor, start: int, stop: int) -> None:
        capacity = stop + max(_HEADROOM, stop // 4)
        grown = []
        for old, states in zip((self.keys, self.values), (key_states, value_states), strict=True):
            rows, heads, _, width = states.shape
            buffer = states.new_empty(rows, heads, capacity, width)
            if start:
                buffer[:, :, :start] = old
            grown.append(buffer)
        self.device = key_states.device
        self.is_initialized = True
        self._buffers = (grown[0], grown[1])


def is_plain(model: Any) -> bool:
    """Whether the model's cache is full attention in every layer, so that rows of different requests can be joined."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


class RowCache:
    """A transformers cache together with how many positions of each row are left padding.

    `length` counts positions including padding; row i holds `length - pads[i]` real ones.
    """

    def __init__(self, cache: Cache | None, pads: Sequence[int], length: int) -> None:
        self.cache = cache
        self.pads = list(pads)
        self.length = length

    @classmethod
    def empty(cls, *, plain: bool) -> RowCache:
        """The cache of one row before its prompt; `cache` None lets the model make its own kind."""
        return cls(Cache(layer_class_to_replicate=GrowingLayer) if plain else None, [0], 0)

    def part(self, rows: Sequence[int]) -> RowCache:
        """A copy of some rows of a plain cache."""
        index = torch.tensor(list(rows))
        cache = Cache(layer_class_to_replicate=GrowingLayer)
        for layer in self._layers():
            copy = GrowingLayer()
            copy.hold(layer.keys[index], layer.values[index])
            cache.layers.append(copy)
        result = RowCache(cache, [self.pads[row] for row in rows], self.length)
        result.select(range(len(rows)))
        return result

    def select(self, rows: Sequence[int]) -> None:
        """Make `rows` (repeats allowed) the content, and drop columns that are padding in all of them."""
        assert self.cache is not None
        if list(rows) != list(range(len(self.pads))):
            self.cache.reorder_cache(torch.tensor(list(rows)))
            self.pads = [self.pads[row] for row in rows]
        spare = min(self.pads)
        if spare:
            for layer in self._layers():
                layer.hold(layer.keys[:, :, spare:], layer.values[:, :, spare:])
            self.pads = [pad - spare for pad in self.pads]
            self.length -= spare

    def rollback(self, length: int) -> None:
        """Bring a plain cache back to `length` after a pass that failed half-way."""
        for layer in self._layers():
            layer.keep_first(length)
        self.length = length

    def mask(self, new: int, device: torch.device) -> Tensor | None:
        """Attention mask int64 [rows, length + new], 0 on padding; None when nothing is padded."""
        if not any(self.pads):
            return None
        columns = torch.arange(self.length + new, device=device)
        return (columns[None] >= torch.tensor(self.pads, device=device)[:, None]).long()

    def positions(self, new: int, device: torch.device) -> Tensor:
        """Position ids int64 [rows, new] of the next `new` tokens."""
        start = torch.tensor([self.length - pad for pad in self.pads], device=device)
        return start[:, None] + torch.arange(new, device=device)[None]

    @staticmethod
    def joined(parts: Sequence[RowCache]) -> RowCache:
        """One plain cache with the rows of all parts in order, left-padded to the longest."""
        if len(parts) == 1:
            return parts[0]
        length = max(part.length for part in parts)
        cache = Cache(layer_class_to_replicate=GrowingLayer)
        for layers in zip(*(part._layers() for part in parts), strict=True):
            merged = GrowingLayer()
            merged.hold(
                _padded([layer.keys for layer in layers], length), _padded([layer.values for layer in layers], length)
            )
            cache.layers.append(merged)
        return RowCache(cache, [length - part.length + pad for part in parts for pad in part.pads], length)

    def _layers(self) -> list[Any]:
        assert self.cache is not None
        return [layer for layer in self.cache.layers if isinstance(layer, GrowingLayer)]


def _padded(states: Sequence[Tensor], length: int) -> Tensor:
    """[rows_i, heads, length_i, width] each -> [sum of rows_i, heads, length, width], zeros on the left."""
    rows = sum(len(state) for state in states)
    _, heads, _, width = states[0].shape
    # Zeros and not bare memory: a masked score is dropped, but 0 * NaN in the values would not be.
    result = states[0].new_zeros(rows, heads, length, width)
    at = 0
    for state in states:
        result[at : at + len(state), :, length - state.shape[2] :] = state
        at += len(state)
    return result
