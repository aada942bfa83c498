"""The OpenAI-compatible routes: models, completions, chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.error_shapes import openai_error
from app.routes.doors import read_door, respond
from app.services import Services
from app.services.doors.models import ListedModel
from app.services.doors.sse import event
from schemas.http.openai import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    OpenAIModel,
    OpenAIModelList,
)

router = APIRouter(tags=["openai"])


@router.get("/models", operation_id="openai_list_models")
async def openai_list_models(principal: PrincipalDep, services: ServicesDep) -> OpenAIModelList:
    """What `model` takes: the base models, then the project's own sampler checkpoints, newest first."""
    listed = await services.door_models.listed(principal.project_id)
    return OpenAIModelList(data=[_model(each) for each in listed])


@router.get("/models/{model:path}", operation_id="openai_get_model")
async def openai_get_model(
    model: Annotated[str, Path(max_length=512, description="The name.")],
    principal: PrincipalDep,
    services: ServicesDep,
) -> OpenAIModel:
    """One model."""
    return _model(await services.door_models.single(principal.project_id, model))


@router.post("/completions", operation_id="openai_completions", response_model=CompletionResponse)
async def openai_completions(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> Response:
    """Continue a prompt."""
    body = await read_door(request, settings, CompletionRequest)
    return await _answer(request, services, principal.project_id, body)


@router.post("/chat/completions", operation_id="openai_chat_completions", response_model=ChatCompletionResponse)
async def openai_chat_completions(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> Response:
    """Say what comes next in a chat."""
    body = await read_door(request, settings, ChatCompletionRequest)
    return await _answer(request, services, principal.project_id, body)


async def _answer(
    request: Request, services: Services, project_id: str, body: CompletionRequest | ChatCompletionRequest
) -> Response:
    door = services.openai
    accepted = await door.begin(project_id, body)
    return await respond(
        request,
        accepted.answer,
        stream=bool(body.stream),
        events=partial(door.chunks, accepted),
        whole=partial(door.whole, accepted),
        failed=_failed,
    )


def _failed(status: int, body: Mapping[str, Any]) -> bytes:
    return event(openai_error(status, body))


def _model(listed: ListedModel) -> OpenAIModel:
    return OpenAIModel(id=listed.name, created=listed.created, owned_by=listed.owned_by)
