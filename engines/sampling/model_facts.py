"""What a sampler needs to know about its model, and which kind of pass the architecture allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engines.lora import LoraLinear, Router
from engines.sampling.holders import AnyPass
from engines.sampling.plain_pass import PlainPass
from engines.sampling.sampling_pass import SamplingPass
from engines.torch_engine.attention import can_pack, uses_interface
from engines.torch_engine.head import OutputHead
from engines.torch_engine.invariance import filling_for
from engines.torch_engine.loading import context_length, eos_token_ids
from engines.torch_engine.packing import Filling


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Vocabulary, context and end-of-sequence tokens."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, model: Any) -> ModelFacts:
        """Those of a Hugging Face causal model."""
        text = model.config.get_text_config()
        return cls(
            min(int(text.vocab_size), len(model.get_input_embeddings().weight)),
            context_length(model),
            eos_token_ids(model),
        )

    def passes(self, model: Any, router: Router) -> AnyPass:
        """Passes of many requests at once where everything that mixes positions is attention, else one at a time."""
        if not (uses_interface(model) and can_pack(model)) or _routes_adapters(model):
            return PlainPass(model, router)
        filling = Filling() if router.row_unit == 1 else filling_for(model, router.row_unit)
        # With some numbers of threads nothing suits; a few threads less are better than numbers that company changes.
        while not filling.suits():
            filling = replace(filling, threads=filling.threads - 1)
        shared = SamplingPass(model, router, OutputHead.of(model), filling)
        return shared if shared.fits() else PlainPass(model, router)


def _routes_adapters(model: Any) -> bool:
    """Whether single experts are adapted: they see regrouped rows, in which adapters cannot be told apart."""
    return any(isinstance(m, LoraLinear) and "experts" in name.split(".") for name, m in model.named_modules())
