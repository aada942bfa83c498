"""The text of one continuation while its tokens arrive: whole characters only, and nothing of a stop string.

Pure; not responsible for where tokens come from (`runs.py`).
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from app.services.doors.tokens import TextTokens

Finish = Literal["eos", "stop", "length"]
"""Why a continuation ended: at the model's end of sequence, at a stop string, at the most tokens allowed."""

Top = tuple[tuple[int, float], ...]
"""(token id, logprob), best first."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of the text. `start` is where its text begins, in characters of what the client sees."""

    token: int
    logprob: float | None
    start: int
    top: Top | None = None


@dataclass(frozen=True, slots=True)
class TextPiece:
    """New text, and the tokens that came with it."""

    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)


def joined(pieces: Sequence[TextPiece]) -> TextPiece:
    """Pieces that follow each other as one."""
    return TextPiece(
        "".join(piece.text for piece in pieces), tuple(token for piece in pieces for token in piece.tokens)
    )


@dataclass(slots=True)
class _Held:
    """A token and where its text ends, in characters; None = not known yet."""

    scored: ScoredToken
    end: int | None = None


@dataclass(slots=True)
class TextStream:
    """Feed tokens with `add`, which gives the text that no later token can change; `end` gives the rest.

    Args:
        tokens: the model's tokenizer.
        stops: strings that end the text and are no part of it.
        eos: token ids that end a sequence and are no part of the text either.
        offset: where the text begins in what the client sees (behind an echoed prompt).
    """

    tokens: TextTokens
    stops: Sequence[str] = ()
    eos: frozenset[int] = frozenset()
    offset: int = 0
    stopped_by: str | None = None
    """The stop string that was found."""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    _pending: str = ""
    """Text that was not handed out yet: it may be the beginning of a stop string."""
    _length: int = 0
    """Characters handed out."""
    _held: deque[_Held] = field(default_factory=deque)
    """Tokens not handed out yet."""
    _open: list[_Held] = field(default_factory=list)
    """Those of them that end inside a character."""

    def add(self, token: int, logprob: float | None = None, top: Top | None = None) -> TextPiece:
        """Take the next token in. What comes after a stop string is dropped."""
        if self.stopped_by is not None:
            return TextPiece()
        known = self.tokens.of(token)
        start = self._length + len(self._pending)
        if not known.special:
            self._pending += self._decoder.decode(known.data)
        self._hold(ScoredToken(token, logprob, self.offset + start, top), start)
        self._find_stop()
        return self._release(len(self._pending) - self._possible_stop(), last=False)

    def end(self, stop_reason: Literal["stop", "length"]) -> tuple[TextPiece, Finish]:
        """What is left, and why the continuation ended."""
        finish: Finish = "length"
        if self.stopped_by is not None:
            finish = "stop"
        else:
            self._pending += self._decoder.decode(b"", final=True)
            if stop_reason == "stop":
                finish = "eos"
                if self._held and self._held[-1].scored.token in self.eos:
                    self._held.pop()
        return self._release(len(self._pending), last=True), finish

    def _hold(self, scored: ScoredToken, start: int) -> None:
        """Keep a token until its text is told, which is that of the whole character if it ends inside one."""
        held, end = _Held(scored), self._length + len(self._pending)
        self._held.append(held)
        inside = bool(self._decoder.getstate()[0])
        if end > start or not inside:
            for each in self._open:
                each.end = end
            self._open.clear()
        if inside:
            self._open.append(held)
        else:
            held.end = end

    def _find_stop(self) -> None:
        found = [(self._pending.find(stop), stop) for stop in self.stops if stop in self._pending]
        if not found:
            return
        at, self.stopped_by = min(found)
        self._pending = self._pending[:at]
        cut = self.offset + self._length + at
        while self._held and self._held[-1].scored.start >= cut:
            self._held.pop()

    def _possible_stop(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        if self.stopped_by is not None:
            return 0
        longest = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _release(self, count: int, *, last: bool) -> TextPiece:
        text, self._pending = self._pending[:count], self._pending[count:]
        self._length += len(text)
        complete: list[ScoredToken] = []
        while self._held:
            first = self._held[0]
            ends = len(self._held) == 1 and first.scored.token in self.eos  # no part of the text if nothing follows
            if not last and (first.end is None or first.end > self._length or ends):
                break
            complete.append(first.scored)
            self._held.popleft()
        return TextPiece(text, tuple(complete))
