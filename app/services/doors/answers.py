"""From a request for text to its text: the part that all doors share.

Responsible for turning what is asked into samples, and what they draw into pieces of text with a reason for their end.
Not responsible for the shapes of a protocol (`openai.py`, `anthropic.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from app.services.doors.models import DoorModel
from app.services.doors.runs import DoorRun, Drawn, Ended
from app.services.doors.text_stream import Finish, TextPiece, TextStream, joined
from app.services.waiting import Disconnected
from schemas.errors import InvalidRequest
from schemas.http.sampling import MAX_SAMPLES
from schemas.operations import Sample, SampleResult, SamplingParams


@dataclass(frozen=True, slots=True)
class TextRequest:
    """What a client wants, whatever protocol it speaks.

    `prompts` are token ids. `top` asks for logprobs and so many alternatives of each drawn token (None = no logprobs),
    and of the prompt too with `score_prompt`. `max_tokens` None = to the end of the context, 0 = draw nothing (one
    token is drawn and dropped).
    """

    model: DoorModel
    prompts: tuple[tuple[int, ...], ...]
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stops: tuple[str, ...] = ()
    top: int | None = None
    score_prompt: bool = False
    stream: bool = False
    offsets: tuple[int, ...] = ()
    """Where each prompt's text ends in what the client sees, if it sees the prompt."""


@dataclass(frozen=True, slots=True)
class TextNews:
    """New text of continuation `choice` (prompt times n, plus its number), and why it ended if it did."""

    choice: int
    piece: TextPiece
    finish: Finish | None = None
    stopped_by: str | None = None


@dataclass(frozen=True, slots=True)
class TokensUsed:
    """Tokens of the prompts, of which cached, and tokens drawn."""

    prompt: int
    cached: int
    drawn: int


class TextAnswer:
    """The answer to one request, from `begin` to the end of `follow`."""

    def __init__(self, asked: TextRequest, run: DoorRun) -> None:
        self.asked = asked
        self._run = run

    @property
    def answer_id(self) -> str:
        """An id for the client: that of the (first) sample in the log."""
        return self._run.records[0].request_id

    @property
    def created(self) -> int:
        """Unix seconds."""
        return int(self._run.records[0].created_at.timestamp())

    @property
    def results(self) -> list[SampleResult]:
        """The results of the prompts; complete when `follow` has ended."""
        return self._run.results

    @property
    def used(self) -> TokensUsed:
        """What was used; complete when `follow` has ended."""
        lengths = [len(prompt) for prompt in self.asked.prompts]
        cached = sum(
            min(result.prompt_cache_hit_tokens, length) for result, length in zip(self.results, lengths, strict=True)
        )
        drawn = sum(len(sequence.tokens) for result in self.results for sequence in result.sequences)
        return TokensUsed(sum(lengths), cached, 0 if self.asked.max_tokens == 0 else drawn)

    async def begin(self) -> None:
        """Submit. Raises `InvalidRequest`, `NotFound`, `TooManyRequests`, `Unavailable`."""
        samples = [_sample(self.asked, prompt) for prompt in self.asked.prompts]
        await self._run.begin(self.asked.model.weights, samples, stream=self.asked.stream)

    def close(self) -> None:
        """Nobody waits any more: stop what still draws. Must be called at the end; doing it again changes nothing."""
        self._run.drop()

    async def follow(
        self, disconnected: Disconnected, *, pause: float | None = None
    ) -> AsyncGenerator[TextNews | None]:
        """The text as it comes; None when nothing came for `pause` seconds. Raises as `DoorRun.follow`."""
        asked = self.asked
        streams = [self._stream(choice) for choice in range(len(asked.prompts) * asked.n)]
        async with aclosing(self._run.follow(disconnected, pause=pause)) as news:
            async for each in news:
                if each is None:
                    yield None
                    continue
                choice = each.sample * asked.n + each.index
                told = self._tell(each, choice, streams[choice])
                if told.piece or told.finish is not None:
                    yield told

    def _tell(self, news: Drawn | Ended, choice: int, stream: TextStream) -> TextNews:
        nothing = self.asked.max_tokens == 0
        if isinstance(news, Drawn):
            return TextNews(choice, joined([stream.add(*token) for token in news.tokens if not nothing]))
        if nothing:
            return TextNews(choice, TextPiece(), "length")
        piece, finish = stream.end(news.stop_reason)
        if stream.stopped_by is not None and stream.stopped_by not in self.asked.stops:
            return TextNews(choice, piece, "eos")  # the end of sequence, written out
        return TextNews(choice, piece, finish, stream.stopped_by)

    def _stream(self, choice: int) -> TextStream:
        asked = self.asked
        offset = asked.offsets[choice // asked.n] if asked.offsets else 0
        return TextStream(asked.model.tokens, _stops(asked), frozenset(asked.model.info.eos_token_ids), offset)


def _stops(asked: TextRequest) -> tuple[str, ...]:
    """All that ends a sample: with stop strings, the end of sequence has to be one of them, or nothing else ends it."""
    return (*asked.stops, *asked.model.eos_texts) if asked.stops else ()


def _sample(asked: TextRequest, prompt: Sequence[int]) -> Sample:
    top = asked.top or 0
    return Sample(
        prompt=np.array(prompt, dtype=np.int64),
        params=SamplingParams(
            max_tokens=asked.max_tokens if asked.max_tokens != 0 else 1,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_k=asked.top_k or -1,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            seed=asked.seed,
            stop=_stops(asked) or None,
        ),
        num_samples=asked.n,
        prompt_logprobs=asked.score_prompt,
        topk_prompt_logprobs=top if asked.score_prompt else 0,
        topk_sample_logprobs=top,
    )


def check_size(prompts: Sequence[Sequence[int]], n: int) -> None:
    """Raise `InvalidRequest` for an empty prompt, or for more continuations than one request may have."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequest(f"prompt {index} has no tokens; at least one is needed", field="prompt")
    if len(prompts) * n > MAX_SAMPLES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n {n} are more than {MAX_SAMPLES} continuations, the most of one request",
            field="n",
        )
