"""What a sampler needs to know about its model, and which kind of pass the architecture allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engines.lora import LoraLinear, Router
from engines.sampling.holders import AnyPass
from engines.sampling.plain_pass import PlainPass
from engines.sampling.sampling_pass import SamplingPass
from engines.torch_engine.attention import can_pack
from engines.torch_engine.head import OutputHead
from engines.torch_engine.invariance import filling_for
from engines.torch_engine.packing import Filling

_PROBED_ROWS = 2048
_UNBOUNDED_CONTEXT = 1 << 20
"""Context of architectures without a maximum: a bound must exist, for memory's sake (as in `loading.describe`)."""


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
            int(getattr(text, "max_position_embeddings", None) or _UNBOUNDED_CONTEXT),
            _eos(model, text),
        )

    def passes(self, model: Any, router: Router) -> AnyPass:
        """Passes of many requests at once where everything that mixes positions is attention, else one at a time."""
        if not can_pack(model) or _routes_adapters(model):
            return PlainPass(model, router)
        filling = Filling() if router.row_unit == 1 else filling_for(model, router.row_unit)
        if not filling.suits(_PROBED_ROWS):
            filling = Filling(router.row_unit)
        shared = SamplingPass(model, router, OutputHead.of(model), filling)
        return shared if shared.fits() else PlainPass(model, router)


def _routes_adapters(model: Any) -> bool:
    """Whether single experts are adapted: they see regrouped rows, in which adapters cannot be told apart."""
    return any(isinstance(m, LoraLinear) and "experts" in name.split(".") for name, m in model.named_modules())


def _eos(model: Any, text_config: Any) -> tuple[int, ...]:
    """End-of-sequence ids: the generation config's if it names any, else the model config's."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    return tuple(int(token) for token in eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),)
