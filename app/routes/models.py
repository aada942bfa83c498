"""Models: beginning a training run, and asking what one is."""

from __future__ import annotations

from typing import TypedDict

from fastapi import APIRouter, Request

from app.dependencies import PrincipalDep, ServicesDep, SettingsDep
from app.routes.bodies import read_model
from app.services.paths import session_of
from app.services.runs import optimizer_of
from schemas.operations import LORA_ALPHA, LoraSpec
from schemas.requests import CreateModelRequest, GetInfoRequest, UnloadModelRequest
from schemas.responses import GetInfoResponse, ModelData, OptimizerConfigResult, UntypedPromise

router = APIRouter(tags=["training"])

_FORWARDING = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


@router.post("/create_model", operation_id="create_model", response_model_exclude_none=True)
async def create_model(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Begin a training run on a base model; its id is `{session_id}:train:{model_seq_id}`."""
    body = await read_model(request, settings, CreateModelRequest)
    record, model_id = await services.training.create_model(principal.project_id, body)
    services.housekeeping.touch(body.session_id)
    return UntypedPromise(request_id=record.request_id, model_id=model_id)


@router.post("/unload_model", operation_id="unload_model", response_model_exclude_none=True)
async def unload_model(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> UntypedPromise:
    """Free the live weights of a model once all that it was asked for before is done. Its checkpoints stay."""
    body = await read_model(request, settings, UnloadModelRequest)
    record = await services.training.unload(principal.project_id, body)
    services.housekeeping.touch(session_of(body.model_id))
    return UntypedPromise(request_id=record.request_id, model_id=body.model_id)


@router.post("/get_info", operation_id="get_info", response_model_exclude_none=True)
async def get_info(
    request: Request, principal: PrincipalDep, services: ServicesDep, settings: SettingsDep
) -> GetInfoResponse:
    """What a model was made of. The geometry is absent only while a model made from a checkpoint is still loading."""
    body = await read_model(request, settings, GetInfoRequest)
    run = await services.runs.owned(principal.project_id, body.model_id)
    forwarded = any(name in request.headers for name in _FORWARDING)
    host = request.client.host if request.client else None
    return GetInfoResponse(
        model_id=run.model_id,
        model_data=ModelData(
            arch=services.models.architecture(run.base_model),
            model_name=run.base_model,
            tokenizer_id=services.models.tokenizer_id(run.base_model, host, forwarded),
        ),
        model_name=run.base_model,
        **_geometry(run.lora),
        optimizer_config=OptimizerConfigResult.of(optimizer_of(run)),
    )


class _Geometry(TypedDict, total=False):
    lora_rank: int
    lora_alpha: int
    lora_seed: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool


def _geometry(lora: LoraSpec | None) -> _Geometry:
    """The adapter's fields of `get_info`."""
    if lora is None:
        return {}
    return {
        "lora_rank": lora.rank,
        "lora_alpha": LORA_ALPHA,
        "lora_seed": lora.seed,
        "train_attn": lora.train_attn,
        "train_mlp": lora.train_mlp,
        "train_unembed": lora.train_unembed,
    }
