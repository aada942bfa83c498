"""Texts and chats as token ids, for clients without a tokenizer of their own, as the web console."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.routes.bodies import read_model
from app.services.doors.models import DoorModel
from schemas.http.tokenize import TokenizedItem, TokenizeItem, TokenizeResponse
from schemas.requests import TokenizeRequest

router = APIRouter(tags=["sampling"])


@router.post("/tokenize", operation_id="tokenize")
async def tokenize(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> TokenizeResponse:
    """What `completions` takes as token ids."""
    body = await read_model(request, settings, TokenizeRequest)
    model = await services.door_models.open(principal.project_id, body.model)
    return TokenizeResponse(items=await asyncio.to_thread(lambda: [_tokens(model, item) for item in body.items]))


def _tokens(model: DoorModel, item: TokenizeItem) -> TokenizedItem:
    if item.messages is not None:
        text = model.chat.render([message.model_dump() for message in item.messages], None)
        prompt = model.tokens.encode(text, special=False)
    else:
        prompt = model.tokens.encode(item.prompt or "", special=True)
    completion = model.tokens.encode(item.completion, special=False) if item.completion else []
    return TokenizedItem(prompt_tokens=prompt, completion_tokens=completion)
