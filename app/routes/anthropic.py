"""The Anthropic-compatible routes: messages and their tokens counted."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.error_shapes import anthropic_error
from app.routes.doors import read_door, respond
from app.services.doors.sse import event
from schemas.errors import InvalidRequest
from schemas.http.anthropic import CountTokensRequest, MessageResponse, MessagesRequest, TokenCount

router = APIRouter(tags=["anthropic"])

VERSIONS = ("2026-10-21", "2023-06-01")
"""For what is read here they differ in one thing: the newer one has no temperature, top_p and top_k. They are honoured
under both, since the models behind this door have them."""

Beta = Annotated[
    Literal["true"] | None,
    Query(description="Sent by the beta methods of Anthropic's clients. The same is read with and without it."),
]


@router.post("/messages", operation_id="anthropic_messages", response_model=MessageResponse)
async def anthropic_messages(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep, beta: Beta = None
) -> Response:
    """Say what comes next in a chat."""
    _check_version(request)
    body = await read_door(request, settings, MessagesRequest)
    door = services.anthropic
    accepted = await door.begin(principal.project_id, body)
    return await respond(
        request,
        accepted.answer,
        stream=bool(body.stream),
        events=partial(door.events, accepted),
        whole=partial(door.whole, accepted),
        failed=_failed,
    )


@router.post("/messages/count_tokens", operation_id="anthropic_count_tokens")
async def anthropic_count_tokens(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep, beta: Beta = None
) -> TokenCount:
    """How many tokens the prompt of a message would have. Nothing is drawn."""
    _check_version(request)
    body = await read_door(request, settings, CountTokensRequest)
    return await services.anthropic.count(principal.project_id, body)


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", VERSIONS[0])
    if version not in VERSIONS:
        raise InvalidRequest(
            f"anthropic-version {version[:50]!r} is not spoken here; {' and '.join(VERSIONS)} are",
            field="anthropic-version",
        )


def _failed(status: int, body: Mapping[str, Any]) -> bytes:
    return event(anthropic_error(status, body), "error")
