"""Checks against what a loaded base model can take: vocabulary and context.

They refuse at the door what an engine would refuse later. While a base model is still loading nothing is known, so
nothing is checked here; the engine always checks again.
"""

from __future__ import annotations

from app.codec import check_tokens
from schemas.base_model_info import BaseModelInfo
from schemas.errors import InvalidRequest
from schemas.operations import Sample, TrainBatch


def check_batch(batch: TrainBatch, info: BaseModelInfo | None, max_tokens: int) -> None:
    """Raise `InvalidRequest` if all datums together have more than `max_tokens` tokens, or naming the datum whose
    tokens or length the base model cannot take."""
    total = sum(len(datum.tokens) for datum in batch.datums)
    if total > max_tokens:
        raise InvalidRequest(
            f"data has {total} tokens in {len(batch.datums)} datums; this server takes at most {max_tokens} in one "
            "request",
            field="data",
            hint="send the datums in several requests: gradients add up until the optimizer step",
            code="request_too_large",
        )
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
    check_tokens(batch, info.vocab_size)


def check_sample(sample: Sample, info: BaseModelInfo | None, room: int) -> None:
    """Raise `InvalidRequest` if the prompt, or the prompt with what is to be drawn, does not fit the base model, or if
    its sequences together could never fit into `room` tokens."""
    if info is None:
        return
    length, limit = len(sample.prompt), info.context_length
    check_tokens(sample, info.vocab_size)
    wanted = sample.params.max_tokens
    if length + (wanted or 1) > limit:
        asked = "room for at least one token" if wanted is None else f"max_tokens {wanted}"
        raise InvalidRequest(
            f"a prompt of {length} tokens and {asked} do not fit: the context of this base model is {limit} tokens",
            field="prompt" if length >= limit else "sampling_params.max_tokens",
            hint=None if length >= limit else f"at most {limit - length} tokens can be drawn after this prompt",
            code="context_too_long",
        )
    _refuse_too_large(sample, limit, room)
    for stop in sample.params.stop or ():
        if isinstance(stop, int) and stop >= info.vocab_size:
            raise InvalidRequest(
                f"sampling_params.stop holds token id {stop}; ids from 0 to {info.vocab_size - 1} are accepted",
                field="sampling_params.stop",
            )
    for field in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(sample, field) > info.vocab_size:
            raise InvalidRequest(
                f"{field} {getattr(sample, field)} is more than the vocabulary of {info.vocab_size}", field=field
            )


def _refuse_too_large(sample: Sample, context_length: int, room: int) -> None:
    """Raise `InvalidRequest` if the sequences of a sample could need more than `room` tokens of the key-value cache."""
    needed = sample.most_tokens(context_length)
    if needed > room:
        raise InvalidRequest(
            f"num_samples {sample.num_samples} of up to {needed // sample.num_samples} tokens (prompt and max_tokens) "
            f"may need room for {needed} tokens; this server has room for {room}",
            field="num_samples",
            hint="ask for fewer samples at a time, or give a smaller max_tokens",
            code="sample_too_large",
        )
