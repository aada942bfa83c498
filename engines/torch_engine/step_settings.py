"""The hyperparameters of one optimizer step: defaults, overridden strictly, checked for what float32 can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from engines.dimuon import DEFAULTS as DIMUON_DEFAULTS
from engines.dimuon import rank_correction
from engines.optim import ParamGroup, apply_overrides, step_field
from schemas.errors import InvalidRequest
from schemas.operations import DimuonStepParams, OptimizerType, OptimStepParams, StepParams

DEFAULTS: Mapping[OptimizerType, Mapping[str, Any]] = {
    "adamw": {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.0},
    "dimuon": DIMUON_DEFAULTS,
}
"""Of a step that overrides nothing: the SDK's own."""

_FLOAT32 = torch.finfo(torch.float32)


def step_settings(kind: OptimizerType, rank: int, params: StepParams | None, grad_clip_norm: float) -> ParamGroup:
    """The checked hyperparameters of one step, a group of its own: overrides rule for this step only.

    Raises `InvalidRequest` if `params` are of the other optimizer, a value is out of range, or a factor of the update
    would not be finite in float32.
    """
    params = params or (DimuonStepParams() if kind == "dimuon" else OptimStepParams())
    where = step_field(params)
    if isinstance(params, DimuonStepParams) != (kind == "dimuon"):
        raise InvalidRequest(f"{where} does not fit: the model is trained by {kind}", field=where)
    if not (math.isfinite(grad_clip_norm) and grad_clip_norm >= 0):
        raise InvalidRequest(
            f"grad_clip_norm is {grad_clip_norm}; it must be a finite number >= 0 (0 = off)",
            field=f"{where}.grad_clip_norm",
        )
    group: ParamGroup = dict(DEFAULTS[kind])
    apply_overrides(SimpleNamespace(param_groups=[group]), params)
    if kind == "dimuon":
        _check_dimuon(group, rank)
    else:
        _check_adamw(group)
    return group


def _check_adamw(group: ParamGroup) -> None:
    rate, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
    # The step size is lr / (1 - beta1^t), greatest at t = 1.
    for name, factor in (("learning_rate", rate / (1 - group["betas"][0])), ("weight_decay", rate * decay)):
        if factor > _FLOAT32.max:
            raise InvalidRequest(
                f"{name} is too large: the step would not be finite in float32", field=f"adam_params.{name}"
            )
    if eps < _FLOAT32.smallest_normal:
        raise InvalidRequest(
            f"eps is {eps}; it must be at least {_FLOAT32.smallest_normal:.3g}, for moments are float32",
            field="adam_params.eps",
        )


def _check_dimuon(group: ParamGroup, rank: int) -> None:
    if float(group["lr"]) * rank_correction(rank, group["rank_lr_correction_exponent"]) > _FLOAT32.max:
        raise InvalidRequest(
            "learning_rate is too large: the step would not be finite in float32",
            field="optimizer_params.learning_rate",
        )
