"""What can be refused about a sample before it runs, by name. Raises only `InvalidRequest`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from schemas.errors import InvalidRequest
from schemas.operations import Sample, SamplingParams


def check_sample(request: Sample, vocabulary: int) -> None:
    """Raise `InvalidRequest` that names the field, the value and what would be accepted."""
    if len(request.prompt) == 0:
        raise InvalidRequest("the prompt is empty; it needs at least one token", field="prompt")
    _check_ids(request.prompt, 0, vocabulary, "prompt")
    _check_params(request.params)
    _check_counts(request, vocabulary)


def token_limit(prompt: int, max_tokens: int | None, context: int) -> int:
    """How many tokens may be drawn. Raises `InvalidRequest`, with the numbers, if they do not fit the context."""
    if prompt + (1 if max_tokens is None else max_tokens) > context:
        wanted = "at least 1 new token" if max_tokens is None else f"max_tokens {max_tokens}"
        raise InvalidRequest(
            f"the prompt has {prompt} tokens; with {wanted} it exceeds the context of {context} tokens",
            field="prompt" if prompt >= context else "sampling_params.max_tokens",
            hint=f"shorten the prompt, or ask for at most {context - prompt} tokens" if prompt < context else None,
        )
    return context - prompt if max_tokens is None else max_tokens


def _check_params(params: SamplingParams) -> None:
    checks = (
        (
            "temperature",
            params.temperature,
            math.isfinite(params.temperature) and params.temperature >= 0,
            "0 or a positive finite number",
        ),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("top_k", params.top_k, params.top_k >= -1, "positive, or -1 or 0 for off"),
        ("max_tokens", params.max_tokens, params.max_tokens is None or params.max_tokens >= 1, "at least 1"),
        ("seed", params.seed, params.seed is None or params.seed >= 0, "0 or positive"),
    )
    for name, value, good, accepted in checks:
        if not good:
            raise InvalidRequest(f"{name} is {value}; it must be {accepted}", field=f"sampling_params.{name}")


def _check_counts(request: Sample, vocabulary: int) -> None:
    if request.num_samples < 1:
        raise InvalidRequest(f"num_samples is {request.num_samples}; it must be at least 1", field="num_samples")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        value = getattr(request, name)
        if not 0 <= value <= vocabulary:
            raise InvalidRequest(f"{name} is {value}; it must be 0 to {vocabulary} (the vocabulary)", field=name)
    scored = len(request.prompt) - 1
    last_n = request.prompt_logprobs_last_n
    if last_n is not None:
        if not (request.prompt_logprobs or request.topk_prompt_logprobs):
            raise InvalidRequest("prompt_logprobs_last_n needs prompt_logprobs", field="prompt_logprobs_last_n")
        if not 1 <= last_n <= scored:
            raise InvalidRequest(
                f"prompt_logprobs_last_n is {last_n}; it must be 1 to {scored} (the prompt's length less 1)",
                field="prompt_logprobs_last_n",
            )
    targets = request.target_prompt_logprobs
    if targets is not None:
        if targets.ndim != 2 or len(targets) != scored:
            raise InvalidRequest(
                f"target_prompt_logprobs has shape {list(targets.shape)}; it must be [{scored}, K]",
                field="target_prompt_logprobs",
            )
        _check_ids(targets, -1, vocabulary, "target_prompt_logprobs")


def _check_ids(ids: np.ndarray[Any, Any], lowest: int, vocabulary: int, field: str) -> None:
    bad = ids[(ids < lowest) | (ids >= vocabulary)]
    if bad.size:
        raise InvalidRequest(
            f"{field} has token id {int(bad.flat[0])}; ids must be {lowest} to {vocabulary - 1}", field=field
        )
