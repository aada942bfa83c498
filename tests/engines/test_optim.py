"""Step overrides: strict, all or nothing, for one step, through multi-optimizers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from engines.optim import apply_overrides, iter_param_groups
from schemas.errors import EngineFailure, InvalidRequest
from schemas.operations import OptimStepParams


class FakeMulti:
    """One object holding several optimizers, as VeOmni's: no parameter groups of its own."""

    def __init__(self, **members: Any) -> None:
        self.optimizers_dict = members


class FakeContainer:
    """As torchtitan's: a list of members, and placeholder groups of its own that do not count."""

    def __init__(self, *members: Any) -> None:
        self.optimizers = list(members)
        self.param_groups = [{"lr": "placeholder"}]


def adamw(lr: float = 1e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW([{"params": [torch.zeros(2)]}, {"params": [torch.zeros(3)], "lr": lr * 2}], lr=lr)


def settings(optimizer: Any) -> list[dict[str, Any]]:
    return copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in iter_param_groups(optimizer)])


def test_groups_of_plain_nested_and_shared_optimizers() -> None:
    a, b, c = adamw(), adamw(), adamw()
    assert [id(g) for g in iter_param_groups(a)] == [id(g) for g in a.param_groups]
    nested = FakeMulti(first=a, second=FakeContainer(b, [c, a]))
    expected = [*a.param_groups, *b.param_groups, *c.param_groups]
    assert [id(g) for g in iter_param_groups(nested)] == [id(g) for g in expected]
    with pytest.raises(EngineFailure):
        list(iter_param_groups(object()))


def test_all_fields_reach_every_group_and_come_back() -> None:
    optimizer = FakeMulti(first=adamw(), second=adamw(5e-3))
    before = settings(optimizer)
    params = OptimStepParams(lr=0.5, betas=(0.1, 0.2), eps=1e-3, weight_decay=0.25)
    restore = apply_overrides(optimizer, params)
    for group in iter_param_groups(optimizer):
        assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.1, 0.2), 1e-3, 0.25)
    restore()
    assert settings(optimizer) == before


def test_none_is_left_out() -> None:
    optimizer = adamw()
    before = settings(optimizer)
    apply_overrides(optimizer, OptimStepParams())
    assert settings(optimizer) == before
    apply_overrides(optimizer, OptimStepParams(eps=1.0))
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in before]


def test_harmless_widening_is_normalised() -> None:
    optimizer = adamw()
    apply_overrides(optimizer, OptimStepParams(lr=1, betas=[0, 0.5], weight_decay=0))  # type: ignore[arg-type]
    group = optimizer.param_groups[1]
    assert (type(group["lr"]), type(group["betas"]), group["betas"]) == (float, tuple, (0.0, 0.5))
    assert all(type(beta) is float for beta in group["betas"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("lr", value) for value in (-1e-9, float("nan"), float("inf"), True, "0.1", [0.1], 10**400)],
        *[("betas", value) for value in ((0.9,), (0.9, 0.9, 0.9), (0.9, 1.0), (-0.1, 0.9), 0.9, "ab", (0.9, True))],
        *[("betas", value) for value in ((float("nan"), 0.9), (0.9, float("inf")), ("0.9", 0.9))],
        *[("eps", value) for value in (0.0, -1e-8, float("nan"), True, "x")],
        *[("weight_decay", value) for value in (-0.1, float("inf"), False, "0")],
    ],
)
def test_a_bad_value_is_refused_before_anything_changes(field: str, value: Any) -> None:
    optimizer = adamw()
    before = settings(optimizer)
    good: dict[str, Any] = {"lr": 0.5, "betas": (0.5, 0.5), "eps": 0.5, "weight_decay": 0.5}
    with pytest.raises(InvalidRequest) as caught:
        apply_overrides(optimizer, OptimStepParams(**{**good, field: value}))
    assert caught.value.field is not None
    assert caught.value.field.startswith("adam_params.")
    assert settings(optimizer) == before


@pytest.mark.parametrize("own", [None, "0.9", True, (0.9,), torch.tensor([0.9, 0.9])])
def test_a_group_that_lacks_the_key_or_holds_another_type_refuses(own: Any) -> None:
    first, odd = adamw(), adamw()
    if own is None:
        del odd.param_groups[1]["betas"]
    else:
        odd.param_groups[1]["betas"] = own
    with pytest.raises(InvalidRequest, match="betas"):
        apply_overrides(FakeMulti(adamw=first, muon=odd), OptimStepParams(lr=0.5, betas=(0.5, 0.5)))
    assert first.param_groups[0]["lr"] == odd.param_groups[0]["lr"] == 1e-3


def test_a_tensor_learning_rate_is_another_type() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(2)], lr=torch.tensor(1e-3), capturable=False, foreach=False)
    with pytest.raises(InvalidRequest, match="learning_rate"):
        apply_overrides(optimizer, OptimStepParams(lr=0.5))
