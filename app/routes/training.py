"""The training primitives: forward, forward_backward, optim_step, zero_grad.

A POST is answered as soon as the request is durable; it never waits for work, nor for an earlier request.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.principal import Principal
from app.routes.bodies import codec_limits, numbered, parse_model
from app.services import Services
from app.services.paths import session_of
from app.settings import Settings
from schemas.requests import OptimStepRequest, ZeroGradRequest
from schemas.responses import UntypedPromise

router = APIRouter(tags=["training"])


@router.post("/forward_backward", operation_id="forward_backward", response_model_exclude_none=True)
async def forward_backward(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Add the gradient of a batch (of its summed loss) to the model's accumulated gradient."""
    return await _batch(request, principal, services, settings, forward=False)


@router.post("/forward", operation_id="forward", response_model_exclude_none=True)
async def forward(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Logprobs and loss of a batch, without gradient."""
    return await _batch(request, principal, services, settings, forward=True)


@router.post("/optim_step", operation_id="optim_step", response_model_exclude_none=True)
async def optim_step(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Apply the accumulated gradient with the optimizer of the model, and clear it."""

    async def accept(body: bytes) -> UntypedPromise:
        parsed = await parse_model(request, body, OptimStepRequest)
        record = await services.training.optim_step(principal.project_id, parsed)
        return _promise(services, record.request_id, parsed.model_id)

    return await numbered(request, settings, services, principal, accept)


@router.post("/zero_grad", operation_id="zero_grad", response_model_exclude_none=True)
async def zero_grad(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Clear the accumulated gradient."""

    async def accept(body: bytes) -> UntypedPromise:
        parsed = await parse_model(request, body, ZeroGradRequest)
        record = await services.training.zero_grad(principal.project_id, parsed)
        return _promise(services, record.request_id, parsed.model_id)

    return await numbered(request, settings, services, principal, accept)


async def _batch(
    request: Request, principal: Principal, services: Services, settings: Settings, *, forward: bool
) -> UntypedPromise:
    async def accept(body: bytes) -> UntypedPromise:
        content_type = request.headers.get("content-type", "")
        record, model_id = await services.training.forward_backward(
            principal.project_id, body, content_type, codec_limits(settings), forward=forward
        )
        return _promise(services, record.request_id, model_id)

    return await numbered(request, settings, services, principal, accept)


def _promise(services: Services, request_id: str, model_id: str) -> UntypedPromise:
    services.housekeeping.touch(session_of(model_id))
    return UntypedPromise(request_id=request_id, model_id=model_id)
