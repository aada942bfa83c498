"""Saving and loading weights."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.routes.bodies import numbered, parse_model, read_model
from app.services import Services
from app.services.copies import TOKEN_HEADER, CopyOrder
from app.services.paths import session_of
from app.services.runs import optimizer_type
from schemas.errors import InvalidRequest
from schemas.requests import (
    CopyWeightsRequest,
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    WeightsInfoRequest,
)
from schemas.responses import CopyWeightsResponse, OptimizerConfigResult, UntypedPromise, WeightsInfoResponse

router = APIRouter(tags=["weights"])

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="X-Idempotency-Key", min_length=1, max_length=256, description="The same key again gives the same copy."
    ),
]
WeightsAccessToken = Annotated[
    str | None,
    Header(
        alias=TOKEN_HEADER, min_length=1, max_length=4096, description="An API key of the project that owns the source."
    ),
]


@router.post("/save_weights", operation_id="save_weights", response_model_exclude_none=True)
async def save_weights(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Save a training checkpoint: the adapter and its optimizer state."""

    async def accept(body: bytes) -> UntypedPromise:
        parsed = await parse_model(request, body, SaveWeightsRequest)
        record = await services.saves.save(principal.project_id, parsed)
        return _promise(services, record.request_id, parsed.model_id)

    return await numbered(request, settings, services, principal, accept)


@router.post("/save_weights_for_sampler", operation_id="save_weights_for_sampler", response_model_exclude_none=True)
async def save_weights_for_sampler(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Save weights for sampling, under a name or straight into a new sampling session."""

    async def accept(body: bytes) -> UntypedPromise:
        parsed = await parse_model(request, body, SaveWeightsForSamplerRequest)
        record = await services.saves.save_for_sampler(principal.project_id, parsed)
        return _promise(services, record.request_id, parsed.model_id)

    return await numbered(request, settings, services, principal, accept)


@router.post("/save_weights_external", operation_id="save_weights_external", response_model_exclude_none=True)
async def save_weights_external(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Export the adapter for other programs: a PEFT folder, to be fetched by signed addresses."""

    async def accept(body: bytes) -> UntypedPromise:
        parsed = await parse_model(request, body, SaveWeightsExternalRequest)
        record = await services.saves.save_external(principal.project_id, parsed)
        return _promise(services, record.request_id, parsed.model_id)

    return await numbered(request, settings, services, principal, accept)


@router.post("/load_weights", operation_id="load_weights", response_model_exclude_none=True)
async def load_weights(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Load a checkpoint into a model, or create a model from it.

    Without `optimizer`, the model gets fresh optimizer moments; the accumulated gradient is cleared in any case.
    """

    async def accept(body: bytes) -> UntypedPromise:
        parsed = await parse_model(request, body, LoadWeightsRequest)
        record, model_id = await services.loads.load(principal.project_id, parsed)
        return _promise(services, record.request_id, model_id)

    return await numbered(request, settings, services, principal, accept)


@router.post("/copy_weights", operation_id="copy_weights")
async def copy_weights(
    request: Request,
    principal: PrincipalDep,
    services: ServicesDep,
    settings: SettingsDep,
    idempotency_key: IdempotencyKey = None,
    weights_access_token: WeightsAccessToken = None,
) -> CopyWeightsResponse:
    """Copy a checkpoint. The copy outlives its source, and belongs to a new training run that cannot be trained on."""
    body = await read_model(request, settings, CopyWeightsRequest)
    if weights_access_token is not None and body.weights_access_token not in (None, weights_access_token):
        raise InvalidRequest(
            f"weights_access_token differs from the header {TOKEN_HEADER}; give one of them",
            field="weights_access_token",
        )
    order = CopyOrder(
        project_id=principal.project_id,
        key_id=principal.key_id,
        request=body,
        access_token=weights_access_token or body.weights_access_token,
        idempotency_key=idempotency_key,
    )
    return CopyWeightsResponse(tinker_path=await services.copies.copy(order))


@router.post("/weights_info", operation_id="weights_info", response_model_exclude_none=True)
async def weights_info(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> WeightsInfoResponse:
    """The base model and the geometry of a checkpoint: what it takes to make a model that can load it."""
    body = await read_model(request, settings, WeightsInfoRequest)
    checkpoint = await services.checkpoints.readable((principal.project_id,), body.tinker_path, field="tinker_path")
    return WeightsInfoResponse(
        base_model=checkpoint.base_model,
        is_lora=True,
        lora_rank=checkpoint.lora.rank,
        train_unembed=checkpoint.lora.train_unembed,
        train_mlp=checkpoint.lora.train_mlp,
        train_attn=checkpoint.lora.train_attn,
        optimizer_config=OptimizerConfigResult.of(optimizer_type(checkpoint.optimizer_type)),
    )


def _promise(services: Services, request_id: str, model_id: str) -> UntypedPromise:
    services.housekeeping.touch(session_of(model_id))
    return UntypedPromise(request_id=request_id, model_id=model_id)
