"""From a loaded base model to one that trains: adapters attached, passes set up, and judged on this machine.

Not responsible for reading the model (`loading.py`) or for running anything later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engines.lora import AdapterWeights, LoraLinear, Router
from engines.lora_targets import FAMILIES, attach, available_families, init_adapter
from engines.torch_engine.attention import can_pack
from engines.torch_engine.head import OutputHead
from engines.torch_engine.invariance import arrange_rows, filling_for, judge
from engines.torch_engine.loading import check_head, describe, freeze
from engines.torch_engine.meter import Meter, product_parameters
from engines.torch_engine.packing import Filling
from engines.torch_engine.precision import weights_dtype
from engines.torch_engine.training_pass import TrainingPass
from schemas.base_model_info import BaseModelInfo
from schemas.operations import LoraSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembly:
    """A base model that is ready for passes."""

    router: Router
    head: OutputHead
    run: TrainingPass
    info: BaseModelInfo


def assemble(
    model: Any, *, batch_invariant: bool, whole: Callable[[Tensor], Tensor] = lambda weight: weight
) -> Assembly:
    """Freeze and wrap the model in place, and find out how its passes may be shared.

    `batch_invariant` asks for numbers that do not depend on company; it is kept in float32 on the CPU. `whole` gives
    all rows of a weight that is sharded. Raises `Unavailable` for a model whose logits are not understood.
    """
    freeze(model)
    router = attach(model)
    head = OutputHead.of(model)
    check_head(model, head)
    info = describe(model, head)
    head_weight: Tensor = model.get_output_embeddings().weight
    meter = Meter(router, product_parameters(model, head_weight), head_weight.numel())
    run = TrainingPass(model, router, head, meter, packs=can_pack(model), merge=not batch_invariant)
    cpu = run.device.type == "cpu"
    exact = batch_invariant and cpu and weights_dtype(model) == torch.float32
    router.row_unit = router.least_rows = 1
    if run.packs and batch_invariant and cpu:
        _align(run, model, exact, whole)
    if run.packs:
        right, same = judge(run, _probe(model), info.vocab_size)
        run.packs = right and (same or not exact)
        if right and not run.packs:
            _log.warning("packed passes change low bits here; batch_invariant lets one sequence at a time through")
    if not exact:  # what is judged above has to be free of rounding; after that blocks would only be slower
        router.row_block, router.row_unit, router.least_rows = None, 1, 1
        run.filling = Filling()
    meter.take()
    return Assembly(router, head, run, replace(info, packed=run.packs, batch_invariant=exact))


def _align(run: TrainingPass, model: Any, exact: bool, whole: Callable[[Tensor], Tensor]) -> None:
    """Fill packs up, and choose blocks of rows, so that kernels treat every row alike."""
    linears = [m for m in model.modules() if isinstance(m, LoraLinear) and m is not run.head.linear]
    distinct = {tuple(linear.weight.shape): linear.weight for linear in linears}
    head = whole(model.get_output_embeddings().weight)
    arrange_rows(run.router, [whole(weight) for weight in distinct.values()], head)
    filling = filling_for(model, run.router.row_unit)
    if filling.suits():
        run.filling = filling
    elif exact:
        run.packs = False  # one sequence at a time trains; samples use fewer threads (`sampling_pass.py`)


def _probe(model: nn.Module) -> AdapterWeights:
    """An adapter on everything, whose B is not zero."""
    families = available_families(model)
    spec = LoraSpec(rank=2, seed=0, **{f"train_{family}": family in families for family in FAMILIES})
    weights = init_adapter(model, spec)
    generator = torch.Generator().manual_seed(0)
    for _, up in weights.pairs.values():
        up.copy_(torch.randn(up.shape, generator=generator) * 0.02)
    return weights
