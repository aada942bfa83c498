"""Logprobs in the two forms that OpenAI's routes have. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from app.services.doors.runs import top_rows
from app.services.doors.text_stream import ScoredToken, TextStream
from app.services.doors.tokens import TextTokens
from schemas.http.openai import AlternativeToken, ChatLogprobs, CompletionLogprobs, TokenLogprob
from schemas.operations import SampleResult

IMPOSSIBLE = -9999.0
"""What OpenAI writes for a token of no probability: JSON has no infinity."""


def chat_logprobs(tokens: TextTokens, scored: Sequence[ScoredToken]) -> ChatLogprobs:
    """Of the tokens of a message."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=tokens.name(each.token),
                logprob=_finite(each.logprob),
                bytes=list(tokens.of(each.token).data),
                top_logprobs=[
                    AlternativeToken(token=tokens.name(i), logprob=_finite(value), bytes=list(tokens.of(i).data))
                    for i, value in each.top or ()
                ],
            )
            for each in scored
        ]
    )


def completion_logprobs(tokens: TextTokens, scored: Sequence[ScoredToken], top: int) -> CompletionLogprobs:
    """Of the tokens of a text. With `top`, each has its likeliest alternatives and itself."""
    return CompletionLogprobs(
        tokens=[tokens.name(each.token) for each in scored],
        token_logprobs=[None if each.logprob is None else _finite(each.logprob) for each in scored],
        top_logprobs=[_alternatives(tokens, each) for each in scored] if top else None,
        text_offset=[each.start for each in scored],
    )


def prompt_scores(tokens: TextTokens, prompt: Sequence[int], result: SampleResult) -> tuple[ScoredToken, ...]:
    """The tokens of a prompt that was scored. Nothing comes before the first, so it has no logprob."""
    logprobs = result.prompt_logprobs
    tops = top_rows(result.topk_prompt_logprobs, len(prompt))
    stream = TextStream(tokens)
    found: list[ScoredToken] = []
    for index, token in enumerate(prompt):
        score = None if logprobs is None or index == 0 else float(logprobs[index])
        found += stream.add(token, score, tops[index] if index else None).tokens
    return (*found, *stream.end("length")[0].tokens)


def _alternatives(tokens: TextTokens, scored: ScoredToken) -> dict[str, float] | None:
    if scored.logprob is None:
        return None
    found = {tokens.name(i): _finite(value) for i, value in scored.top or ()}
    found.setdefault(tokens.name(scored.token), _finite(scored.logprob))
    return found


def _finite(logprob: float | None) -> float:
    return IMPOSSIBLE if logprob is None or not math.isfinite(logprob) else logprob
