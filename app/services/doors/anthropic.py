"""The Anthropic door: messages, whole or as a stream of events, and their tokens counted.

Responsible for what these requests mean and for the shapes of their answers. Not responsible for how text is made
(`answers.py`) or for HTTP (`app/routes/anthropic.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from app.services.chat import Message
from app.services.doors.answers import TextAnswer, TextNews, TextRequest, check_size
from app.services.doors.models import DoorModel, DoorModels
from app.services.doors.runs import DoorRun
from app.services.doors.sse import PAUSE, event
from app.services.doors.text_stream import Finish
from app.services.waiting import Disconnected
from schemas.errors import InvalidRequest
from schemas.http.anthropic import (
    AnswerBlock,
    AnthropicMessage,
    AnthropicUsage,
    CountTokensRequest,
    MessageResponse,
    MessagesRequest,
    TextBlock,
    TokenCount,
    ToolResultBlock,
    ToolUseBlock,
)

_STOP_REASON: dict[Finish, Literal["end_turn", "max_tokens", "stop_sequence"]] = {
    "eos": "end_turn",
    "stop": "stop_sequence",
    "length": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class AnthropicAnswer:
    """An accepted request."""

    request: MessagesRequest
    answer: TextAnswer


class AnthropicDoor:
    """Messages for every project. `make_run` begins a run of samples for one."""

    def __init__(self, models: DoorModels, make_run: Callable[[str], DoorRun]) -> None:
        self._models = models
        self._make_run = make_run

    async def begin(self, project_id: str, request: MessagesRequest) -> AnthropicAnswer:
        """Submit a request. The answer must be closed (`answer.close`).

        Raises: `InvalidRequest` naming the parameter, `NotFound` (the model), `TooManyRequests`, `Unavailable`.
        """
        model = await self._models.open(project_id, request.model)
        prompt = await asyncio.to_thread(_prompt, model, request)
        asked = TextRequest(
            model,
            (prompt,),
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stops=tuple(request.stop_sequences or ()),
            stream=bool(request.stream),
        )
        answer = TextAnswer(asked, self._make_run(project_id))
        await answer.begin()
        return AnthropicAnswer(request, answer)

    async def count(self, project_id: str, request: CountTokensRequest) -> TokenCount:
        """How many tokens the prompt of a request has. Raises as `begin`."""
        model = await self._models.open(project_id, request.model)
        return TokenCount(input_tokens=len(await asyncio.to_thread(_prompt, model, request)))

    async def whole(self, accepted: AnthropicAnswer, disconnected: Disconnected) -> MessageResponse:
        """The whole answer. Raises as `DoorRun.follow`."""
        texts: list[str] = []
        last: TextNews | None = None
        async with aclosing(accepted.answer.follow(disconnected)) as news:
            async for each in news:
                if each is not None:
                    texts.append(each.piece.text)
                    last = each
        return MessageResponse(
            id=f"msg_{accepted.answer.answer_id}",
            model=accepted.request.model,
            content=[AnswerBlock(text="".join(texts))],
            stop_reason=_STOP_REASON[(last and last.finish) or "length"],
            stop_sequence=last.stopped_by if last is not None else None,
            usage=_usage(accepted.answer),
        )

    async def events(self, accepted: AnthropicAnswer, disconnected: Disconnected) -> AsyncGenerator[bytes]:
        """The answer as server-sent events. Raises as `DoorRun.follow`."""
        yield _event("message_start", message=_begun(accepted))
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        last: TextNews | None = None
        async with aclosing(accepted.answer.follow(disconnected, pause=PAUSE)) as news:
            async for each in news:
                if each is None:
                    yield _event("ping")
                    continue
                last = each
                if each.piece.text:
                    delta = {"type": "text_delta", "text": each.piece.text}
                    yield _event("content_block_delta", index=0, delta=delta)
        yield _event("content_block_stop", index=0)
        reason = _STOP_REASON[(last and last.finish) or "length"]
        ended = {"stop_reason": reason, "stop_sequence": last.stopped_by if last is not None else None}
        yield _event("message_delta", delta=ended, usage=_usage(accepted.answer).model_dump())
        yield _event("message_stop")


# -- requests ----------------------------------------------------------------------------------------------------------
def _prompt(model: DoorModel, request: CountTokensRequest) -> tuple[int, ...]:
    if request.messages[-1].role != "user":
        raise InvalidRequest(
            "messages: the last message is the assistant's; beginning its answer for it is not supported, so the last "
            "message must be the user's",
            field="messages",
        )
    messages: list[Message] = []
    if request.system:
        messages.append({"role": "system", "content": _text(request.system)})
    for number, message in enumerate(request.messages):
        messages += _messages(number, message)
    tools = None
    if request.tools and (request.tool_choice is None or request.tool_choice.type != "none"):
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    **({} if tool.description is None else {"description": tool.description}),
                    "parameters": tool.input_schema,
                },
            }
            for tool in request.tools
        ]
    prompt = tuple(model.tokens.encode(model.chat.render(messages, tools), special=False))
    check_size([prompt], 1)
    return prompt


def _messages(number: int, message: AnthropicMessage) -> list[Message]:
    """A message as templates read it: results of tools are messages of their own, before what the user says."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    misplaced: list[ToolUseBlock | ToolResultBlock] = []
    if message.role != "assistant":
        misplaced += calls
    if message.role != "user":
        misplaced += results
    if misplaced:
        field = f"messages[{number}].content"
        raise InvalidRequest(
            f"{field}: a block of type {misplaced[0].type!r} is not in a message of role {message.role!r}", field=field
        )
    found: list[Message] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")} for block in results
    ]
    if texts or calls:
        said: Message = {"role": message.role, "content": _text(texts)}
        if calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
                for call in calls
            ]
        found.append(said)
    return found


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


# -- answers -----------------------------------------------------------------------------------------------------------
def _usage(answer: TextAnswer) -> AnthropicUsage:
    used = answer.used
    return AnthropicUsage(
        input_tokens=used.prompt - used.cached, cache_read_input_tokens=used.cached, output_tokens=used.drawn
    )


def _begun(accepted: AnthropicAnswer) -> dict[str, Any]:
    """The message before anything is drawn. What was cached is known at the end, and told then."""
    length = sum(map(len, accepted.answer.asked.prompts))
    usage = AnthropicUsage(input_tokens=length, cache_read_input_tokens=0, output_tokens=0)
    return {
        "id": f"msg_{accepted.answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": accepted.request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage.model_dump(),
    }


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)
