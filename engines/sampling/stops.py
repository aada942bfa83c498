"""When a continuation ends: at a token, or at a string that may span several tokens.

Not responsible for length limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from schemas.errors import InvalidRequest


class StopRule(Protocol):
    """Asked after every token; must be asked for each prefix, for it looks only at what the newest token added."""

    def reached(self, tokens: Sequence[int]) -> bool:
        """Whether the generated tokens end here."""
        ...


class StopTokens:
    """Ends at any of some token ids; with none of them it never ends."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = frozenset(ids)

    def reached(self, tokens: Sequence[int]) -> bool:
        """Whether the newest token is one of the ids."""
        return tokens[-1] in self._ids


class StopStrings:
    """Ends when the decoded text of the generated part contains one of some strings.

    Only the newest tokens are decoded: as each adds at least one byte, a string of n bytes lies within the last n. A
    few more stand before them, for a window may begin inside a character, and a tokenizer may treat its first token
    differently. Before the first generated token stands the prompt's last one, for the same reason; text is searched
    only behind it.
    """

    _MARGIN = 4

    def __init__(self, strings: Sequence[str], tokenizer: Any, last_prompt_token: int) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        self._before = last_prompt_token
        self._before_length = len(self._decode([last_prompt_token]))
        self._window = max(len(string.encode("utf-8")) for string in strings) + self._MARGIN

    def reached(self, tokens: Sequence[int]) -> bool:
        """Whether one of the strings is complete with the newest token."""
        if len(tokens) > self._window:
            text = self._decode(list(tokens[-self._window :]))
        else:
            text = self._decode([self._before, *tokens])[self._before_length :]
        return any(string in text for string in self._strings)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


def stop_rule(
    stop: tuple[str, ...] | tuple[int, ...] | None,
    *,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    tokenizer: Any,
    last_prompt_token: int,
) -> StopRule:
    """The rule of a request: None = the model's end-of-sequence tokens, `()` = never, else exactly what is listed.

    A list replaces the end-of-sequence tokens: whoever wants both lists both. Raises `InvalidRequest` for an empty
    string, an id outside the vocabulary, a mixed list, or strings without a tokenizer.
    """
    if stop is None:
        return StopTokens(eos_token_ids)
    strings = [item for item in stop if isinstance(item, str)]
    ids = [item for item in stop if not isinstance(item, str)]
    if strings and ids:
        raise InvalidRequest("stop mixes strings and token ids; give one kind", field="sampling_params.stop")
    if strings:
        if "" in strings:
            raise InvalidRequest(
                "stop contains an empty string; every string needs a character", field="sampling_params.stop"
            )
        if tokenizer is None:
            raise InvalidRequest(
                "this base model has no tokenizer, so stop takes token ids only", field="sampling_params.stop"
            )
        return StopStrings(strings, tokenizer, last_prompt_token)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"stop token {token} is outside the vocabulary (0 to {vocab_size - 1})", field="sampling_params.stop"
            )
    return StopTokens(ids)
