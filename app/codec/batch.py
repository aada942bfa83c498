"""What a loss wants, checked once for all wire forms: raw tokens and tensors become a `TrainBatch`.

Against the table in `schemas/losses.py`: the loss exists, its configuration and inputs are known and complete, every
tensor has the right kind, shape and finite values. Not responsible for the vocabulary and context length of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

import numpy as np

from app.codec.limits import CodecLimits
from app.codec.tensors import Numbers, to_float32
from schemas.errors import InvalidRequest
from schemas.losses import CUSTOM, INTEGER_INPUTS, LOSSES, LossSignature
from schemas.operations import Datum, Int64, TrainBatch

MAX_TOKEN_ID = 2**31 - 1

CUSTOM_LOSS = "custom"


def signature_of(loss_fn: str) -> LossSignature:
    """What a loss takes. Raises InvalidRequest naming the losses that there are."""
    signature = CUSTOM if loss_fn == CUSTOM_LOSS else LOSSES.get(loss_fn)
    if signature is None:
        raise InvalidRequest(
            f"loss_fn {loss_fn[:64]!r} is not offered; accepted: {', '.join([*sorted(LOSSES), CUSTOM_LOSS])}",
            field="loss_fn",
            code="unknown_loss",
        )
    return signature


def checked_config(loss_fn: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """The parameters of a loss as finite floats. Raises InvalidRequest for an unknown key, text, a value off bounds."""
    if loss_fn == CUSTOM_LOSS:
        loss_id_of(config)
        return {}
    defaults = signature_of(loss_fn).config
    for name, value in config.items():
        field = f"loss_fn_config.{name[:64]}"
        if name not in defaults:
            accepted = f"accepted: {', '.join(sorted(defaults))}" if defaults else "it takes none"
            raise InvalidRequest(f"{field} is not a parameter of {loss_fn}; {accepted}", field=field)
        if isinstance(value, str):
            raise InvalidRequest(f"{field} must be a number, but is the text {value[:64]!r}", field=field)
        if not isfinite(value) or value < 0 or value > 3e38:
            raise InvalidRequest(f"{field} must be a finite number of at least 0, but is {value}", field=field)
    found = {name: float(value) for name, value in config.items()}
    merged = {**defaults, **found}
    if merged.get("clip_low_threshold", 0.0) > merged.get("clip_high_threshold", np.inf):
        raise InvalidRequest(
            f"loss_fn_config.clip_low_threshold ({merged['clip_low_threshold']}) is above clip_high_threshold "
            f"({merged['clip_high_threshold']}); both are bounds of the ratio itself",
            field="loss_fn_config.clip_low_threshold",
        )
    return found


def loss_id_of(config: Mapping[str, float | str]) -> str:
    """The custom loss that a batch names. Raises InvalidRequest unless that is all that the parameters say."""
    loss_id = config.get("loss_id")
    if not isinstance(loss_id, str) or len(config) != 1:
        raise InvalidRequest(
            "loss_fn_config of a custom loss must be its loss_id, a text, and nothing else",
            field="loss_fn_config.loss_id",
            hint="create_custom_loss gives the id",
        )
    return loss_id


def checked_tokens(tokens: Int64, field: str, limits: CodecLimits) -> Int64:
    """The model input, int64 [N]. Raises InvalidRequest if it is empty, too long, or holds what is no token id."""
    if tokens.size == 0:
        raise InvalidRequest(f"{field} has no tokens; there must be at least one", field=field)
    if tokens.size > limits.max_datum_tokens:
        raise InvalidRequest(
            f"{field} has {tokens.size} tokens; at most {limits.max_datum_tokens} are accepted", field=field
        )
    return _checked_ids(tokens, field)


def build_batch(
    model_id: str,
    datums: Sequence[Datum],
    loss_fn: str,
    config: Mapping[str, float | str],
    *,
    forward_only: bool,
) -> TrainBatch:
    """A validated batch of datums whose tokens are checked, but whose inputs are only converted.

    Raises:
        InvalidRequest: naming the field, the value and what is accepted.
    """
    signature = signature_of(loss_fn)
    loss_config = checked_config(loss_fn, config)
    checked = tuple(
        _checked_datum(datum, f"data[{i}]", loss_fn, signature, loss_config) for i, datum in enumerate(datums)
    )
    return TrainBatch(model_id, checked, loss_fn, loss_config, backward=not forward_only)


def check_count(count: int, limits: CodecLimits) -> None:
    """Raises InvalidRequest unless there is at least one datum and not too many."""
    if not 1 <= count <= limits.max_datums:
        raise InvalidRequest(f"data has {count} examples; 1 to {limits.max_datums} are accepted", field="data")


def _checked_datum(
    datum: Datum, where: str, loss_fn: str, signature: LossSignature, config: Mapping[str, float]
) -> Datum:
    given = datum.inputs.keys()
    accepted = signature.required | signature.optional
    if missing := sorted(signature.required - given):
        raise InvalidRequest(
            f"{where}.loss_fn_inputs lacks {', '.join(missing)}, which {loss_fn} needs", field=f"{where}.loss_fn_inputs"
        )
    custom = loss_fn == CUSTOM_LOSS
    if extra := sorted(given - accepted if not custom else ()):
        raise InvalidRequest(
            f"{where}.loss_fn_inputs has {', '.join(name[:64] for name in extra[:8])}, which {loss_fn} does not read; "
            f"accepted: {', '.join(sorted(accepted))}",
            field=f"{where}.loss_fn_inputs.{extra[0][:64]}",
        )
    n = datum.tokens.size
    target_shape = datum.inputs["target_tokens"].shape
    _check_target_shape(target_shape, n, f"{where}.loss_fn_inputs.target_tokens", loss_fn, signature)
    inputs: dict[str, Numbers] = {}
    for name, values in datum.inputs.items():
        field = f"{where}.loss_fn_inputs.{name}"
        if values.shape != target_shape and not custom:
            raise InvalidRequest(
                f"{field} has shape {list(values.shape)}, but target_tokens and the model input of {n} tokens "
                f"need {list(target_shape)}",
                field=field,
            )
        inputs[name] = _checked_values(name, values, field, keep_integers=custom)
    if loss_fn == "cross_entropy" and "weights" not in inputs:
        inputs["weights"] = np.ones(target_shape, dtype=np.float32)
    _check_thresholds(inputs, where, signature, config)
    return Datum(datum.tokens, inputs)


def _check_target_shape(shape: tuple[int, ...], n: int, field: str, loss_fn: str, signature: LossSignature) -> None:
    if shape == (n,):
        return
    if len(shape) == 2 and shape[0] == n and shape[1] >= 1 and signature.two_dimensional:
        return
    accepted = f"[{n}] or [{n}, K]" if signature.two_dimensional else f"[{n}]"
    raise InvalidRequest(
        f"{field} has shape {list(shape)}, but {loss_fn} on a model input of {n} tokens takes {accepted}", field=field
    )


def _checked_values(name: str, values: Numbers, field: str, *, keep_integers: bool) -> Numbers:
    if name in INTEGER_INPUTS:
        if values.dtype != np.int64:
            raise InvalidRequest(f"{field} must hold integers (token ids), but holds floats", field=field)
        return _checked_ids(values.astype(np.int64, copy=False), field)
    if keep_integers and values.dtype == np.int64:
        return values
    floats = to_float32(values, copy=False)
    if not np.isfinite(floats).all():
        at = int(np.flatnonzero(~np.isfinite(floats))[0])
        raise InvalidRequest(f"{field} holds {values.flat[at]} at index {at}; only finite float32 values", field=field)
    return floats


def _checked_ids(ids: Int64, field: str) -> Int64:
    if ids.size and ids.view(np.uint64).max() > MAX_TOKEN_ID:  # as unsigned, a negative one is huge
        at = int(np.flatnonzero((ids < 0) | (ids > MAX_TOKEN_ID))[0])
        raise InvalidRequest(
            f"{field} holds {ids.flat[at]} at index {at}; a token id is 0 to {MAX_TOKEN_ID}", field=field
        )
    return ids


def _check_thresholds(
    inputs: Mapping[str, Numbers], where: str, signature: LossSignature, config: Mapping[str, float]
) -> None:
    """Per-position clip bounds: none negative, none crossed (a missing one comes from the configuration)."""
    names = ("clip_low_threshold", "clip_high_threshold")
    if not inputs.keys() & set(names):
        return
    fallback = {**signature.config, **config}
    low, high = (np.asarray(inputs.get(name, fallback[name]), dtype=np.float32) for name in names)
    if np.any(low < 0) or np.any(low > high):
        raise InvalidRequest(
            f"{where}.loss_fn_inputs: clip_low_threshold must be at least 0 and at most clip_high_threshold "
            "at every position",
            field=f"{where}.loss_fn_inputs.{next(name for name in names if name in inputs)}",
        )
