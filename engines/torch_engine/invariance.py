"""Whether numbers depend on company: found out on this machine, with this model, when it is loaded.

In float32 on the CPU an operation's numbers must be the same bits whatever else shares its passes. Everything in a pass
runs per datum but the elementwise kernels (`packing.Filling`) and the products with base weights, judged here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.lora import AdapterWeights, LoraLinear, Pairs, views
from engines.losses import cross_entropy
from engines.torch_engine.operations import DatumLoss
from engines.torch_engine.packing import Filling
from engines.torch_engine.training_pass import PassItem, TrainingPass

_log = logging.getLogger(__name__)

ROW_UNIT = 16
"""Products of fewer rows sum in another order than those of many on some CPUs, and of other numbers on some threads."""
ROW_BLOCK = 64
_PROBED = (1, 2, 3, 8)
_LENGTHS = (21, 13)
_CLOSE = 1e-3


def choose_rows(weights: Iterable[Tensor]) -> tuple[int, int | None]:
    """(unit, block) for weights of distinct shapes: rows come in multiples of the unit; products run over all of them
    at once (block None) if this machine then gives each row the same bits whatever others there are, else over blocks
    of a fixed number of rows.
    """
    if all(_same_rows(weight, ROW_UNIT) and _same_rows(weight.t(), ROW_UNIT) for weight in weights):
        return ROW_UNIT, None
    return ROW_BLOCK, ROW_BLOCK


def filling_for(model: Any, unit: int) -> Filling:
    """To how many rows passes of this model are filled up: multiples of `unit` that suit the threads."""
    linears = [module for module in model.modules() if isinstance(module, LoraLinear)]
    # Activations that a formula is applied to go into a linear, or are rotary angles.
    widths = {linear.in_features for linear in linears}
    widths.add(int(getattr(model.config.get_text_config(), "head_dim", None) or 1))
    return Filling(unit, frozenset(widths), torch.get_num_threads())


def _same_rows(weight: Tensor, unit: int) -> bool:
    """Whether multiples of the unit, from anywhere in a large product, have the bits that they have in it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * unit * _PROBED[-1], weight.shape[0], generator=generator).to(weight)
    whole = torch.mm(x, weight)
    for start in (0, 1, unit, 5 * unit + 3):
        for count in _PROBED:
            rows = slice(start, start + count * unit)
            if not torch.equal(torch.mm(x[rows].clone(), weight), whole[rows]):
                return False
    return True


def judge(run: TrainingPass, weights: AdapterWeights, vocab_size: int) -> tuple[bool, bool]:
    """Two short datums alone, together, and without packing: (packing is right, packing gives the same bits).

    `weights` should be an adapter on everything, with a B that is not zero.
    """
    generator = np.random.default_rng(0)
    datums = [generator.integers(0, vocab_size, length + 1) for length in _LENGTHS]
    together = _compute(run, weights, datums)
    alone = [_compute(run, weights, [datum])[0] for datum in datums]
    run.packs = False
    try:
        native = [_compute(run, weights, [datum])[0] for datum in datums]
    finally:
        run.packs = True
    exact = all(
        torch.equal(a, b) for one, other in zip(together, alone, strict=True) for a, b in zip(one, other, strict=True)
    )
    right = all(
        _close(a, b) for one, other in zip(together, native, strict=True) for a, b in zip(one, other, strict=True)
    )
    if not right:
        _log.warning(
            "packed passes differ from plain ones on this architecture: one sequence goes through it at a time"
        )
    return right, exact


def _compute(run: TrainingPass, weights: AdapterWeights, datums: list[np.ndarray]) -> list[tuple[Tensor, Tensor]]:
    """Logprobs and flat gradient of each datum, computed in one pass."""
    device = next(iter(weights.pairs.values()))[0].device
    size = sum(tensor.numel() for tensor in weights.tensors)
    flats = [torch.zeros(size, device=device) for _ in datums]
    places: list[Pairs] = [views(flat, weights.pairs) for flat in flats]
    items = [
        PassItem(tokens[:-1], weights, _loss(torch.from_numpy(tokens[1:]).to(device)), place)
        for tokens, place in zip(datums, places, strict=True)
    ]
    results = run.run(items)
    logprobs = [result for result in results if isinstance(result, Tensor)]
    return list(zip(logprobs, flats, strict=True))


def _loss(targets: Tensor) -> DatumLoss:
    return DatumLoss(cross_entropy, {"target_tokens": targets}, {}, elementwise=True)


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _CLOSE * other.abs().max().clamp(min=1e-6))
