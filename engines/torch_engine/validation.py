"""What only an engine can check about a batch, before any work: vocabulary, context, shapes, finite values.

The edge has validated the form; this is the last gate before the arithmetic, and the only one that knows the model.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engines.losses import resolve_loss
from schemas.base_model_info import BaseModelInfo
from schemas.errors import InvalidRequest
from schemas.losses import CUSTOM, INTEGER_INPUTS, LOSSES, LossSignature
from schemas.operations import Datum, TrainBatch

Array = NDArray[np.float32] | NDArray[np.int64]


def check_batch(batch: TrainBatch, info: BaseModelInfo) -> dict[str, float]:
    """Raise `InvalidRequest` naming the first thing wrong; returns the loss's complete configuration."""
    if batch.loss_graph is not None:
        for index, datum in enumerate(batch.datums):
            _check_datum(datum, f"data[{index}]", CUSTOM, batch.loss_fn, info)
        return {}
    _, config = resolve_loss(batch.loss_fn, batch.loss_config)
    for key, value in config.items():
        if not np.isfinite(value):
            raise InvalidRequest(f"{key} is {value}; it must be a finite number", field=f"loss_fn_config.{key}")
    if "clip_low_threshold" in config:
        _check_bounds(config["clip_low_threshold"], config["clip_high_threshold"], "loss_fn_config")
    if not batch.datums:
        raise InvalidRequest("the batch has no datums; at least one is needed", field="data")
    for index, datum in enumerate(batch.datums):
        _check_datum(datum, f"data[{index}]", LOSSES[batch.loss_fn], batch.loss_fn, info)
        if "clip_low_threshold" in config:
            low = datum.inputs.get("clip_low_threshold", config["clip_low_threshold"])
            high = datum.inputs.get("clip_high_threshold", config["clip_high_threshold"])
            _check_bounds(low, high, f"data[{index}].loss_fn_inputs")
    return config


def _check_datum(datum: Datum, where: str, signature: LossSignature, loss: str, info: BaseModelInfo) -> None:
    length = len(datum.tokens)
    _check_ids(datum.tokens, f"{where}.model_input", info.vocab_size)
    if datum.tokens.ndim != 1 or length == 0:
        raise InvalidRequest("the model input is empty; at least one token is needed", field=f"{where}.model_input")
    if length > info.context_length:
        raise InvalidRequest(
            f"the model input has {length} tokens; the context of this base model is {info.context_length}",
            field=f"{where}.model_input",
        )
    inputs = f"{where}.loss_fn_inputs"
    for name in sorted(signature.required - datum.inputs.keys()):
        raise InvalidRequest(f"{loss} needs the input {name!r}", field=f"{inputs}.{name}")
    extra = datum.inputs.keys() - signature.required - signature.optional
    for name in sorted(extra if signature is not CUSTOM else ()):
        accepted = ", ".join(sorted(signature.required | signature.optional))
        raise InvalidRequest(f"{loss} takes no input {name!r}; it takes: {accepted}", field=f"{inputs}.{name}")
    shape = datum.inputs["target_tokens"].shape
    two_dimensional = signature.two_dimensional and len(shape) == 2 and shape[1] > 0
    if shape[:1] != (length,) or not (len(shape) == 1 or two_dimensional):
        accepted = f"[{length}] or [{length}, K]" if signature.two_dimensional else f"[{length}]"
        raise InvalidRequest(f"the shape is {list(shape)}; it must be {accepted}", field=f"{inputs}.target_tokens")
    for name, values in datum.inputs.items():
        own = values.shape if signature is CUSTOM else shape
        _check_input(name, values, own, f"{inputs}.{name}", info)


def _check_input(name: str, values: Array, shape: tuple[int, ...], where: str, info: BaseModelInfo) -> None:
    if name in INTEGER_INPUTS:
        _check_ids(values, where, info.vocab_size)
    elif values.shape != shape:
        raise InvalidRequest(f"the shape is {list(values.shape)}; it must be {list(shape)}", field=where)
    elif not np.isfinite(values).all():
        raise InvalidRequest("there are values that are not finite", field=where)


def _check_ids(ids: Array, where: str, vocab_size: int) -> None:
    if not np.issubdtype(ids.dtype, np.integer):
        raise InvalidRequest(f"the values are {ids.dtype}; token ids are integers", field=where)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})", field=where)


def _check_bounds(low: float | Array, high: float | Array, where: str) -> None:
    """Bounds of the ratio itself: 0 <= low <= high (a negative one is an epsilon by mistake)."""
    if np.any(np.asarray(low) < 0):
        raise InvalidRequest(
            "clip_low_threshold is negative; it is a bound of the ratio itself, so at least 0",
            field=f"{where}.clip_low_threshold",
        )
    if np.any(np.asarray(low) > np.asarray(high)):
        raise InvalidRequest("clip_low_threshold is above clip_high_threshold", field=f"{where}.clip_low_threshold")
