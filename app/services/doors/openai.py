"""The OpenAI door: completions and chat completions, whole or as a stream of chunks.

Responsible for what these requests mean and for the shapes of their answers. Not responsible for how text is made
(`answers.py`) or for HTTP (`app/routes/openai.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from app.services.chat import Message
from app.services.doors.answers import TextAnswer, TextNews, TextRequest, check_size
from app.services.doors.models import DoorModel, DoorModels
from app.services.doors.openai_logprobs import chat_logprobs, completion_logprobs, prompt_scores
from app.services.doors.runs import DoorRun
from app.services.doors.sse import KEEP_ALIVE, PAUSE, event
from app.services.doors.text_stream import Finish, TextPiece, joined
from app.services.waiting import Disconnected
from schemas.errors import InvalidRequest
from schemas.http.openai import (
    AssistantMessage,
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatMessage,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    OpenAISampling,
    OpenAIUsage,
    Prompt,
    PromptTokensDetails,
)

DEFAULT_MAX_TOKENS = 16
"""Of completions, as OpenAI defines it."""
DONE = b"data: [DONE]\n\n"

_FINISH: dict[Finish, Literal["stop", "length"]] = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class OpenAIAnswer:
    """An accepted request. `echoes` are the prompts' texts that the choices begin with, if asked for."""

    request: CompletionRequest | ChatCompletionRequest
    answer: TextAnswer
    echoes: tuple[str, ...] = ()

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        options = self.request.stream_options
        return options is not None and options.include_usage


class OpenAIDoor:
    """Completions for every project. `make_run` begins a run of samples for one."""

    def __init__(self, models: DoorModels, make_run: Callable[[str], DoorRun]) -> None:
        self._models = models
        self._make_run = make_run

    async def begin(self, project_id: str, request: CompletionRequest | ChatCompletionRequest) -> OpenAIAnswer:
        """Submit a request. The answer must be closed (`answer.close`).

        Raises: `InvalidRequest` naming the parameter, `NotFound` (the model), `TooManyRequests`, `Unavailable`.
        """
        model = await self._models.open(project_id, request.model)
        echoes: tuple[str, ...] = ()
        if isinstance(request, ChatCompletionRequest):
            asked = await asyncio.to_thread(_chat, model, request)
        else:
            asked, echoes = await asyncio.to_thread(_completion, model, request)
        answer = TextAnswer(asked, self._make_run(project_id))
        await answer.begin()
        return OpenAIAnswer(request, answer, echoes)

    async def whole(
        self, accepted: OpenAIAnswer, disconnected: Disconnected
    ) -> CompletionResponse | ChatCompletionResponse:
        """The whole answer. Raises as `DoorRun.follow`."""
        asked = accepted.answer.asked
        pieces: list[list[TextPiece]] = [[] for _ in range(len(asked.prompts) * asked.n)]
        ends: dict[int, TextNews] = {}
        async with aclosing(accepted.answer.follow(disconnected)) as news:
            async for each in news:
                if each is not None:
                    pieces[each.choice].append(each.piece)
                    if each.finish is not None:
                        ends[each.choice] = each
        return await asyncio.to_thread(_whole, accepted, [joined(each) for each in pieces], ends)

    async def chunks(self, accepted: OpenAIAnswer, disconnected: Disconnected) -> AsyncGenerator[bytes]:
        """The answer as server-sent events. Raises as `DoorRun.follow`."""
        shape = _Chunks(accepted)
        for first in shape.first():
            yield first
        async with aclosing(accepted.answer.follow(disconnected, pause=PAUSE)) as news:
            async for each in news:
                if each is None:
                    yield KEEP_ALIVE
                    continue
                for chunk in shape.of(each):
                    yield chunk
        if accepted.with_usage:
            yield shape.usage()
        yield DONE


# -- requests ----------------------------------------------------------------------------------------------------------
def _stops(request: OpenAISampling) -> tuple[str, ...]:
    stop = request.stop
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _completion(model: DoorModel, request: CompletionRequest) -> tuple[TextRequest, tuple[str, ...]]:
    texts, prompts = _prompts(model, request.prompt)
    n = request.n or 1
    check_size(prompts, n)
    echoes = tuple(
        text if text is not None else model.tokens.decode(prompt)
        for text, prompt in zip(texts, prompts, strict=True)
        if request.echo
    )
    asked = TextRequest(
        model,
        tuple(map(tuple, prompts)),
        n=n,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stops=_stops(request),
        top=request.logprobs,
        score_prompt=bool(request.echo) and request.logprobs is not None,
        stream=bool(request.stream),
        offsets=tuple(map(len, echoes)),
    )
    return asked, echoes


def _prompts(model: DoorModel, prompt: Prompt) -> tuple[list[str | None], list[list[int]]]:
    """The texts (None where there were only token ids) and token ids of the prompts."""
    if isinstance(prompt, str):
        return [prompt], [model.tokens.encode(prompt, special=True)]
    texts = [each for each in prompt if isinstance(each, str)]
    if texts:
        return list(texts), [model.tokens.encode(each, special=True) for each in texts]
    lists = [each for each in prompt if isinstance(each, list)]
    if lists:
        return [None] * len(lists), [list(each) for each in lists]
    return [None], [[each for each in prompt if isinstance(each, int)]]


def _chat(model: DoorModel, request: ChatCompletionRequest) -> TextRequest:
    tools = None
    if request.tools and request.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
    text = model.chat.render([_message(number, each) for number, each in enumerate(request.messages)], tools)
    prompt = tuple(model.tokens.encode(text, special=False))
    n = request.n or 1
    check_size([prompt], n)
    most = request.max_completion_tokens
    return TextRequest(
        model,
        (prompt,),
        n=n,
        max_tokens=request.max_tokens if most is None else most,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stops=_stops(request),
        top=(request.top_logprobs or 0) if request.logprobs else None,
        stream=bool(request.stream),
    )


def _message(number: int, message: ChatMessage) -> Message:
    """As templates read it: text in one piece, arguments of calls as objects."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    found: Message = {"role": "system" if message.role == "developer" else message.role, "content": content or ""}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(number, call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def _arguments(number: int, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        field = f"messages[{number}].tool_calls"
        raise InvalidRequest(f"{field}: arguments must be the text of a JSON object", field=field)
    return value


# -- answers -----------------------------------------------------------------------------------------------------------
def _usage(answer: TextAnswer) -> OpenAIUsage:
    used = answer.used
    return OpenAIUsage(
        prompt_tokens=used.prompt,
        completion_tokens=used.drawn,
        total_tokens=used.prompt + used.drawn,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=used.cached),
    )


def _whole(
    accepted: OpenAIAnswer, pieces: Sequence[TextPiece], ends: dict[int, TextNews]
) -> CompletionResponse | ChatCompletionResponse:
    answer, request = accepted.answer, accepted.request
    finish = [_FINISH[ends[choice].finish or "length"] for choice in range(len(pieces))]
    tokens, scored = answer.asked.model.tokens, answer.asked.top is not None
    if isinstance(request, ChatCompletionRequest):
        return ChatCompletionResponse(
            id=f"chatcmpl-{answer.answer_id}",
            created=answer.created,
            model=request.model,
            choices=[
                ChatChoice(
                    index=choice,
                    message=AssistantMessage(content=piece.text),
                    logprobs=chat_logprobs(tokens, piece.tokens) if scored else None,
                    finish_reason=finish[choice],
                )
                for choice, piece in enumerate(pieces)
            ],
            usage=_usage(answer),
        )
    prompts = [_echo(accepted, number) for number in range(len(answer.asked.prompts))]
    whole = [joined([prompts[choice // answer.asked.n], piece]) for choice, piece in enumerate(pieces)]
    return CompletionResponse(
        id=f"cmpl-{answer.answer_id}",
        created=answer.created,
        model=request.model,
        choices=[
            CompletionChoice(
                index=choice,
                text=piece.text,
                logprobs=completion_logprobs(tokens, piece.tokens, answer.asked.top or 0) if scored else None,
                finish_reason=finish[choice],
            )
            for choice, piece in enumerate(whole)
        ],
        usage=_usage(answer),
    )


def _echo(accepted: OpenAIAnswer, number: int) -> TextPiece:
    """A prompt as the beginning of its choices; nothing if it was not asked for."""
    if not accepted.echoes:
        return TextPiece()
    asked = accepted.answer.asked
    if not asked.score_prompt:
        return TextPiece(accepted.echoes[number])
    scores = prompt_scores(asked.model.tokens, asked.prompts[number], accepted.answer.results[number])
    return TextPiece(accepted.echoes[number], scores)


class _Chunks:
    """The chunks of one stream."""

    def __init__(self, accepted: OpenAIAnswer) -> None:
        self._accepted = accepted
        self._asked = accepted.answer.asked
        self._chat = isinstance(accepted.request, ChatCompletionRequest)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{accepted.answer.answer_id}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": accepted.answer.created,
            "model": accepted.request.model,
        }
        self._no_usage: dict[str, Any] = {"usage": None} if accepted.with_usage else {}

    def first(self) -> list[bytes]:
        """What is known before anything is drawn: the role of a message, the prompt if it is echoed."""
        choices = range(len(self._asked.prompts) * self._asked.n)
        if self._chat:
            return [self._chunk(choice, {"delta": {"role": "assistant", "content": ""}}) for choice in choices]
        echoes = self._accepted.echoes
        return [self._chunk(choice, {"text": echoes[choice // self._asked.n]}) for choice in choices if echoes]

    def of(self, news: TextNews) -> list[bytes]:
        """New text, and the end of a choice in a chunk of its own."""
        found = []
        if news.piece.text or (self._asked.top is not None and news.piece.tokens):
            found.append(self._chunk(news.choice, self._text(news.piece)))
        if news.finish is not None:
            last: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
            found.append(self._chunk(news.choice, last, _FINISH[news.finish]))
        return found

    def usage(self) -> bytes:
        """The last chunk, if the usage was asked for."""
        return event({**self._head, "choices": [], "usage": _usage(self._accepted.answer).model_dump()})

    def _text(self, piece: TextPiece) -> dict[str, Any]:
        tokens, scored = self._asked.model.tokens, self._asked.top is not None
        if self._chat:
            logprobs = chat_logprobs(tokens, piece.tokens).model_dump() if scored else None
            return {"delta": {"content": piece.text}, "logprobs": logprobs}
        found = completion_logprobs(tokens, piece.tokens, self._asked.top or 0).model_dump() if scored else None
        return {"text": piece.text, "logprobs": found}

    def _chunk(self, choice: int, what: dict[str, Any], finish: str | None = None) -> bytes:
        one = {"index": choice, "logprobs": None, **what, "finish_reason": finish}
        return event({**self._head, "choices": [one], **self._no_usage})
