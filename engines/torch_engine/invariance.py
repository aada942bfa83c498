"""Whether numbers depend on company: found out on this machine, with this model, when it is loaded.

In float32 on the CPU an operation's numbers must be the same bits whatever else shares its passes. Everything in a pass
runs per datum but the elementwise kernels (`packing.Filling`) and the products with base weights, judged here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.lora import AdapterWeights, LoraLinear, Pairs, Router, views
from engines.losses import cross_entropy
from engines.torch_engine.operations import DatumLoss
from engines.torch_engine.packing import Filling
from engines.torch_engine.precision import weights_dtype
from engines.torch_engine.training_pass import PassItem, TrainingPass

_log = logging.getLogger(__name__)

ROW_UNITS = (4, 16)
"""Products of fewer rows sum in another order than those of many on some CPUs, and of other numbers on some threads.
A small unit makes a lone sample cheap, so the smallest that holds is taken."""
LEAST_ROWS = 16
"""From so many rows on, adapters' products need not be filled up (but those of rank 1), where any number holds."""
ROW_BLOCK = 64
_PROBED_UNITS = (1, 2, 3, 4, 5, 7, 8, 16)
_ODD = (17, 31, 65, 100, 130)
"""Numbers of rows that are no multiple of a unit: adapters' products are not filled up where these hold too."""
_RANKS = (1, 2, 8, 32)
"""Of adapters that are tried out."""
_LENGTHS = (21, 13)
_CLOSE = 1e-3
"""How far packed passes may be from plain ones, of the greatest number; what leaks from one sequence into another is of
the order of 1."""
_CLOSE_BFLOAT16 = 0.1
"""Rounding in 30 layers was seen to make 0.05 of a gradient."""


def arrange_rows(router: Router, weights: Sequence[Tensor], head: Tensor) -> None:
    """Choose `row_unit`, `row_block` and `least_rows` of the router, so that rows have the same bits in any company.

    Rows come in multiples of the unit. Products run over all of them at once (no block) if this machine then gives each
    row the same bits whatever others there are, else over blocks of a fixed number of rows. Adapters' products, which
    have the rows of one request, are filled up to the unit where they depend on their number.

    Args:
        weights: of the linears [out, in], one of each shape; products with them, with their transposes and with
            adapters are tried out.
        head: of the output head [vocab, hidden].
    """
    router.row_unit, router.row_block = choose_rows(weights, head)
    free = router.row_block is None and all(_adapters_hold(weight, router.row_unit, _ODD) for weight in weights)
    router.least_rows = max(router.row_unit, LEAST_ROWS) if free else sys.maxsize


def choose_rows(weights: Sequence[Tensor], head: Tensor) -> tuple[int, int | None]:
    """(unit, block) of `arrange_rows`."""
    for unit in ROW_UNITS:
        if all(_holds(weight, unit) for weight in weights) and _same_rows(head.t(), unit, rows=32 * unit, starts=1):
            return unit, None
    return ROW_BLOCK, ROW_BLOCK


def filling_for(model: Any, unit: int) -> Filling:
    """To how many rows passes of this model are filled up: multiples of `unit` that suit the threads."""
    linears = [module for module in model.modules() if isinstance(module, LoraLinear)]
    # Activations that a formula is applied to go into a linear, or are rotary angles.
    widths = {linear.in_features for linear in linears}
    widths.add(int(getattr(model.config.get_text_config(), "head_dim", None) or 1))
    return Filling(unit, frozenset(widths), torch.get_num_threads())


def _holds(weight: Tensor, unit: int) -> bool:
    """Whether the bits of rows are the same in all products with this weight [out, in] and with adapters on it."""
    return _same_rows(weight, unit) and _same_rows(weight.t(), unit) and _adapters_hold(weight, unit)


def _adapters_hold(weight: Tensor, unit: int, odd: Sequence[int] = ()) -> bool:
    """Whether they are in products with adapters on this weight, of `odd` numbers of rows too (those of rank 1 are
    always filled up)."""
    generator = torch.Generator().manual_seed(1)
    for rank in _RANKS:
        pair = torch.randn(rank, sum(weight.shape), generator=generator).to(weight.device)
        down = pair[:, weight.shape[0] :].contiguous().t()
        up = pair[:, : weight.shape[0]].t().contiguous().t()
        more = () if rank == 1 else odd
        if not (_same_rows(down, unit, more) and _same_rows(up, unit, more, adds=True)):
            return False
    return True


def _same_rows(
    weight: Tensor, unit: int, odd: Sequence[int] = (), *, adds: bool = False, rows: int = 512, starts: int = 4
) -> bool:
    """Whether `odd` numbers of rows and multiples of the unit, from anywhere in a product of many rows, have the bits
    that they have in it; `adds`: as it adds to something."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, width, generator=generator).to(weight) for width in weight.shape)

    def product(of: slice) -> Tensor:
        return torch.addmm(y[of], x[of].clone(), weight, alpha=0.7) if adds else torch.mm(x[of].clone(), weight)

    whole = product(slice(0, rows))
    places = [
        slice(start, start + count)
        for start in (0, 1, unit, 5 * unit + 3)[:starts]
        for count in (*(units * unit for units in _PROBED_UNITS), *odd)
    ]
    return all(torch.equal(product(place), whole[place]) for place in places)


def judge(run: TrainingPass, weights: AdapterWeights, vocab_size: int) -> tuple[bool, bool]:
    """Two short datums alone, together, and without packing: (packing is right, packing gives the same bits).

    `weights` should be an adapter on everything, with a B that is not zero.
    """
    bound = _CLOSE_BFLOAT16 if weights_dtype(run.model) == torch.bfloat16 else _CLOSE
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
        _close(a, b, bound)
        for one, other in zip(together, native, strict=True)
        for a, b in zip(one, other, strict=True)
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


def _close(one: Tensor, other: Tensor, bound: float) -> bool:
    return bool((one - other).abs().max() <= bound * other.abs().max().clamp(min=1e-6))
