"""Inside vLLM: what its logprobs need in order to mean the tempered distribution before top-k and top-p.

vLLM reports either plain logprobs or those after the cut by top-k and top-p. This logits processor changes nothing; it
looks at the whole row of logits before any cut and notes one number, from which the worker computes the logprob of any
token at the row's temperature (`messages.RowTurn.offsets`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

ARGUMENT = "tempered_row"
"""Of `SamplingParams.extra_args`: the key of a row that wants its offsets."""


class TemperingNotes(LogitsProcessor):  # type: ignore[misc]
    """Notes offsets. vLLM makes one of it, in the process that asked (`host.py`), and steps it in the same thread."""

    noted: ClassVar[list[tuple[list[tuple[str, int]], torch.Tensor]]] = []
    """Since `take`: (key of the row, place of the token) of some rows, and their offsets as a tensor on the device."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[str, float, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """False means: asked before the temperature is applied, in every step."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """See vLLM: rows enter, leave and move."""
        process_dict_updates(self._rows, batch_update, _of_row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Note the offsets of the rows that asked; `logits` float32 [rows, V] are returned as they are."""
        if self._rows:
            places = sorted(self._rows)
            asked = [self._rows[place] for place in places]
            picked = logits[torch.tensor(places, device=logits.device)].float()
            scale = torch.tensor([temperature for _, temperature, _ in asked], device=logits.device)
            plain = torch.logsumexp(picked, -1)
            tempered = torch.logsumexp(picked / scale[:, None], -1)
            # A prompt that is read in pieces comes by more than once with no token drawn: the last time counts.
            self.noted.append(([(key, len(drawn)) for key, _, drawn in asked], plain / scale - tempered))
        return logits

    @classmethod
    def take(cls) -> dict[str, dict[int, float]]:
        """Row key -> place of the token -> offset, since the last call."""
        found: dict[str, dict[int, float]] = {}
        for rows, offsets in cls.noted:
            for (key, place), offset in zip(rows, offsets.tolist(), strict=True):
                found.setdefault(key, {})[place] = offset
        cls.noted.clear()
        return found


def _of_row(params: Any, prompt: list[int] | None, drawn: list[int]) -> tuple[str, float, list[int]] | None:
    """What is kept of a row; `drawn` is vLLM's own list, which grows."""
    key = (params.extra_args or {}).get(ARGUMENT)
    return None if key is None else (key, float(params.temperature), drawn)
