"""Log-probabilities of targets from hidden states, without ever holding the tokens x vocabulary matrix.

Rows go through the output head in chunks that are computed again in the backward pass. The head's own adapter applies,
as do the scalings that some architectures put on their logits. Not responsible for losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schemas.errors import Unavailable

_CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}
"""Logits held at a time (float32: 32 MiB on the CPU, 512 MiB on a GPU); at least one row."""


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The head of a causal language model. `scale` and `softcap` are the architecture's (1 and None for most)."""

    linear: nn.Module
    vocab_size: int
    scale: float = 1.0
    softcap: float | None = None
    chunk_rows: int | None = None
    """Rows per chunk; None = by a budget of memory for the device."""

    @classmethod
    def of(cls, model: Any) -> OutputHead:
        """The head of a Hugging Face model, with the logit scalings that its configuration names."""
        linear = model.get_output_embeddings()
        if linear is None:
            raise Unavailable("the base model has no output head; a causal language model is needed")
        config = model.config.get_text_config()
        scale = 1.0
        for key, inverse in (("logit_scale", False), ("lm_head_multiplier", False), ("logits_scaling", True)):
            value = getattr(config, key, None)
            if value is not None:
                scale *= 1.0 / float(value) if inverse else float(value)
        return cls(linear, int(linear.weight.shape[0]), scale, getattr(config, "final_logit_softcapping", None))

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [rows, vocab] of hidden states [rows, H]."""
        logits = cast(Tensor, self.linear(hidden)).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def target_logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Float32 logprobs of `targets` (int64 [N] or [N, K], ids within the vocabulary) after hidden states [N, H].

        The whole distribution is normalised: log softmax at temperature 1 in float32. The backward pass runs the
        head again, so it must happen under the same choice of adapters.
        """
        budget = _CHUNK_ELEMENTS.get(hidden.device.type, _CHUNK_ELEMENTS["cpu"])
        rows = self.chunk_rows or max(1, budget // self.vocab_size)
        columns = targets if targets.dim() == 2 else targets.unsqueeze(1)
        chunks: list[Tensor] = []
        for start in range(0, hidden.shape[0], rows):
            part, wanted = hidden[start : start + rows], columns[start : start + rows]
            if torch.is_grad_enabled():
                chunks.append(cast(Tensor, checkpoint(self._chunk, part, wanted, use_reentrant=False)))
            else:
                chunks.append(self._chunk(part, wanted))
        return torch.cat(chunks).view(targets.shape)

    def _chunk(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return torch.log_softmax(self.logits(hidden), dim=-1).gather(1, targets)
