"""What the routes for clients of other protocols share: strict bodies, streams that end with their client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ValidationError
from starlette.types import Receive, Scope, Send

from app.codec import media_type, parse_json, read_body
from app.codec.forward_backward import JSON
from app.errors import error_body, request_id_of, validation_error
from app.routes.bodies import QUICK_BYTES, codec_limits
from app.services.doors.answers import TextAnswer
from app.services.waiting import Disconnected
from app.settings import Settings
from schemas.errors import InvalidRequest, TinsmithError, UnsupportedMediaType
from schemas.http.base import RequestModel

M = TypeVar("M", bound=RequestModel)

_UNION_MEMBER = re.compile(r"\.(str|int|float|bool|dict|list|none|function-\w+|constrained-\w+|text|tool_use)\b.*$")
"""Where pydantic names the kind of value that it tried: no part of the parameter's name."""


async def read_door(request: Request, settings: Settings, model: type[M]) -> M:
    """The JSON body as `model`.

    Raises: `InvalidRequest` naming the parameter and, if there is no such parameter, those that there are;
    `PayloadTooLarge`, `UnsupportedMediaType`.
    """
    body = await read_body(request, codec_limits(settings))
    kind = media_type(request.headers.get("content-type"))
    if kind != JSON:
        raise UnsupportedMediaType(f"Content-Type {kind[:100]!r} is not read here; send {JSON}", field="Content-Type")
    if len(body) <= QUICK_BYTES:
        return _parse(body, model)
    return await asyncio.to_thread(_parse, body, model)


def _parse(body: bytes, model: type[M]) -> M:
    value = parse_json(body)
    if isinstance(value, dict):
        unknown = [name for name in value if name not in model.model_fields]
        if unknown:
            accepted = ", ".join(sorted(model.model_fields))
            raise InvalidRequest(
                f"{unknown[0][:100]} is not supported here; accepted are: {accepted}",
                field=unknown[0][:100],
                code="unsupported_parameter",
            )
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _named(validation_error(error.errors(include_url=False))) from None


def _named(error: InvalidRequest) -> InvalidRequest:
    """The same error; its field is the parameter, without the kinds of value that were tried for it."""
    if error.field is not None:
        error.field = _UNION_MEMBER.sub("", error.field)
    return error


def disconnection(request: Request) -> Disconnected:
    """What returns when the client has gone away. The body must have been read."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return disconnected


class EventStream(StreamingResponse):
    """Server-sent events of one answer. However it ends, the answer is closed.

    Args:
        events: the events; an error of the server's own that it raises becomes a last event.
        failed: puts the last event together, from the status and Tinsmith's own form of the error.
    """

    def __init__(
        self,
        request: Request,
        answer: TextAnswer,
        events: AsyncGenerator[bytes],
        failed: Callable[[int, Mapping[str, Any]], bytes],
    ) -> None:
        super().__init__(
            _until_error(request, events, failed),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


async def respond(
    request: Request,
    answer: TextAnswer,
    *,
    stream: bool,
    events: Callable[[Disconnected], AsyncGenerator[bytes]],
    whole: Callable[[Disconnected], Awaitable[BaseModel]],
    failed: Callable[[int, Mapping[str, Any]], bytes],
) -> Response:
    """An accepted answer, as events or as one document. Raises what `whole` raises; the answer is closed anyway."""
    gone = disconnection(request)
    if stream:
        return EventStream(request, answer, events(gone), failed)
    try:
        document = await whole(gone)
    finally:
        answer.close()
    return Response(document.model_dump_json(), media_type=JSON)


async def _until_error(
    request: Request, events: AsyncGenerator[bytes], failed: Callable[[int, Mapping[str, Any]], bytes]
) -> AsyncGenerator[bytes]:
    try:
        async for each in events:
            yield each
    except TinsmithError as error:
        yield failed(error.status, error_body(error, request_id_of(request)))
    finally:
        await events.aclose()
