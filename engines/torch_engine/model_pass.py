"""One forward pass of a causal language model with a row cache: tokens in, logits of the last positions out.

Hides what differs between architectures (position ids, partial logits, cache kinds). Not responsible for drawing.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engines.lora import AdapterWeights, LoraLinear, Router, Segments
from engines.torch_engine.kv_cache import RowCache, is_plain
from schemas.errors import EngineFailure, OutOfMemory, TinsmithError

_UNBOUNDED_CONTEXT = 1 << 20
"""Context of architectures without a maximum: a bound must exist, for memory's sake (as in `loading.describe`)."""


class ModelPass:
    """A Hugging Face causal model with a `Router` attached, used for inference only.

    `plain`: rows of different requests may share a cache; `mixes_adapters`: rows of different adapters a pass.
    """

    def __init__(self, model: Any, router: Router) -> None:
        self._model = model
        self._router = router
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_keep = "logits_to_keep" in accepted
        text = model.config.get_text_config()
        self.vocab_size = min(int(text.vocab_size), len(model.get_input_embeddings().weight))
        self.context_length = int(getattr(text, "max_position_embeddings", None) or _UNBOUNDED_CONTEXT)
        self.eos_token_ids = _eos(model, text)
        self.device: torch.device = next(model.parameters()).device
        self.plain = is_plain(model)
        # Layers of single experts see regrouped tokens, where rows of several adapters cannot be told apart.
        self.mixes_adapters = not any(
            isinstance(module, LoraLinear) and "experts" in name.split(".") for name, module in model.named_modules()
        )

    def run(self, tokens: Tensor, cache: RowCache, segments: Segments, keep: int) -> Tensor:
        """Append int64 `tokens` [rows, n] to the cache; returns logits [rows, keep, V] of the last `keep` positions.

        A pass that raises leaves a plain cache as it was.
        """
        tokens = tokens.to(self.device)
        new, before = tokens.shape[1], cache.length
        arguments: dict[str, Any] = {"cache": cache.cache, "use_cache": True}
        arguments["attention_mask"] = cache.mask(new, self.device)
        if self._takes_positions:
            arguments["position_ids"] = cache.positions(new, self.device)
        if self._takes_keep:
            arguments["logits_to_keep"] = keep
        try:
            with self._router.use(segments):
                output = self._model(input_ids=tokens, **arguments)
        except Exception:
            if self.plain:
                cache.rollback(before)
            raise
        if output.cache is None:
            raise EngineFailure(f"{type(self._model).__name__} keeps no cache, so it cannot be sampled")
        cache.cache = output.cache
        cache.length = before + new
        logits: Tensor = output.logits[:, -keep:]
        return logits


def _eos(model: Any, text_config: Any) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config's if it names any, else the model config's."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    return tuple(int(token) for token in eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),)


def segments_of(adapters: Sequence[AdapterWeights | None]) -> Segments:
    """Runs of rows with the same adapter, as the router wants them."""
    segments: list[tuple[AdapterWeights | None, slice]] = []
    for row, adapter in enumerate(adapters):
        if segments and segments[-1][0] is adapter:
            segments[-1] = (adapter, slice(segments[-1][1].start, row + 1))
        else:
            segments.append((adapter, slice(row, row + 1)))
    return segments


def as_failure(error: Exception) -> TinsmithError:
    """What a client may be told about an exception of a pass."""
    if isinstance(error, TinsmithError):
        return error
    out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    if out_of_memory:
        return OutOfMemory(
            "sampling this request needs more memory than the device has",
            hint="shorten the prompt, or lower max_tokens or num_samples",
        )
    return EngineFailure(f"sampling failed inside the engine ({type(error).__name__})")
