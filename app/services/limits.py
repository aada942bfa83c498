"""Checks against what a loaded base model can take: vocabulary and context.

They refuse at the door what an engine would refuse later. While a base model is still loading nothing is known, so nothing
is checked here; the engine always checks again.
"""

from __future__ import annotations

from schemas.errors import InvalidRequest
from schemas.operations import BaseModelInfo, Int64, Sample, TrainBatch


def check_batch(batch: TrainBatch, info: BaseModelInfo | None) -> None:
    """Raise `InvalidRequest` naming the datum whose tokens or length the base model cannot take."""
    if info is None:
        return
    for index, datum in enumerate(batch.datums):
        field = f"data[{index}]"
        if len(datum.tokens) > info.context_length:
            raise InvalidRequest(
                f"{field}.model_input has {len(datum.tokens)} tokens; "
                f"the context of this base model is {info.context_length}",
                field=f"{field}.model_input",
                code="context_too_long",
            )
        _check_tokens(datum.tokens, info, f"{field}.model_input")
        _check_tokens(datum.inputs["target_tokens"], info, f"{field}.loss_fn_inputs.target_tokens")


def check_sample(sample: Sample, info: BaseModelInfo | None) -> None:
    """Raise `InvalidRequest` if the prompt, or the prompt with what is to be drawn, does not fit the base model."""
    if info is None:
        return
    length, limit = len(sample.prompt), info.context_length
    _check_tokens(sample.prompt, info, "prompt")
    wanted = sample.params.max_tokens
    if length + (wanted or 1) > limit:
        asked = "room for at least one token" if wanted is None else f"max_tokens {wanted}"
        raise InvalidRequest(
            f"a prompt of {length} tokens and {asked} do not fit: the context of this base model is {limit} tokens",
            field="prompt" if length >= limit else "sampling_params.max_tokens",
            hint=None if length >= limit else f"at most {limit - length} tokens can be drawn after this prompt",
            code="context_too_long",
        )
    for stop in sample.params.stop or ():
        if isinstance(stop, int) and stop >= info.vocab_size:
            raise _outside(stop, info, "sampling_params.stop")
    if sample.target_prompt_logprobs is not None:
        _check_tokens(sample.target_prompt_logprobs, info, "target_prompt_logprobs", lowest=-1)
    for field in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(sample, field) > info.vocab_size:
            raise InvalidRequest(
                f"{field} {getattr(sample, field)} is more than the vocabulary of {info.vocab_size}", field=field
            )


def _check_tokens(tokens: Int64, info: BaseModelInfo, field: str, lowest: int = 0) -> None:
    if tokens.size == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < lowest or high >= info.vocab_size:
        raise _outside(low if low < lowest else high, info, field)


def _outside(token: int, info: BaseModelInfo, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field} contains token id {token}; ids from 0 to {info.vocab_size - 1} are accepted",
        field=field,
        code="token_out_of_range",
    )
