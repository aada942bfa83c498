"""Per-step overrides of optimizer hyperparameters: strict, all or nothing, for one step.

Works on anything that holds parameter groups: a torch optimizer, or one object holding several (as training libraries
build for mixed optimizers). Not responsible for clipping or stepping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from schemas.errors import EngineFailure, InvalidRequest
from schemas.operations import DimuonStepParams, StepParams

ParamGroup = dict[str, Any]

_CONTAINERS = ("optimizers_dict", "optimizers", "chained_optimizers")
"""Attributes under which libraries keep the members of a multi-optimizer (VeOmni, torchtitan, Megatron core)."""

_NAMES = {"lr": "learning_rate"}
"""Hyperparameters that clients know by another name."""
_POSITIVE = frozenset({"eps", "damping"})
_SIGNED = frozenset({"rank_lr_correction_exponent"})


def iter_param_groups(optimizer: object) -> Iterator[ParamGroup]:
    """Every parameter group of the optimizer, once each, members of multi-optimizers included.

    Members rule over the container's own `param_groups`, which in some libraries are placeholders or views. Raises
    `EngineFailure` for an object that is no optimizer at all.
    """
    seen: set[int] = set()
    for group in _walk(optimizer):
        if id(group) not in seen:
            seen.add(id(group))
            yield group


def _walk(optimizer: object) -> Iterator[ParamGroup]:
    if isinstance(optimizer, Mapping):
        optimizer = list(optimizer.values())
    if isinstance(optimizer, list | tuple):
        for member in optimizer:
            yield from _walk(member)
        return
    for attribute in _CONTAINERS:
        members = getattr(optimizer, attribute, None)
        if members:
            yield from _walk(members if isinstance(members, Mapping | list | tuple) else list(members))
            return
    groups: Iterable[ParamGroup] | None = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise EngineFailure(f"{type(optimizer).__name__} holds no parameter groups")
    yield from groups


def apply_overrides(optimizer: object, params: StepParams) -> Callable[[], None]:
    """Set the given hyperparameters in every group; returns the function that puts the former values back.

    `None` values are left out. Everything is checked before anything is changed: each group must have the key, with
    a value of the same type (int widens to float, list to tuple), and the value must be in range: lr >= 0,
    0 <= beta < 1, eps and damping > 0, weight_decay >= 0, all finite. Raises `InvalidRequest`.
    """
    groups = list(iter_param_groups(optimizer))
    where = step_field(params)
    given = {field.name: getattr(params, field.name) for field in fields(params)}
    values = {key: _normal(key, value, where) for key, value in given.items() if value is not None}
    for key, value in values.items():
        for index, group in enumerate(groups):
            _check_group(key, value, index, group, where)
    former = [(group, {key: group[key] for key in values}) for group in groups]
    for group in groups:
        group.update(values)

    def restore() -> None:
        for group, old in former:
            group.update(old)

    return restore


def step_field(params: StepParams) -> str:
    """The request field in which clients give these hyperparameters."""
    return "optimizer_params" if isinstance(params, DimuonStepParams) else "adam_params"


def _normal(key: str, value: Any, where: str) -> float | tuple[float, ...]:
    """The value as float or tuple of floats, checked for type, length, finiteness and range."""
    if key == "beta1":
        return _beta(key, value, where)
    if key != "betas":
        number = _number(key, value, where)
        if key not in _SIGNED and (number < 0 or (key in _POSITIVE and number == 0)):
            raise _refused(key, value, f"a finite number {'>' if key in _POSITIVE else '>='} 0", where)
        return number
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _refused(key, value, "two numbers", where)
    return tuple(_beta(f"beta{i + 1}", beta, where) for i, beta in enumerate(value))


def _beta(key: str, value: Any, where: str) -> float:
    number = _number(key, value, where)
    if not 0 <= number < 1:
        raise _refused(key, number, "a number with 0 <= beta < 1", where)
    return number


def _number(key: str, value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refused(key, value, "a number", where)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _refused(key, value, "a finite number", where)
    return number


def _check_group(key: str, value: float | tuple[float, ...], index: int, group: ParamGroup, where: str) -> None:
    name = _NAMES.get(key, key)
    if key not in group:
        raise InvalidRequest(
            f"{name} cannot be set: parameter group {index} of the optimizer has none", field=f"{where}.{name}"
        )
    own = group[key]
    if isinstance(value, tuple):
        fits = isinstance(own, list | tuple) and len(own) == len(value)
    else:
        fits = isinstance(own, int | float) and not isinstance(own, bool)
    if not fits:
        raise InvalidRequest(
            f"{name} cannot be set: parameter group {index} holds a {type(own).__name__} of another form",
            field=f"{where}.{name}",
        )


def _refused(key: str, value: Any, accepted: str, where: str) -> InvalidRequest:
    name = _NAMES.get(key, key)
    return InvalidRequest(f"{name} is {value!r}; it must be {accepted}", field=f"{where}.{name}")
