"""How a token is drawn from logits: temperature, top-k, top-p and reproducible random streams.

Pure functions over tensors. Not responsible for when to stop (`stops`) or for running the model (`generation`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

LogprobKind = Literal["tempered", "plain"]
"""Which distribution the logprobs of sampled tokens come from: of `logits / T`, or of the bare logits."""

_FIRST_CANDIDATES = 64
"""How many of the likeliest tokens are looked at first; 16 times as many where those do not settle a draw."""


@dataclass(frozen=True, slots=True)
class DrawRule:
    """How one row is drawn. `temperature` 0 = greedy; `top_k` -1 or 0 = off; `top_p` 1 = off."""

    temperature: float
    top_k: int
    top_p: float

    @property
    def filtered(self) -> bool:
        """Whether only part of the vocabulary may be drawn."""
        return self.top_k > 0 or self.top_p < 1.0


def stream(seed: int, label: int | str) -> np.random.Generator:
    """The random stream `label` (a sample's index) of a seed: the same everywhere, distinct for every pair.

    All 256 bits of sha256("seed:label") seed a PCG64, so a seed of any size counts in full (torch's CPU generator
    would keep 32 bits of it).
    """
    digest = hashlib.sha256(f"{seed}:{label}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


def tempered_logprobs(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """log softmax(logits / T) over the whole vocabulary, before top-k and top-p; T = 0 is taken at T = 1.

    Args:
        logits: [rows, V], any float dtype.
        temperatures: one per row.

    Returns float32 [rows, V].
    """
    scale = torch.tensor([t if t > 0 else 1.0 for t in temperatures], dtype=torch.float32, device=logits.device)
    return torch.log_softmax(logits.float() / scale[:, None], dim=-1)


def draw(logprobs: Tensor, rules: Sequence[DrawRule], uniforms: Sequence[float]) -> list[int]:
    """One token per row, by inverting the cumulative distribution at one uniform number per row.

    Args:
        logprobs: float32 [rows, V], tempered (`tempered_logprobs`).
        rules: one per row. Order as in Hugging Face's samplers: top-k, then top-p over what is left (renormalised).
        uniforms: one number in [0, 1) per row; greedy rows ignore theirs.

    One number per token (and not one per vocabulary entry) keeps a stream in step whatever else is in the batch.
    """
    tokens = logprobs.argmax(dim=-1)
    position = torch.tensor(list(uniforms), dtype=torch.float64, device=logprobs.device)
    drawn = [i for i, rule in enumerate(rules) if rule.temperature > 0 and not rule.filtered]
    if drawn:
        rows = torch.tensor(drawn, device=logprobs.device)
        # Not `exp`: that takes the last elements of a tensor by another formula, so it would see who else is drawn.
        tokens[rows] = _invert(torch.softmax(logprobs[rows], -1), position[rows])
    filtered = [i for i, rule in enumerate(rules) if rule.temperature > 0 and rule.filtered]
    if filtered:
        rows = torch.tensor(filtered, device=logprobs.device)
        tokens[rows] = _draw_filtered(logprobs[rows], [rules[i] for i in filtered], position[rows])
    return [int(token) for token in tokens.tolist()]


def _draw_filtered(
    logprobs: Tensor, rules: Sequence[DrawRule], position: Tensor, candidates: int = _FIRST_CANDIDATES
) -> Tensor:
    """Top-k and top-p on the likeliest tokens; rows that need more of them are done again with more.

    The token does not depend on how many were looked at: a row is done only if everything as likely as the least likely
    token that may be drawn is among them, and sums run from the likeliest on.
    """
    vocabulary = logprobs.shape[-1]
    width = min(vocabulary, candidates)
    limits = [min(rule.top_k, vocabulary) if rule.top_k > 0 else vocabulary for rule in rules]
    open_ended = torch.tensor([rule.top_k <= 0 for rule in rules], device=logprobs.device)[:, None]
    limit = torch.tensor(limits, device=logprobs.device)[:, None]
    nucleus = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=logprobs.device)[:, None]
    values, ids = _likeliest(logprobs, width)
    mass = values.double().exp().masked_fill(torch.arange(width, device=logprobs.device) >= limit, 0.0)
    cumulative = mass.cumsum(-1)
    # Without top-k the total is 1 by definition, so that a prefix of the order shows where the nucleus ends.
    wanted = nucleus * torch.where(open_ended, 1.0, cumulative[:, -1:])
    kept = mass.masked_fill(cumulative - mass >= wanted, 0.0)
    tokens = ids.gather(-1, _invert(kept, position)[:, None])[:, 0]
    if width == vocabulary:
        return tokens
    open_end = ((kept > 0) & (values == values[:, -1:])).any(-1, keepdim=True)
    more = open_end | (~open_ended & (limit > width))
    short = [i for i, bad in enumerate(more[:, 0].tolist()) if bad]
    if short:
        rows = torch.tensor(short, device=logprobs.device)
        tokens[rows] = _draw_filtered(logprobs[rows], [rules[i] for i in short], position[rows], 16 * candidates)
    return tokens


def _likeliest(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The greatest logprobs of each row with their tokens, [rows, count] each; equal ones in the order of tokens."""
    values, ids = torch.topk(logprobs, count, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _invert(mass: Tensor, position: Tensor) -> Tensor:
    """The first index whose cumulative mass exceeds `position` of the total: int64 [rows]; mass is [rows, n] >= 0."""
    cumulative = mass.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(cumulative, position[:, None] * cumulative[:, -1:], right=True)[:, 0]
    behind = found >= mass.shape[-1]
    if bool(behind.any()):
        # Rounding may put the product on the total itself: the last entry with any mass is meant then.
        last = mass.shape[-1] - 1 - (mass.flip(-1) > 0).to(torch.int8).argmax(-1)
        found = torch.where(behind, last, found)
    return found
