"""Losses that clients upload."""

from __future__ import annotations

from fastapi import APIRouter, Request

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.routes.bodies import read_model
from schemas.requests import CreateCustomLossRequest
from schemas.responses import UntypedPromise

router = APIRouter(tags=["training"])


@router.post("/create_custom_loss", operation_id="create_custom_loss", response_model_exclude_none=True)
async def create_custom_loss(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Upload a loss as a graph of allowed operations; `forward_backward` runs it by the id in the result."""
    body = await read_model(request, settings, CreateCustomLossRequest)
    record = await services.custom_losses.create(principal.project_id, body)
    services.housekeeping.touch(body.session_id)
    return UntypedPromise(request_id=record.request_id)
