"""The prefix cache: keys and values of the beginnings of prompts, in blocks, shared by requests of one domain.

A block's key is the digest of its domain, its adapter and all tokens up to its end, so nobody finds what another
project's prompt left. Not responsible for when a prompt may use it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from engines.sampling.kv import GROWTH, Holder
from schemas.operations import Int64

Block = dict[int, Tensor]


class PrefixCache:
    """Up to `max_tokens` tokens of prefixes, least recently used first out."""

    def __init__(self, max_tokens: int) -> None:
        self._most = max_tokens // GROWTH
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    @property
    def tokens(self) -> int:
        """What it holds."""
        return GROWTH * len(self._blocks)

    def fill(self, holder: Holder, prompt: Int64, usable: int, domain: str, adapter: str) -> int:
        """Put the longest known beginning of at most `usable` tokens into an empty holder; returns its length."""
        for key in _keys(prompt[:usable], domain, adapter):
            block = self._blocks.get(key)
            if block is None:
                break
            self._blocks.move_to_end(key)
            holder.append_block(block)
        return holder.length

    def keep(self, holder: Holder, prompt: Int64, domain: str, adapter: str) -> None:
        """Take copies of the full blocks of a prompt that a holder of one row has read."""
        for index, key in enumerate(_keys(prompt[: holder.length], domain, adapter)):
            if key in self._blocks:
                self._blocks.move_to_end(key)
            elif self._most:
                self.drop(len(self._blocks) + 1 - self._most)
                self._blocks[key] = holder.block(index * GROWTH)

    def drop(self, blocks: int) -> None:
        """Forget that many blocks, the longest unused first."""
        for _ in range(min(blocks, len(self._blocks))):
            self._blocks.popitem(last=False)


def _keys(tokens: Int64, domain: str, adapter: str) -> Iterator[bytes]:
    """One key per full block, each of everything up to its end."""
    digest = hashlib.sha256(f"{len(domain)}:{domain}{adapter}\0".encode())
    for start in range(0, len(tokens) - GROWTH + 1, GROWTH):
        digest.update(np.ascontiguousarray(tokens[start : start + GROWTH], dtype="<i8").tobytes())
        yield digest.digest()
