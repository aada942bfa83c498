"""Scores of prompt tokens: logprobs, top-k, chosen targets and alternative draws, gathered block by block.

Prompt scores are always plain (temperature 1); only the alternative draws use the request's temperature. Not
responsible for running the model: it is handed logits of a few rows at a time, so that a long prompt never holds
[length, vocabulary] at once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engines.sampling.sampling_rules import tempered_logprobs
from schemas.operations import Sample, TopK


class PromptScores:
    """Collects what one request asks about its prompt of L tokens.

    Row p of the logits predicts token p + 1, so position 0 is never scored. `prompt_logprobs_last_n` limits logprobs
    and top-k to the last N positions; targets and alternatives cover all.
    """

    def __init__(self, request: Sample, draws: np.random.Generator) -> None:
        self._tokens = torch.from_numpy(np.ascontiguousarray(request.prompt))
        self._temperature = request.params.temperature
        self._draws = draws
        length = len(request.prompt)
        self._first_scored = 1
        if request.prompt_logprobs_last_n is not None:
            self._first_scored = length - request.prompt_logprobs_last_n
        k = request.topk_prompt_logprobs
        # Whoever asks for top-k gets the tokens' own logprobs as well.
        self.logprobs = np.full(length, np.nan, np.float32) if request.prompt_logprobs or k else None
        self.topk = empty_topk(length, k) if k else None
        self._targets = request.target_prompt_logprobs
        self.targets = None if self._targets is None else np.zeros(self._targets.shape, np.float32)
        self.alternatives = None
        if request.prompt_alt_tokens_k:
            self.alternatives = empty_topk(length - 1, request.prompt_alt_tokens_k)

    @property
    def first_row(self) -> int:
        """The first logits row that is needed; L - 1 (the row that predicts the first new token) if none before."""
        last = len(self._tokens) - 1
        if self.targets is not None or self.alternatives is not None:
            return 0
        if self.logprobs is not None:
            return min(self._first_scored - 1, last)
        return last

    def add(self, first: int, logits: Tensor) -> None:
        """Take the logits [n, V] of rows `first` and after; the row behind the last prompt token is skipped."""
        count = min(len(logits), len(self._tokens) - 1 - first)
        if count <= 0:
            return
        plain = torch.log_softmax(logits[:count].float(), dim=-1)
        where = slice(first + 1, first + 1 + count)
        skip = max(self._first_scored - where.start, 0)
        if skip < count:
            self._add_scores(plain[skip:], slice(where.start + skip, where.stop))
        if self._targets is not None and self.targets is not None:
            asked = torch.from_numpy(np.ascontiguousarray(self._targets[first : first + count])).to(plain.device)
            scores = plain.gather(-1, asked.clamp(min=0)).masked_fill(asked < 0, 0.0)
            self.targets[first : first + count] = scores.cpu().numpy()
        if self.alternatives is not None:
            self._add_alternatives(first, logits[:count])

    def _add_scores(self, plain: Tensor, where: slice) -> None:
        if self.logprobs is not None:
            own = self._tokens[where].to(plain.device)[:, None]
            self.logprobs[where] = plain.gather(-1, own)[:, 0].cpu().numpy()
        if self.topk is not None:
            values, ids = torch.topk(plain, self.topk.ids.shape[1], dim=-1)
            self.topk.ids[where] = ids.to(torch.int32).cpu().numpy()
            self.topk.logprobs[where] = values.cpu().numpy()

    def _add_alternatives(self, first: int, logits: Tensor) -> None:
        """k independent draws per row from log softmax(logits / T), no top-k or top-p; T = 0 repeats the likeliest."""
        assert self.alternatives is not None
        count, k = len(logits), self.alternatives.ids.shape[1]
        logprobs = tempered_logprobs(logits, [self._temperature] * count)
        if self._temperature > 0:
            cumulative = logprobs.double().exp().cumsum(-1)
            uniform = torch.from_numpy(self._draws.random((count, k))).to(cumulative.device)
            ids = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
            ids = ids.clamp(max=logits.shape[-1] - 1)
        else:
            ids = logprobs.argmax(-1, keepdim=True).expand(count, k)
        self.alternatives.ids[first : first + count] = ids.to(torch.int32).cpu().numpy()
        self.alternatives.logprobs[first : first + count] = logprobs.gather(-1, ids).cpu().numpy()


def empty_topk(length: int, k: int) -> TopK:
    """A top-k table [length, k] whose cells are all empty: id 0 and NaN."""
    return TopK(np.zeros((length, k), np.int32), np.full((length, k), np.nan, np.float32))
