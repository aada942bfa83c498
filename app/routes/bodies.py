"""Reading the bodies of resource routes, and noting the number of a request that is refused.

A training request that is refused still uses up its `seq_id`: the client goes on with the next one, which must not wait
for it. Not responsible for what is in a body (`app/codec`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError

from app.codec import (
    BodyTooLarge,
    BodyUnreadable,
    CodecLimits,
    content_encoding,
    media_type,
    parse_request,
    peek_identity,
    read_body,
)
from app.codec.forward_backward import JSON
from app.errors import validation_error
from app.principal import Principal
from app.services import Services
from app.settings import Settings
from schemas.errors import SeqIdConflict, TinsmithError, TooManyRequests, UnsupportedMediaType
from schemas.http.base import RequestModel

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=RequestModel)
T = TypeVar("T")

QUICK_BYTES = 64 * 1024
"""A body up to which parsing is faster than handing it to a thread; a longer one must not hold up the event loop."""


def codec_limits(settings: Settings) -> CodecLimits:
    """The limits of one body under these settings."""
    return CodecLimits(max_body_bytes=settings.max_body_bytes)


async def read_model(request: Request, settings: Settings, model: type[M], *, absent: M | None = None) -> M:
    """The JSON body as `model`; `absent`, if given, stands for an empty body.

    Raises `InvalidRequest`, `PayloadTooLarge`, `UnsupportedMediaType`.
    """
    body = await read_body(request, codec_limits(settings))
    return absent if absent is not None and not body else await parse_model(request, body, model)


async def parse_model(request: Request, body: bytes, model: type[M]) -> M:
    """As `read_model`, for a body that has been read."""
    kind = media_type(request.headers.get("content-type"))
    if kind != JSON:
        raise UnsupportedMediaType(f"Content-Type {kind[:100]!r} is not read here; send {JSON}", field="Content-Type")
    if len(body) <= QUICK_BYTES:
        return parse_request(body, model)
    return await asyncio.to_thread(parse_request, body, model)


def checked(model: type[M], value: object) -> M:
    """`value` as `model`. Raises `InvalidRequest` that names each wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False), model) from None


async def numbered(
    request: Request,
    settings: Settings,
    services: Services,
    principal: Principal,
    accept: Callable[[bytes], Awaitable[T]],
) -> T:
    """Read the body and `accept` it; if that is refused, note that the request's `seq_id` is used up."""
    body, encoding = b"", "identity"
    try:
        body = await read_body(request, codec_limits(settings))
        return await accept(body)
    except TinsmithError as error:
        if isinstance(error, BodyTooLarge | BodyUnreadable):
            body, encoding = error.prefix, content_encoding(request.headers.get("content-encoding"))
        # One that is to be sent again, with its number, has not used it up.
        if 400 <= error.status < 500 and not isinstance(error, SeqIdConflict | TooManyRequests):
            await _note_refusal(request, services, principal, body, encoding)
        raise


async def _note_refusal(request: Request, services: Services, principal: Principal, body: bytes, encoding: str) -> None:
    identity = await asyncio.to_thread(peek_identity, body, request.headers.get("content-type", ""), encoding)
    if identity is None:
        return
    model_id, seq_id = identity
    try:
        await services.runs.note_refusal(principal.project_id, model_id, seq_id)
    except TinsmithError:
        logger.exception("the refusal of seq_id %d of %s could not be noted", seq_id, model_id)
